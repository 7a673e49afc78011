// Package fleet lets the nodes of a pool agree, without a controller, how many of them are unavailable at once.
//
// A pool has one Lease, which every change of who has a slot replaces by its resourceVersion: of two nodes that decide at the
// same time, one has to look again. A slot is about concurrency alone. It says nothing of who owns a cordon, and losing it ends
// no change that has begun.
package fleet
