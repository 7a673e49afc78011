package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/test/gpusim"
)

// spell rewrites nvidia-smi's options that have one dash and several letters as this command knows them.
func spell(args []string) []string {
	out := slices.Clone(args)
	for i, a := range out {
		if a == "-pm" {
			out[i] = "--persistence-mode"
		}
	}
	return out
}

// smi is the part of nvidia-smi that mig-parted, mig-manager, the MPS control daemon, operators and test/hardware run.
// It lists and resets GPUs, sets the compute mode and persistence mode, and queries a few fields.
func smi() *cobra.Command {
	c := &cli{dir: defaultDir()}
	var ids []string
	var mode, persistence string
	var q query
	var doReset bool
	cmd := &cobra.Command{
		Use:          "nvidia-smi",
		Short:        "List or query the simulated GPUs, reset them, or set their compute mode or persistence mode",
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.on(func(n *gpusim.Node) error {
				devices, err := choose(n, ids)
				switch {
				case err != nil:
					return err
				case len(q.gpus)+len(q.apps) > 0:
					return each(n, devices, func(l *gpusim.Library, d gpusim.Device) error { return q.print(cmd.OutOrStdout(), l, d) })
				case doReset:
					return each(n, devices, func(l *gpusim.Library, d gpusim.Device) error { return resetOne(cmd, l, d) })
				case persistence != "":
					return setPersistence(cmd, n, devices, persistence)
				case mode != "":
					return each(n, devices, func(l *gpusim.Library, d gpusim.Device) error { return setComputeMode(l, d, mode) })
				default:
					return list(n, cmd.OutOrStdout())
				}
			})
		},
	}
	cmd.Flags().BoolP("list-gpus", "L", false, "list the devices, which it also does if nothing else is asked")
	cmd.Flags().BoolVarP(&doReset, "gpu-reset", "r", false, "reset the GPUs")
	cmd.Flags().StringVarP(&mode, "compute-mode", "c", "", "0 or DEFAULT, 2 or PROHIBITED, 3 or EXCLUSIVE_PROCESS")
	cmd.Flags().StringVar(&persistence, "persistence-mode", "", "0 or DISABLED, 1 or ENABLED; -pm says it too")
	cmd.Flags().StringSliceVar(&q.gpus, "query-gpu", nil, "fields of each GPU to print")
	cmd.Flags().StringSliceVar(&q.apps, "query-compute-apps", nil, "fields of each process on a GPU to print")
	cmd.Flags().StringVar(&q.format, "format", "", "how: csv,noheader,nounits")
	cmd.Flags().StringSliceVarP(&ids, "id", "i", nil, "GPUs by index, UUID or PCI address; all if none is given")
	return cmd
}

// choose gives the indices of the GPUs that ids name.
func choose(n *gpusim.Node, ids []string) ([]int, error) {
	l := n.Library()
	if r := l.Init(); r != gpusim.Success {
		return nil, fmt.Errorf("finding GPUs: %s", r.Text())
	}
	var out []int
	for i, uuid := range n.UUIDs() {
		names := []string{strconv.Itoa(i), uuid}
		if d, r := l.DeviceByIndex(i); r == gpusim.Success {
			pci, _ := l.PCI(d)
			names = append(names, pci.Address, "0000"+pci.Address)
		}
		if len(ids) == 0 || slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(names, strings.ToLower(id)) || id == uuid }) {
			out = append(out, i)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no devices were found for %q: use an index, a UUID or a PCI address", ids)
	}
	return out, nil
}

func each(n *gpusim.Node, devices []int, do func(*gpusim.Library, gpusim.Device) error) error {
	l := n.Library()
	if r := l.Init(); r != gpusim.Success {
		return fmt.Errorf("opening the library: %s", r.Text())
	}
	for _, i := range devices {
		d, r := l.DeviceByIndex(i)
		if r != gpusim.Success {
			return fmt.Errorf("finding GPU %d: %s", i, r.Text())
		}
		if err := do(l, d); err != nil {
			return err
		}
	}
	return nil
}

func resetOne(cmd *cobra.Command, l *gpusim.Library, d gpusim.Device) error {
	pci, _ := l.PCI(d)
	if r := l.Reset(d); r != gpusim.Success {
		return fmt.Errorf("resetting GPU %s: %s", pci.Address, r.Text())
	}
	fmt.Fprintf(cmd.OutOrStdout(), "GPU 0000%s was successfully reset.\n", strings.ToUpper(pci.Address))
	return nil
}

func setPersistence(cmd *cobra.Command, n *gpusim.Node, devices []int, mode string) error {
	modes := map[string]bool{"0": false, "DISABLED": false, "1": true, "ENABLED": true}
	on, ok := modes[mode]
	if !ok {
		return fmt.Errorf("persistence mode is %q: use 0 or DISABLED, 1 or ENABLED", mode)
	}
	word := map[bool]string{false: "Disabled", true: "Enabled"}[on]
	err := each(n, devices, func(l *gpusim.Library, d gpusim.Device) error {
		pci, _ := l.PCI(d)
		if r := l.SetPersistence(d, on); r != gpusim.Success {
			return fmt.Errorf("setting persistence mode of GPU %s: %s", pci.Address, r.Text())
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s persistence mode for GPU 0000%s.\n", word, strings.ToUpper(pci.Address))
		return nil
	})
	if err == nil {
		fmt.Fprintln(cmd.OutOrStdout(), "All done.")
	}
	return err
}

func setComputeMode(l *gpusim.Library, d gpusim.Device, mode string) error {
	for number, name := range gpusim.ComputeModes {
		if mode != name && mode != fmt.Sprint(number) {
			continue
		}
		if r := l.SetComputeMode(d, number); r != gpusim.Success {
			return fmt.Errorf("setting the compute mode: %s", r.Text())
		}
		return nil
	}
	return fmt.Errorf("compute mode is %q: use DEFAULT, PROHIBITED or EXCLUSIVE_PROCESS", mode)
}
