// Package config has the agent's settings, the keys that the agent reads and writes on a node, and the reasons that it reports.
//
// It turns text into values that need no further checks. Neither it nor the packages below it know the cluster or the driver. Package check reads
// users' files and collects their mistakes. catalog has the MIG configs and profiles, maintenance the windows. migparted and deviceplugin read
// NVIDIA's formats.
package config
