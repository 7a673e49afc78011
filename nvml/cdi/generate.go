package cdi

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	nv "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"go.uber.org/zap"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/aside"
	"github.com/gpuslice/gpuslice/nvml/driverroot"
)

const libraryName = driverroot.Library

// generate returns the devices of a spec for the GPUs. It runs in parallel to its caller, which may have given up: it must not write.
func (s *Specs) generate(old *specs.Spec, gpus []nvml.GPU, at aside.At) ([]specs.Device, error) {
	library, err := s.open(at)
	if err != nil {
		return nil, err
	}
	options := append(optionsOf(old),
		nvcdi.WithLogger(logger{s.log}),
		nvcdi.WithNvmlLib(library),
		nvcdi.WithDevRoot(s.devRoot),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils), // one library of the driver's in this process is enough
	)
	ids := []string{"all"}
	if old.Kind == kindManagement {
		options = append(options, nvcdi.WithMode(nvcdi.ModeManagement))
	} else {
		options = append(options, nvcdi.WithMode(nvcdi.ModeNvml))
		ids = idsOf(gpus)
	}
	lib, err := nvcdi.New(options...)
	if err != nil {
		return nil, fmt.Errorf("preparing NVIDIA's CDI library: %w", err)
	}
	devices, err := lib.GetDeviceSpecsByID(ids...)
	if err != nil {
		return nil, fmt.Errorf("generating devices: %w", err)
	}
	if err := s.complete(old.Kind, devices); err != nil {
		return nil, err
	}
	relocate(devices, rootOf(old))
	return keepWholeGPUs(old, devices), nil
}

// idsOf names the devices by UUID, so that NVIDIA's library reads no GPU that is lost.
func idsOf(gpus []nvml.GPU) []string {
	var out []string
	for _, g := range gpus {
		out = append(out, uuids(g)...)
	}
	if len(out) == 0 {
		return []string{"none"}
	}
	return out
}

func isEmpty(devices []specs.Device) bool { return len(devices) == 1 && devices[0].Name == "none" }

// optionsOf returns the options that a spec was generated with, as far as devices show them. Hooks are restricted to those in the file: another one
// may be newer than the program that is called for it, which would keep containers from starting.
func optionsOf(old *specs.Spec) []nvcdi.Option {
	var namers []nvcdi.DeviceNamer
	for _, s := range strategiesOf(old) {
		if namer, err := nvcdi.NewDeviceNamer(s.name); err == nil { // all of them are the library's own names
			namers = append(namers, namer)
		}
	}
	program, driverRoot := "", "/"
	var enabled []string
	groups := false
	for _, e := range edits(old) {
		groups = groups || len(e.AdditionalGIDs) > 0
		for _, h := range e.Hooks {
			program = h.Path
			enabled = append(enabled, hookName(h.Args))
			if i := slices.Index(h.Args, "--driver-root"); i >= 0 && i+1 < len(h.Args) {
				driverRoot = h.Args[i+1]
			}
		}
	}
	out := []nvcdi.Option{
		nvcdi.WithDeviceNamers(namers...),
		nvcdi.WithDriverRoot(driverRoot), // only arguments of hooks follow from it, which run on the node
		nvcdi.WithNVIDIACDIHookPath(program),
		nvcdi.WithDisabledHooks(nvcdi.AllHooks),
		nvcdi.WithEnabledHooks(enabled...),
	}
	if !groups { // they need CDI 0.7.0
		out = append(out, nvcdi.WithFeatureFlags(nvcdi.FeatureNoAdditionalGIDsForDeviceNodes))
	}
	return out
}

// hookName finds the name in a hook's arguments: "nvidia-cdi-hook create-symlinks …", "nvidia-ctk hook create-symlinks …".
func hookName(args []string) string {
	for i, a := range args {
		if i > 0 && a != "hook" {
			return a
		}
	}
	return ""
}

// edits lists the common edits of a spec and those of its devices.
func edits(spec *specs.Spec) []specs.ContainerEdits {
	out := []specs.ContainerEdits{spec.ContainerEdits}
	for _, d := range spec.Devices {
		out = append(out, d.ContainerEdits)
	}
	return out
}

// complete checks that every device has its device files: NVIDIA's library leaves out files that it does not find, with a warning.
func (s *Specs) complete(kind string, devices []specs.Device) error {
	if kind == kindManagement || isEmpty(devices) {
		return nil
	}
	for _, d := range devices {
		gpus, caps := 0, 0
		for _, n := range d.ContainerEdits.DeviceNodes {
			switch {
			case gpuNode.MatchString(n.Path):
				gpus++
			case capabilityNode.MatchString(n.Path):
				caps++
			}
		}
		if gpus == 0 {
			return fmt.Errorf("device %s has no device file /dev/nvidia<N> under %s: it must hold the node's own /dev; if it does, "+
				"run nvidia-smi on the node", d.Name, s.devRoot)
		}
		if isMIG(d.Name) && caps < 2 {
			return fmt.Errorf("device %s has %d of its 2 device files in %s: run nvidia-smi on the node, which makes them", d.Name, caps, s.capsDir())
		}
	}
	return nil
}

var gpuNode = regexp.MustCompile(`/nvidia\d+$`)

func isMIG(name string) bool { return strings.HasPrefix(name, "MIG-") || migIndex.MatchString(name) }

// rootOf gives the directory that a spec's device files are under on the node, "/" unless they are a driver container's.
func rootOf(spec *specs.Spec) string {
	for _, e := range edits(spec) {
		for _, n := range e.DeviceNodes {
			if root, ok := strings.CutSuffix(n.HostPath, n.Path); ok && n.HostPath != "" {
				return filepath.Join("/", root)
			}
		}
	}
	return "/"
}

// relocate gives device files the paths that they have on the node, whatever they are here.
func relocate(devices []specs.Device, root string) {
	for _, d := range devices {
		for _, n := range d.ContainerEdits.DeviceNodes { // devices with several names share them
			n.HostPath = filepath.Join(root, n.Path)
			if n.HostPath == n.Path {
				n.HostPath = "" // saves the CDI version that brought it
			}
		}
	}
}

// keepWholeGPUs takes over the entries of GPUs that were whole and still are, since these have not changed.
func keepWholeGPUs(old *specs.Spec, devices []specs.Device) []specs.Device {
	if old.Kind == kindManagement {
		return devices
	}
	for i, d := range devices {
		at := slices.IndexFunc(old.Devices, func(o specs.Device) bool { return o.Name == d.Name })
		if at >= 0 && !isMIG(d.Name) {
			devices[i] = old.Devices[at]
		}
	}
	return devices
}

// open finds NVIDIA's library and keeps it loaded. nvcdi initialises it and shuts it down, as nvml/lib does in the same process; the library counts
// both. After that go-nvml unloads it, though its functions stay bound for the life of the process.
func (s *Specs) open(at aside.At) (nv.Interface, error) {
	path, err := s.find(at)
	if err == nil {
		at(path)
		driverroot.Touch(path)
		err = pin(path)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: opening NVIDIA's library: %w", nvml.ErrNoDriver, err)
	}
	at("")
	return nv.New(nv.WithLibraryPath(path)), nil
}

func pin(path string) error {
	return dl.New(path, dl.RTLD_LAZY|dl.RTLD_GLOBAL|dl.RTLD_NODELETE).Open()
}

// find gives the path of the library, or its bare name for the dynamic loader to look up: the same that nvml/lib finds.
func (s *Specs) find(at aside.At) (string, error) {
	if s.library != "" {
		return s.library, nil
	}
	if filepath.Clean(s.driverRoot) == "/" {
		at("the dynamic loader's search for " + libraryName)
		if pin(libraryName) == nil {
			return libraryName, nil
		}
	}
	return driverroot.Find(s.driverRoot, at) //nolint:wrapcheck // it names the places
}

// logger hands on the messages of NVIDIA's library. An administrator needs none of them: the library returns errors that matter.
type logger struct{ log *zap.Logger }

func (l logger) say(level, format string, args []any) {
	l.log.Debug(fmt.Sprintf(format, args...), zap.String("level", level))
}

// Tracef and those below implement the interface that nvcdi takes for a logger.
func (l logger) Tracef(string, ...any) {}

// Debugf drops the details of every file that is searched.
func (l logger) Debugf(string, ...any) {}

// Infof logs at debug level.
func (l logger) Infof(format string, args ...any) { l.say("info", format, args) }

// Warningf logs at debug level.
func (l logger) Warningf(format string, args ...any) { l.say("warning", format, args) }

// Errorf logs at debug level.
func (l logger) Errorf(format string, args ...any) { l.say("error", format, args) }
