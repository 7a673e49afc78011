package lib_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
)

// device writes a device as sysfs shows it. What is "" is not there.
func device(t *testing.T, bus, address, vendor, class, driver, physicalFunction string) {
	t.Helper()
	at := filepath.Join(bus, address)
	must(t, os.MkdirAll(at, 0o755))
	for name, text := range map[string]string{"vendor": vendor, "class": class} {
		if text != "" {
			must(t, os.WriteFile(filepath.Join(at, name), []byte(text+"\n"), 0o600))
		}
	}
	for name, target := range map[string]string{"driver": driver, "physfn": physicalFunction} {
		if target != "" {
			must(t, os.Symlink(target, filepath.Join(at, name)))
		}
	}
}

func TestOfTheBusWholeGPUsOfNVIDIAAreReported(t *testing.T) {
	bus := t.TempDir()
	device(t, bus, "0000:00:1f.0", "0x8086", "0x060100", "", "")
	device(t, bus, "0000:17:00.0", "0x10de", "0x030200", "../../../../bus/pci/drivers/nvidia", "")
	device(t, bus, "0000:17:00.4", "0x10de", "0x030200", "../../../../bus/pci/drivers/nvidia", "../0000:17:00.0") // a part for a virtual machine
	device(t, bus, "0000:65:00.0", "0x10de", "0x030000", "../../../../bus/pci/drivers/vfio-pci", "")
	device(t, bus, "0000:65:00.1", "0x10de", "0x040300", "", "") // its sound
	device(t, bus, "0000:86:00.0", "0x10de", "0x068000", "", "") // an NVSwitch
	device(t, bus, "0000:b1:00.0", "0x10de", "0x030200", "", "")
	device(t, bus, "0000:ca:00.0", "", "", "", "") // it leaves the bus while the agent reads
	device(t, bus, "0000:e1:00.0", "0x1a03", "0x030000", "", "")
	got, err := lib.OpenBus(bus).GPUs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []nvml.BusGPU{{PCI: "0000:17:00.0", Driver: "nvidia"}, {PCI: "0000:65:00.0", Driver: "vfio-pci"}, {PCI: "0000:b1:00.0"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestADeviceThatCannotBeReadIsNotTakenForAbsent(t *testing.T) {
	for name, text := range map[string]string{"text": "0x10zz", "nothing": "", "more than a number": "0x10de 0x10de 0x10de 0x10de 0x10de 0x10de"} {
		bus := t.TempDir()
		device(t, bus, "0000:17:00.0", text, "0x030200", "", "")
		must(t, os.WriteFile(filepath.Join(bus, "0000:17:00.0", "vendor"), []byte(text), 0o600))
		if got, err := lib.OpenBus(bus).GPUs(t.Context()); err == nil {
			t.Errorf("%s: got %v, and no error", name, got)
		}
	}
}
