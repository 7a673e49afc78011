// Package config has the names by which the agent answers, which are the keys that it reads and writes on a node and the reasons that it
// reports, and the agent's own settings.
//
// It turns text into values that need no further checks. Neither it nor the packages below it know the cluster or the driver: check reads what
// people write and collects their mistakes, catalog has the MIG configs and profiles, maintenance the windows, and migparted and deviceplugin
// read NVIDIA's formats.
package config
