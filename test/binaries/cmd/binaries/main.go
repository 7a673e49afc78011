// Command binaries builds programs for tests and the demo, and prints where they are. Programs that are already built
// are only found.
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
		{"dradriver", b.DRADriver},
		{"libnvidia-ml", b.LibNVML},
		{"libcuda", b.LibCUDA},
		{"migparted", b.MigParted}, // the first that tests start at full length alone
		{"image", b.Image},
		{"helm", b.Helm},
		{"alerts", b.Alerts},
		{"kueue", b.Kueue},
		{"karpenter", b.Karpenter},
		{"runtime", b.Runtime}, // of test/e2e alone
	}
	var names []string
	for _, t := range targets {
		names = append(names, t.name)
	}
	short, full := names[:slices.Index(names, "migparted")], names[:slices.Index(names, "runtime")]
	var all bool
	command := &cobra.Command{
		Use:   "binaries [name]...",
		Short: "Build what tests and the demo start, and print where it is",
		Long: "Build what tests and the demo start, and print where it is.\n\nNames: " + strings.Join(names, ", ") +
			"; or a main package of this module, such as ./test/sandbox/cmd/sandbox. Without a name: " +
			strings.Join(short, ", ") + ", which tests with -short start.",
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case len(args) > 0:
			case all:
				args = full
			default:
				args = short
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
	command.Flags().BoolVar(&all, "all", false, "without a name: what tests start without -short, too; all but runtime")
	command.Flags().BoolVar(&b.Kubelet, "kubelet", false, "a Kubernetes that is here already is taken for kube only if it has kubelet, as test/e2e needs")
	command.SetOut(os.Stdout)
	if command.ExecuteContext(ctx) != nil {
		stop()
		os.Exit(1)
	}
}
