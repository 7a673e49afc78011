// Command systemd runs the system bus of a host, with a simulated logind and systemd, for people and for programs that
// need one.
package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/test/program"
	"github.com/gpuslice/gpuslice/test/systemd"
)

func main() { program.Main(command()) }

func command() *cobra.Command {
	var o systemd.Options
	var units []string
	command := &cobra.Command{
		Use:   "systemd",
		Short: "Run a system bus with a simulated logind and systemd until Ctrl-C, and show the calls they receive",
		Long: `Run a system bus with a simulated logind and systemd until Ctrl-C, and show the calls they receive.

The first line on stdout is the variable that programs find the bus by.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if o.Units, err = parse(units); err != nil {
				return err
			}
			host, err := systemd.Start(cmd.Context(), o)
			if err != nil {
				return err
			}
			defer func() {
				if closed := host.Close(); err == nil {
					err = closed
				}
			}()
			fmt.Printf("export DBUS_SYSTEM_BUS_ADDRESS=%s\n", host.Address())
			show(cmd.Context(), host)
			return nil
		},
	}
	command.Flags().StringVar(&o.Dir, "dir", "", "keep the socket and the log in `directory`, whose path is short (default: a temporary one)")
	command.Flags().StringArrayVar(&units, "unit", nil, "add a unit in a state, such as `kubelet.service=active`; may be repeated")
	command.Flags().BoolVar(&o.NoLogind, "no-logind", false, "leave logind away")
	command.Flags().BoolVar(&o.NoSystemd, "no-systemd", false, "leave systemd away")
	return command
}

func parse(units []string) (map[string]systemd.Unit, error) {
	out := map[string]systemd.Unit{}
	for _, unit := range units {
		name, state, ok := strings.Cut(unit, "=")
		if !ok {
			return nil, fmt.Errorf("reading --unit %s: write it as name=state", unit)
		}
		out[name] = systemd.Unit{ActiveState: state}
	}
	return out, nil
}

// show prints each call as it comes, until the context ends.
func show(ctx context.Context, host *systemd.Host) {
	shown := 0
	for {
		if host.Wait(ctx, func() bool { return len(host.Calls()) > shown }) != nil {
			return
		}
		for _, call := range host.Calls()[shown:] {
			fmt.Fprintln(os.Stderr, call)
			shown++
		}
	}
}
