// Package config holds what people tell the agent and the names by which it answers: the keys it reads and writes on a
// node, the reasons it gives, the catalog of named MIG configs and profiles, and the agent's own settings.
//
// It turns text into values that need no further checks. It knows neither the cluster nor the driver, and no formats but
// its own, of settings and profiles: NVIDIA's are read by the packages below it.
package config
