// Package drain empties a node of the pods that must go, by eviction, as the policy says and no faster than disruption budgets allow.
//
// The packages below it are its neighbours: holders finds who holds a GPU, fence keeps other pods out meanwhile, and host answers for the
// machine. drain knows nothing of GPU geometry, of settings or of the agent's loop, and it never waits: each call asks, answers and
// returns, and its caller decides when to ask again.
package drain
