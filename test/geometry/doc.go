// Package geometry walks the solver, the planner and both drivers through the geometries of every simulated model. Its
// tests hold each change against a search of their own, which learns from the simulated hardware what can stand and knows
// nothing of the solver, and each result against NVIDIA's mig-parted.
//
// README.md beside this folder says how to run longer walks, and what the figures are.
package geometry
