// Command binaries builds what tests and the demo start, and prints where it is. What is built already is only found.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// target is something to build, by the name that people give.
type target struct {
	name  string
	build func(context.Context) (string, error)
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	b := binaries.Builder{Log: os.Stderr}
	if term.IsTerminal(int(os.Stderr.Fd())) {
		b.Terminal = os.Stderr
	}
	targets := []target{
		{"kube", func(ctx context.Context) (string, error) { return b.Kube(ctx) }}, // b as the flags say
		{"deviceplugin", b.DevicePlugin},
		{"pluginconfig", b.PluginConfig},
		{"migparted", b.MigParted},
		{"image", b.Image},
		{"helm", b.Helm},
		{"alerts", b.Alerts},
		{"libnvidia-ml", b.LibNVML},
		{"libcuda", b.LibCUDA},
		{"runtime", b.Runtime},
	}
	var names []string
	for _, t := range targets {
		names = append(names, t.name)
	}
	needed := names[:len(names)-1] // by tests that need no root
	command := &cobra.Command{
		Use:   "binaries [name]...",
		Short: "Build what tests and the demo start, and print where it is",
		Long: "Build what tests and the demo start, and print where it is.\n\nNames: " + strings.Join(names, ", ") +
			"; or a main package of this module, such as ./test/sandbox/cmd/sandbox. Without a name: all but runtime and packages.",
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				args = needed
			}
			if err := b.Announce(cmd.Context(), args...); err != nil {
				return err
			}
			for _, arg := range args {
				build := func(ctx context.Context) (string, error) { return b.Tool(ctx, arg) }
				if i := slices.IndexFunc(targets, func(t target) bool { return t.name == arg }); i >= 0 {
					build = targets[i].build
				} else if !strings.HasPrefix(arg, "./") {
					return fmt.Errorf("%q is none of %s, and no package of this module (./…)", arg, strings.Join(names, ", "))
				}
				path, err := build(cmd.Context())
				if err != nil {
					return err
				}
				cmd.Println(path)
			}
			return nil
		},
	}
	command.Flags().BoolVar(&b.Kubelet, "kubelet", false, "a Kubernetes that is here already is taken for kube only if it has kubelet, as test/e2e needs")
	command.SetOut(os.Stdout)
	if command.ExecuteContext(ctx) != nil {
		stop()
		os.Exit(1)
	}
}
