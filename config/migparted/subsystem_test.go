package migparted_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/nvml"
)

// As in a file that mig-parted v0.15 reads.
func TestAFilterWithASubsystemIsForThoseBoardsAlone(t *testing.T) {
	configs, err := migparted.Parse([]byte(`version: v1
mig-configs:
  boards:
    - device-filter: "0x233010DE:0x16C110DE"
      devices: all
      mig-enabled: true
      mig-devices: {1g.10gb: 7}
    - device-filter: ["0x233010de:0x16c010de", "0x20B710DE"]
      devices: all
      mig-enabled: true
      mig-devices: {3g.40gb: 2}
`))
	if err != nil {
		t.Fatal(err)
	}
	gpus := []nvml.GPU{
		{UUID: "GPU-0", Index: 0, DeviceID: 0x233010DE, SubsystemID: 0x16C110DE, Capable: true},
		{UUID: "GPU-1", Index: 1, DeviceID: 0x233010DE, SubsystemID: 0x16C010DE, Capable: true},
		{UUID: "GPU-2", Index: 2, DeviceID: 0x233010DE, SubsystemID: 0x16C210DE, Capable: true},
		{UUID: "GPU-3", Index: 3, DeviceID: 0x20B710DE, SubsystemID: 0x16C110DE, Capable: true},
	}
	requests, err := catalog.Merge(nil, configs).Requests("boards", gpus)
	if err != nil {
		t.Fatal(err)
	}
	if requests["GPU-0"].Devices["1g.10gb"] != 7 || requests["GPU-1"].Devices["3g.40gb"] != 2 || requests["GPU-3"].Devices["3g.40gb"] != 2 || len(requests) != 3 {
		t.Errorf("got %v", requests)
	}
}
