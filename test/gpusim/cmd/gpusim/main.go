// Command gpusim creates a node of simulated GPUs, shows it, and does to it what happens to a real one.
//
// Under the name nvidia-smi it does the few things that NVIDIA's programs run nvidia-smi for. It also stands in for
// nvidia-cuda-mps-control under that name.
package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/test/gpusim"
)

func main() {
	c := command()
	switch filepath.Base(os.Args[0]) {
	case "nvidia-smi":
		c = smi()
		c.SetArgs(spell(os.Args[1:]))
	case mpsControlName:
		c = mpsControl()
	}
	if err := c.Execute(); err != nil {
		os.Exit(1)
	}
}

// cli is what all commands share.
type cli struct{ dir string }

func defaultDir() string {
	if dir := os.Getenv("GPUSIM_NODE"); dir != "" {
		return dir
	}
	return "/run/gpusim"
}

func command() *cobra.Command {
	c := &cli{}
	root := &cobra.Command{
		Use:           "gpusim",
		Short:         "Simulate the NVIDIA GPUs of a node",
		SilenceUsage:  true,
		SilenceErrors: false,
	}
	root.PersistentFlags().StringVar(&c.dir, "node", defaultDir(), "directory of the node; GPUSIM_NODE says it too")
	root.AddCommand(
		c.create(), c.show(), c.hold(), c.use(), c.busy(), c.release(), c.monitor(), c.compute(), c.fail(), c.delay(), c.reset(), c.reboot(), c.reload(), c.upgrade(),
		c.calls(), c.xid(), c.ecc(), c.health(), c.play(), c.render(),
	)
	return root
}

// on opens the node for f.
func (c *cli) on(f func(*gpusim.Node) error) error {
	n, err := gpusim.Open(c.dir)
	if err != nil {
		return fmt.Errorf("%w: make it with gpusim create", err)
	}
	defer n.Close()
	return f(n)
}

func (c *cli) create() *cobra.Command {
	return &cobra.Command{
		Use:   "create SPEC",
		Short: "Make a node from a YAML file, or from - for stdin; one that is there is replaced",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			text, err := read(cmd.InOrStdin(), args[0])
			if err != nil {
				return err
			}
			spec, err := gpusim.ParseSpec(text)
			if err != nil {
				return err
			}
			n, err := gpusim.Create(c.dir, spec)
			if err != nil {
				return err
			}
			defer n.Close()
			fmt.Fprint(cmd.OutOrStdout(), n)
			return nil
		},
	}
}

func read(stdin io.Reader, name string) ([]byte, error) {
	if name == "-" {
		return io.ReadAll(stdin)
	}
	return os.ReadFile(name)
}

func (c *cli) show() *cobra.Command {
	uuids := false
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Show the GPUs with their instances and processes",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.on(func(n *gpusim.Node) error {
				if !uuids {
					fmt.Fprint(cmd.OutOrStdout(), n)
					return nil
				}
				return list(n, cmd.OutOrStdout())
			})
		},
	}
	cmd.Flags().BoolVar(&uuids, "uuids", false, "list the devices with their UUIDs instead, as nvidia-smi -L does")
	return cmd
}

// list writes what nvidia-smi -L does.
func list(n *gpusim.Node, w io.Writer) error {
	l := n.Library()
	if r := l.Init(); r != gpusim.Success {
		return fmt.Errorf("listing devices: %s", r.Text())
	}
	count, r := l.DeviceCount()
	for i := 0; i < count && r == gpusim.Success; i++ {
		var d gpusim.Device
		if d, r = l.DeviceByIndex(i); r != gpusim.Success {
			break
		}
		name, _ := l.Name(d)
		uuid, _ := l.UUID(d)
		fmt.Fprintf(w, "GPU %d: %s (UUID: %s)\n", i, name, uuid)
		most, _ := l.MaxMIGDevices(d)
		for k := range most {
			mig, r := l.MIGDevice(d, k)
			if r != gpusim.Success {
				continue
			}
			full, _ := l.Name(mig)
			uuid, _ := l.UUID(mig)
			fmt.Fprintf(w, "  %-15s Device %2d: (UUID: %s)\n", full[len(name)+1:], k, uuid)
		}
	}
	if r != gpusim.Success {
		return fmt.Errorf("listing devices: %s", r.Text())
	}
	return nil
}

func (c *cli) hold() *cobra.Command {
	var name string
	var used int
	var hidden, isReal, mps bool
	cmd := &cobra.Command{
		Use:   "hold DEVICE PID",
		Short: "Put a process on a GPU or a MIG device, by its UUID or as GPU index or as index@start of the instance",
		Args:  cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			pid, err := strconv.Atoi(args[1])
			if err != nil {
				return fmt.Errorf("PID is %q: use a number", args[1])
			}
			return c.on(func(n *gpusim.Node) error {
				device := find(n, args[0])
				switch {
				case hidden:
					return n.HoldHidden(device, pid, name)
				case mps:
					return n.HoldAsMPSClient(device, pid, name, used)
				case isReal:
					return n.HoldReal(device, pid, name, used)
				default:
					return n.Hold(device, pid, name, used)
				}
			})
		},
	}
	cmd.Flags().StringVar(&name, "name", "process", "name of the process")
	cmd.Flags().IntVar(&used, "used", 500, "memory that it uses, in MiB")
	cmd.Flags().BoolVar(&hidden, "hidden", false, "a client of the driver without a CUDA context, as monitoring agents are")
	cmd.Flags().BoolVar(&isReal, "real", false, "a process of this machine: it holds the device no longer than it runs")
	cmd.Flags().BoolVar(&mps, "mps", false, "a client of MPS, which a compute mode does not count")
	cmd.MarkFlagsMutuallyExclusive("hidden", "real", "mps")
	return cmd
}

// monitor behaves towards the driver like NVIDIA's DCGM.
func (c *cli) monitor() *cobra.Command {
	return &cobra.Command{
		Use:   "monitor",
		Short: "Keep every GPU open without a CUDA context, as monitoring agents do, until asked to end",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return c.on(func(n *gpusim.Node) error {
				for _, gpu := range n.UUIDs() {
					if err := n.HoldHiddenReal(gpu, os.Getpid(), "nv-hostengine"); err != nil {
						return err
					}
				}
				fmt.Fprintln(cmd.OutOrStdout(), "every GPU is open")
				<-ctx.Done()
				return n.Release(os.Getpid())
			})
		},
	}
}

// compute behaves towards the driver like a training job.
func (c *cli) compute() *cobra.Command {
	return &cobra.Command{
		Use:   "compute",
		Short: "Hold the devices that NVIDIA_VISIBLE_DEVICES names, or if it is void those of /dev, as a CUDA program in a container does, until a signal ends it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			pid, err := ownPID()
			if err != nil {
				return err
			}
			return c.on(func(n *gpusim.Node) error {
				devices := strings.Split(os.Getenv("NVIDIA_VISIBLE_DEVICES"), ",")
				if slices.Equal(devices, []string{"void"}) { // NVIDIA's DRA driver gives device files, and names none
					devices = n.OpenTo("/dev")
				}
				for _, device := range devices {
					if err := n.HoldReal(device, pid, filepath.Base(os.Args[0]), computeMiB); err != nil {
						return err
					}
					fmt.Fprintf(cmd.OutOrStdout(), "computing on %s\n", device)
				}
				<-ctx.Done()
				return n.Release(pid)
			})
		},
	}
}

// computeMiB is what compute uses of each device.
const computeMiB = 512

// ownPID is this process as the driver sees it.
func ownPID() (int, error) {
	name, err := os.Readlink(filepath.Join(gpusim.Proc(), "self"))
	if err != nil {
		return 0, fmt.Errorf("looking for the own process: %w", err)
	}
	return strconv.Atoi(name)
}

// find turns "0" into the UUID of the first GPU, and "0@4" into the UUID of the MIG device at that place.
func find(n *gpusim.Node, device string) string {
	var index, start int
	if _, err := fmt.Sscanf(device, "%d@%d", &index, &start); err == nil {
		return n.MIGDevice(index, start)
	}
	if index, err := strconv.Atoi(device); err == nil && index >= 0 && index < len(n.UUIDs()) {
		return n.UUIDs()[index]
	}
	return device
}

func (c *cli) use() *cobra.Command {
	return &cobra.Command{
		Use:   "use PID MIB",
		Short: "Let a process use so much memory on each device that it holds",
		Args:  cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			pid, err := strconv.Atoi(args[0])
			if err != nil {
				return fmt.Errorf("PID is %q: use a number", args[0])
			}
			mib, err := strconv.Atoi(args[1])
			if err != nil {
				return fmt.Errorf("MIB is %q: use a number", args[1])
			}
			return c.on(func(n *gpusim.Node) error { return n.Use(pid, mib) })
		},
	}
}

func (c *cli) busy() *cobra.Command {
	return &cobra.Command{
		Use:   "busy PID PERCENT",
		Short: "Let a process compute for so much of the time on each device that it holds",
		Args:  cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			pid, err1 := strconv.Atoi(args[0])
			percent, err2 := strconv.Atoi(args[1])
			if err1 != nil || err2 != nil {
				return fmt.Errorf("PID and PERCENT are %q and %q: use numbers", args[0], args[1])
			}
			return c.on(func(n *gpusim.Node) error { return n.Busy(pid, percent) })
		},
	}
}

func (c *cli) release() *cobra.Command {
	return c.simple("release PID", "Take a process off all devices", "PID", func(n *gpusim.Node, pid int) error { return n.Release(pid) })
}

func (c *cli) reset() *cobra.Command {
	return c.simple("reset GPU", "Reset a GPU by its index", "GPU", func(n *gpusim.Node, gpu int) error { return n.Reset(gpu) })
}

func (c *cli) ecc() *cobra.Command {
	return c.simple("ecc GPU", "Report an uncorrectable memory error", "GPU", func(n *gpusim.Node, gpu int) error { return n.ECC(gpu) })
}

func (c *cli) simple(use, short, what string, do func(*gpusim.Node, int) error) *cobra.Command {
	return &cobra.Command{
		Use:   use,
		Short: short,
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			number, err := strconv.Atoi(args[0])
			if err != nil {
				return fmt.Errorf("%s is %q: use a number", what, args[0])
			}
			return c.on(func(n *gpusim.Node) error { return do(n, number) })
		},
	}
}

func (c *cli) xid() *cobra.Command {
	return &cobra.Command{
		Use:   "xid GPU NUMBER",
		Short: "Report an error of the driver",
		Args:  cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			gpu, err1 := strconv.Atoi(args[0])
			xid, err2 := strconv.ParseUint(args[1], 10, 64)
			if err1 != nil || err2 != nil {
				return fmt.Errorf("GPU and NUMBER are %q and %q: use numbers", args[0], args[1])
			}
			return c.on(func(n *gpusim.Node) error { return n.Xid(gpu, xid) })
		},
	}
}

func (c *cli) health() *cobra.Command {
	var h gpusim.Health
	cmd := &cobra.Command{
		Use:   "health GPU",
		Short: "Decide what a GPU reports about itself; without flags it is well",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			gpu, err := strconv.Atoi(args[0])
			if err != nil {
				return fmt.Errorf("GPU is %q: use a number", args[0])
			}
			return c.on(func(n *gpusim.Node) error { return n.SetHealth(gpu, h) })
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&h.Lost, "lost", false, "fallen off the bus")
	flags.BoolVar(&h.Absent, "absent", false, "the driver did not find it when it was loaded")
	flags.IntVar(&h.RecoveryAction, "recovery-action", 0, "1 reset, 2 reboot, 4 drain and reset, and so on, as NVML numbers them")
	flags.Uint64Var(&h.UncorrectableECC, "uncorrectable-ecc", 0, "memory errors so far")
	flags.Uint64Var(&h.Volatile.Uncorrectable, "volatile-ecc", 0, "memory errors since the driver was loaded or the GPU reset")
	flags.IntVar(&h.RemappedRows, "remapped-rows", 0, "rows of memory remapped so far")
	flags.BoolVar(&h.RemapPending, "remap-pending", false, "a row waits for a reset to be remapped")
	flags.BoolVar(&h.RemapFailed, "remap-failed", false, "a row could not be remapped")
	flags.IntVar(&h.SparelessBanks, "spareless-banks", 0, "banks of memory without a spare row")
	flags.BoolVar(&h.RepairPending, "repair-pending", false, "a channel waits for a reset to be repaired")
	flags.BoolVar(&h.Unrepairable, "unrepairable", false, "memory cannot be repaired any more")
	flags.BoolVar(&h.SRAMThreshold, "sram-threshold", false, "SRAM has had more errors than NVIDIA lets pass")
	flags.BoolVar(&h.RetiringPages, "retiring-pages", false, "a page of memory is dropped at the next load of the driver (T4)")
	flags.BoolVar(&h.ECCModeChanging, "ecc-mode-changing", false, "ECC is turned off, or on, at the next reset")
	flags.IntVar(&h.Fabric.State, "fabric-state", 0, "0 none, 1 not started, 2 in progress, 3 completed")
	flags.IntVar((*int)(&h.Fabric.Status), "fabric-status", 0, "result code of joining the fabric, once that is completed")
	return cmd
}

// play simulates what happens to GPUs on real machines.
func (c *cli) play() *cobra.Command {
	start, cure := gpusim.NoInstance, false
	cmd := &cobra.Command{
		Use:   "play GPU SEQUENCE",
		Short: "Let a sequence of faults happen to a GPU, or what cures it; without arguments, list them",
		Args: cobra.MatchAll(cobra.MaximumNArgs(2), func(_ *cobra.Command, args []string) error {
			if len(args) == 1 {
				return fmt.Errorf("SEQUENCE is missing: gpusim play lists them")
			}
			return nil
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				for _, s := range gpusim.Sequences() {
					fmt.Fprintf(cmd.OutOrStdout(), "%-31s %s\n", s.Name, s.Means)
				}
				return nil
			}
			gpu, err := strconv.Atoi(args[0])
			if err != nil {
				return fmt.Errorf("GPU is %q: use a number", args[0])
			}
			return c.on(func(n *gpusim.Node) error {
				if cure {
					return n.Cure(cmd.Context(), gpu, args[1])
				}
				return n.Play(cmd.Context(), gpu, start, args[1])
			})
		},
	}
	cmd.Flags().IntVar(&start, "instance", gpusim.NoInstance, "where the GPU instance stands that it is about; none is the whole GPU")
	cmd.Flags().BoolVar(&cure, "cure", false, "let what ends the sequence happen: a reset, a reboot, another GPU")
	return cmd
}

func (c *cli) fail() *cobra.Command {
	var f gpusim.Fault
	var code, activation string
	var off bool
	cmd := &cobra.Command{
		Use:   "fail FUNCTION",
		Short: "Let a function of the library fail",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			var err error
			if f.Return, err = gpusim.ParseReturn(code); err != nil {
				return err
			}
			if f.Activation, err = gpusim.ParseReturn(activation); err != nil {
				return err
			}
			if off {
				f = gpusim.Fault{}
			} else if f.Return == gpusim.Success && f.Activation == gpusim.Success && !f.Hang {
				return fmt.Errorf("the fault does nothing: set --return, --activation or --hang, or --off to take faults away")
			}
			return c.on(func(n *gpusim.Node) error { return n.Fail(args[0], f) })
		},
	}
	cmd.Flags().StringVar(&code, "return", "success", "result code, such as in_use")
	cmd.Flags().StringVar(&activation, "activation", "success", "second result code of SetMigMode")
	cmd.Flags().BoolVar(&f.Hang, "hang", false, "do not come back until --off")
	cmd.Flags().BoolVar(&f.Done, "done", false, "do the work before failing")
	cmd.Flags().IntVar(&f.After, "after", 0, "calls that go well first")
	cmd.Flags().IntVar(&f.Times, "times", 1, "calls that fail, -1 for all")
	cmd.Flags().DurationVar(&f.For, "for", 0, "how long calls fail from the first on, instead of --times")
	cmd.Flags().StringVar(&f.GPU, "gpu", "", "only calls about the GPU with this UUID")
	cmd.Flags().BoolVar(&off, "off", false, "take all faults of the function away")
	return cmd
}

func (c *cli) delay() *cobra.Command {
	return &cobra.Command{
		Use:   "delay FUNCTION DURATION",
		Short: "Let each call of a function take its time; 0s takes the delay away",
		Args:  cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			d, err := time.ParseDuration(args[1])
			if err != nil {
				return fmt.Errorf("DURATION is %q: use one such as 1.5s", args[1])
			}
			return c.on(func(n *gpusim.Node) error { return n.Delay(args[0], d) })
		},
	}
}

func (c *cli) reboot() *cobra.Command {
	return &cobra.Command{
		Use:   "reboot",
		Short: "Restart the node: no process, no instance, a new boot id",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return c.on((*gpusim.Node).Reboot) },
	}
}

func (c *cli) reload() *cobra.Command {
	return &cobra.Command{
		Use:   "reload",
		Short: "Unload the driver and load it again",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return c.on((*gpusim.Node).Reload) },
	}
}

func (c *cli) upgrade() *cobra.Command {
	return &cobra.Command{
		Use:   "upgrade VERSION",
		Short: "Replace the driver by another version; what a process has loaded of the library is of no more use to it",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return c.on(func(n *gpusim.Node) error { return n.Upgrade(args[0]) })
		},
	}
}

func (c *cli) calls() *cobra.Command {
	forget, reads := false, false
	cmd := &cobra.Command{
		Use:   "calls",
		Short: "Count the calls that have changed something, or tried to",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.on(func(n *gpusim.Node) error {
				calls := n.Calls()
				if reads {
					calls = n.Reads()
				}
				for _, name := range slices.Sorted(maps.Keys(calls)) {
					fmt.Fprintf(cmd.OutOrStdout(), "%s %d\n", name, calls[name])
				}
				if forget {
					return n.ForgetCalls()
				}
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&reads, "reads", false, "count the others instead, which change nothing")
	cmd.Flags().BoolVar(&forget, "forget", false, "begin to count from zero")
	return cmd
}

func (c *cli) render() *cobra.Command {
	var driver, library string
	cmd := &cobra.Command{
		Use:   "render DIR",
		Short: "Write the parts of /proc and /sys that show the GPUs, and the driver's own files",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return c.on(func(n *gpusim.Node) error {
				if err := n.RenderHost(args[0]); err != nil || driver == "" {
					return err
				}
				self, err := os.Executable()
				if err != nil {
					return err
				}
				return n.RenderDriver(driver, library, self)
			})
		},
	}
	cmd.Flags().StringVar(&driver, "driver-root", "", "write there what the driver's package installs: libraries, programs, device files")
	cmd.Flags().StringVar(&library, "library", "", "the simulated libnvidia-ml.so.1, for the driver root")
	cmd.MarkFlagsRequiredTogether("driver-root", "library")
	return cmd
}
