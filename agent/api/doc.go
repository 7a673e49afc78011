// Package api is what other programs read of an agent: the annotation that says how a node is, the answer to what a label would do, and
// the diagnosis. It is data in JSON and no more, so that a program for people's own machines links nothing of the daemon.
package api
