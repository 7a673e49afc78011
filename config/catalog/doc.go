// Package catalog has what the labels of a node can ask for: MIG configs by name, the administrator's and those that are generated for each
// node, and profiles. It says what a node and NVIDIA's device plugin can do of that.
package catalog
