//go:build !race

package node

// agentFlags are what the agent is built with besides the usual: nothing.
var agentFlags []string
