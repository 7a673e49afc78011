package journal_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/nvml"
)

// Promises 7 and 10. The first layout that the journal notes of a GPU is the one that an undo brings back, however often the GPU is noted while it
// changes. Persistence mode is the exception: only the agent turns it off, so it was on before if it is on now.
func TestTheJournalKeepsTheFirstLayoutOfAGPU(t *testing.T) {
	t.Parallel()
	cut := func(persistent bool, profiles ...string) nvml.GPU {
		gpu := nvml.GPU{UUID: "GPU-a", Enabled: true, Persistent: persistent}
		for n, profile := range profiles {
			gpu.Instances = append(gpu.Instances, nvml.Instance{
				Placed:  nvml.Placed{Profile: profile, Span: nvml.Span{Start: n, Size: 1}},
				Devices: []nvml.Device{{UUID: "MIG-" + profile}},
			})
		}
		return gpu
	}
	var j journal.Journal
	j.RecordLayout(cut(false, "1g.10gb", "1g.10gb+me"))
	j.RecordLayout(cut(false, "1g.10gb"))
	j.RecordLayout(cut(true))
	j.RecordLayout(nvml.GPU{UUID: "GPU-b"})
	want := []journal.GPULayout{
		{GPU: "GPU-a", MIG: true, Persistent: true, Instances: []journal.InstanceRecord{{Profile: "1g.10gb", Size: 1}, {Profile: "1g.10gb+me", Start: 1, Size: 1}}},
		{GPU: "GPU-b"},
	}
	if diff := cmp.Diff(want, j.Previous); diff != "" {
		t.Errorf("layouts (-want +got):\n%s", diff)
	}
}

// Promises 7 and 15. A newer agent may have to restore what this one does not know, so this one does not guess.
func TestAJournalOfANewerVersionIsNotRead(t *testing.T) {
	t.Parallel()
	var j journal.Journal
	text, err := j.Encode()
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	if err := json.Unmarshal([]byte(text), &fields); err != nil {
		t.Fatal(err)
	}
	for version, readable := range map[float64]bool{0: false, 1: true, 2: false, 99: false} {
		fields["version"] = version
		text, err := json.Marshal(fields)
		if err != nil {
			t.Fatal(err)
		}
		switch parsed, err := journal.Parse(string(text)); {
		case readable && (err != nil || parsed == nil):
			t.Errorf("version %v: %v", version, err)
		case !readable && (err == nil || !strings.Contains(err.Error(), "version")):
			t.Errorf("version %v is read as %+v, with error %v", version, parsed, err)
		}
	}
}
