// Package show writes, for a terminal, how a GPU is cut and the agent's diagnosis of a node. It decides nothing. Its callers make texts of
// others legible.
package show
