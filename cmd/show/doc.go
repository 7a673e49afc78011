// Package show writes for people in a terminal what the agent has found: how a GPU is cut, and why a node is as it is. It decides nothing,
// and what others wrote in it is for its caller to make legible.
package show
