// Package drain empties a node of the pods that must go, by eviction, as the policy says and no faster than disruption budgets allow.
//
// Who has to go, and how the node is kept empty meanwhile, is for the packages below it: holders finds who holds a GPU, fence keeps
// others out, and host answers for the machine. It knows nothing of GPU geometry, of settings or of the agent's loop, and nothing here
// waits: each call asks, answers and returns, and its caller decides when to ask again.
package drain
