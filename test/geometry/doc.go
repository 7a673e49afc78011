// Package geometry walks the solver, the planner and both drivers through the geometries of every simulated model. Its
// tests compare each change with their own search, and each result with NVIDIA's mig-parted. The search learns from the
// simulated hardware what can stand, and knows nothing of the solver.
//
// README.md next to this folder says how to run longer walks, and gives the figures.
package geometry
