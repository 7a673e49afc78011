// Command pluginconfig reads config files like NVIDIA's k8s-device-plugin v0.19.3, and prints its reading of them for
// tests. Each file argument becomes one element of a JSON list.
//
// It is a separate module so that the requirements of NVIDIA's package never decide the versions that this project is
// built with.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	spec "github.com/NVIDIA/k8s-device-plugin/api/config/v1"
	"github.com/urfave/cli/v2"
)

// meaning is the plugin's reading of one file.
type meaning struct {
	Refused      string            `json:"refused,omitempty"` // what the plugin says before it ends
	Strategy     string            `json:"strategy,omitempty"`
	Replicas     map[string]int    `json:"replicas,omitempty"` // by the name of the resource
	Offered      map[string]string `json:"offered,omitempty"`  // under which name each is advertised
	FailMultiple bool              `json:"failMultiple,omitempty"`
	MIGStrategy  string            `json:"migStrategy,omitempty"`
	MPSRoot      string            `json:"mpsRoot,omitempty"`
}

func main() {
	var all []meaning
	for _, file := range os.Args[1:] {
		all = append(all, read(file))
	}
	if err := json.NewEncoder(os.Stdout).Encode(all); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// read goes the way of the plugin's main.go: flags of the command line, the file, and what it does not support yet.
func read(file string) (m meaning) {
	app := cli.NewApp()
	app.Flags = []cli.Flag{&cli.StringFlag{Name: "config-file"}}
	app.Action = func(c *cli.Context) error {
		config, err := spec.NewConfig(c, c.App.Flags)
		if err != nil {
			return err
		}
		spec.DisableResourceNamingInConfig(config)
		m = meaningOf(config)
		return nil
	}
	if err := app.Run([]string{"nvidia-device-plugin", "--config-file", file}); err != nil {
		return meaning{Refused: err.Error()}
	}
	return m
}

func meaningOf(config *spec.Config) meaning {
	m := meaning{Strategy: string(config.Sharing.SharingStrategy()), Replicas: map[string]int{}, Offered: map[string]string{}}
	resources := config.Sharing.ReplicatedResources()
	for _, r := range resources.Resources {
		m.Replicas[string(r.Name)] = r.Replicas
		m.Offered[string(r.Name)] = string(r.Name)
		if r.Rename != "" {
			m.Offered[string(r.Name)] = string(r.Rename)
		}
	}
	m.FailMultiple = resources.FailRequestsGreaterThanOne
	if s := config.Flags.MigStrategy; s != nil {
		m.MIGStrategy = *s
	}
	if s := config.Flags.MpsRoot; s != nil {
		m.MPSRoot = *s
	}
	return m
}
