// Package drain empties a node of the pods that must go, by eviction, as the policy says and no faster than disruption budgets allow.
//
// Of the packages below it, holders finds the pods and processes that hold a GPU, fence keeps other pods out, and host asks the
// machine's kernel, systemd and logind. drain knows nothing of GPU geometry, of settings or of the agent's loop, and it never waits: each
// call asks the API server and returns, and its caller decides when to ask again.
package drain
