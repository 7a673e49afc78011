// Package drain evicts the pods that must leave a node, as the policy says and no faster than disruption budgets allow.
//
// Below it, holders finds the pods and processes that hold a GPU, fence keeps other pods out, and host talks to the machine's kernel, systemd and
// logind. Package drain does not know GPU geometry, settings or the agent's loop. It never waits: each call queries the API server and returns, and
// its caller decides when to retry.
package drain
