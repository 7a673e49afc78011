//go:build race

package node

// agentFlags build the agent with the race detector too: what it finds is in the agent's log.
var agentFlags = []string{"-race"}
