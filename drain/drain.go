// Package drain empties a node of the pods that must go, and keeps others out meanwhile: the fence around the node and
// whose cordon it is, who holds a GPU, and eviction.
//
// It knows nothing of GPU geometry, of settings or of the agent's loop. Keys and taints come in as values, devices as
// the identities that kubelet uses, and nothing here waits: each call asks, answers and returns, and its caller decides
// when to ask again.
package drain
