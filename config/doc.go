// Package config has the inputs that users give to the agent and the names by which the agent answers: the keys that it reads and writes
// on a node, the reasons that it reports, the catalog of named MIG configs and profiles, and the agent's own settings.
//
// It turns text into values that need no further checks. It knows neither the cluster nor the driver, and no formats but its own, of
// settings, profiles and maintenance: the packages below it read NVIDIA's formats.
package config
