// Package show writes, for a terminal, the agent's diagnosis of a node and its verdict on a change. It decides nothing. Its callers make
// texts of others printable.
package show
