// Package catalog has the configs that a node's labels can request: profiles, and MIG configs by name, both the administrator's and those generated
// for each node. It checks what a node and NVIDIA's device plugin can do of them.
package catalog
