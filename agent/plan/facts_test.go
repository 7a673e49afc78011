package plan_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/plan"
)

// Each row turns on one fact: without it the plan is another. Plans of several facts are in testdata.
func TestOneFactDecides(t *testing.T) {
	const (
		fence   = "fence: journal, cordon, taint"
		journal = "record: journal"
		slot    = "take a slot of the pool"
		resume  = "resume device plugin"
		verify  = "verify capacity"
		destroy = "GPU 0: destroy 1g.10gb@0"
		write   = "set the device plugin's config: "
		compute = "GPU 0: let any process compute on it"
		off     = "gpu 0 off\n"
		balance = "gpu 0 on 1g.10gb=1\n"
	)
	for _, row := range []struct {
		name, seen, want string
		has              []string // in this order, with others between them
		lacks            string   // a part of a step
	}{
		// A node that has just been registered is opened at once, or behind a fence in the place of its startup taint.
		{"new and proven", off + "startup agreed=2", off, []string{resume}, "fence"},
		{
			"new, its keys and its slot", off + "keys\nslot has\nstartup agreed=2", off,
			[]string{"publish the profile's labels and taints", resume, "give the slot"},
			"fence",
		},
		{"new, and its capacity is not there", off + "startup", off, []string{fence, resume, verify}, ""},
		{"new, and nothing is asked of it", off + "startup", "", []string{resume, verify}, "fence"},
		{"new, and its sharing alone is asked for", off + "config set reloaded\nstartup", "sharing none", []string{fence, resume, verify}, ""},
		{"new, fenced", off + "startup fenced agreed=2", off, []string{fence, resume}, ""},
		{"new, left by an earlier change", off + "startup orphaned agreed=2", off, []string{fence, resume}, ""},
		{"new, its plugin can be asked for a config only later", off + "startup agreed=2", off + "later", []string{fence, resume}, ""},
		{
			"new, a mode waits for a reboot", "gpu 0 off pending-on\nreboots no-reset-0 delegate\nstartup agreed=2", balance,
			[]string{fence, resume, "park", "ask for a reboot"},
			"",
		},
		{"new, a plugin is outdated", off + "plugin kube-system/p outdated\nstartup agreed=2", off, []string{fence, resume}, ""},
		{"new, a CDI spec is stale", off + "cdi /var/run/cdi/nvidia.yaml\nstartup agreed=2", off, []string{fence, "regenerate CDI spec", resume}, ""},
		{"the startup taint of a change", off + "journal startup agreed=2", off, []string{resume, "release"}, ""},
		{"the startup taint that came back in a change", off + "journal startup returned agreed=2", off, []string{"release"}, "resume"},
		{"the startup taint that came back", off + "startup returned agreed=2", "", []string{resume}, "fence"},

		// Which GPUs are changed.
		{"the first GPU is not named", "gpu 0 on 1g.10gb@0\ngpu 1 on", "gpu 1 on 1g.10gb=1", []string{"GPU 1: create 1g.10gb@"}, "GPU 0"},
		{
			"a GPU that only gets instances keeps its pods", "gpu 0 on 1g.10gb@0\ngpu 1 on\npod web/a on 0/1g.10gb@0\npod web/b on 1",
			"gpu 0 on\ngpu 1 on 1g.10gb=1",
			[]string{"evict web/a", destroy},
			"web/b",
		},
		{
			"an undo waits for a reboot again", "gpu 0 on pending-off\nreboots no-reset-0 in-vain self\njournal fenced undo", "gpu 0 exactly off",
			[]string{"reboot the node"},
			"",
		},
		{
			"an undo waits for a reboot that the settings do not allow", "gpu 0 on\nreboots no-reset-0 never\njournal fenced undo", "gpu 0 exactly off",
			[]string{"GPU 0: turn MIG off", "reboot the node"},
			"",
		},
		{
			"no pod is in the way of a reboot", "gpu 0 off\nreboots no-reset-0 self", balance,
			[]string{"GPU 0: turn MIG on", "reboot the node", "GPU 0: create"},
			"evict",
		},
		{
			"pods are in the way of a reboot of others", "gpu 0 on\nreboots no-reset-0 delegate others=web/a", off,
			[]string{"ask for a reboot", "reboot the node"},
			"evict",
		},

		// What is noted before, and given back after.
		{"a CDI spec without a change", off + "cdi /var/run/cdi/nvidia.yaml\nagreed=2", off, []string{"regenerate CDI spec"}, ""},
		{"a spared slot, and a reset", off + "sick 0\nslot needed spared", off, []string{slot, fence, "GPU 0: reset"}, ""},
		{
			"as many steps before a reboot as after, and a GPU that the journal lacks",
			"gpu 0 off\nreboots no-reset-0 self\njournal fenced without-GPU-0", balance,
			[]string{journal, "GPU 0: turn MIG on", "reboot", "GPU 0: create"},
			"",
		},
		{
			"an operand that need not be paused, and is not in the journal", "gpu 0 on\noperand dcgm pods=gpu-operator/dcgm-1\njournal fenced", balance,
			[]string{"GPU 0: create"},
			journal,
		},
		{
			"one plugin leaves with the fence, and another tolerates it", "gpu 0 on\nplugin kube-system/a\nplugin kube-system/b returns", off,
			[]string{"pause device plugin kube-system/a", "restart device plugin kube-system/b"},
			"",
		},
		{
			"a unit of the change that is about to stop", off + "unit nvsm.service active ending\njournal fenced stopped=nvsm.service", off,
			[]string{"start unit nvsm.service"},
			"",
		},
		{
			"a unit of the change that starts", off + "unit nvsm.service active starting\njournal fenced stopped=nvsm.service", off,
			[]string{"start unit nvsm.service"},
			"",
		},
		{"a unit of the change that runs", off + "unit nvsm.service active\njournal fenced stopped=nvsm.service", off, []string{resume}, "unit"},
		{"another tool has lifted the cordon", "gpu 0 on 1g.10gb@0\njournal fenced breached", "gpu 0 on", []string{fence, destroy}, ""},

		// Sharing.
		{
			"pods of one name in two namespaces", "gpu 0 off\npod web/a on 0 as nvidia.com/gpu::3\npod api/a on 0 as nvidia.com/gpu::0\nconfig nvidia.com/gpu=4 reloaded",
			"sharing nvidia.com/gpu=2",
			[]string{"evict web/a"},
			"api/a",
		},
		{
			"the first replica that goes", "gpu 0 off\npod web/a on 0 as nvidia.com/gpu::2\nconfig nvidia.com/gpu=4 reloaded", "sharing nvidia.com/gpu=2",
			[]string{"evict web/a"},
			"",
		},
		{
			"the last replica that stays", "gpu 0 off\npod web/a on 0 as nvidia.com/gpu::1\nconfig nvidia.com/gpu=4 reloaded", "sharing nvidia.com/gpu=2",
			[]string{fence},
			"evict",
		},
		{
			"what is not shared keeps its name", "gpu 0 off\npod web/a on 0 as nvidia.com/gpu\nconfig reloaded", "sharing nvidia.com/mig-1g.10gb=2 rename",
			[]string{fence, write},
			"evict",
		},
		{"another config with the same sharing", "gpu 0 off\nconfig nvidia.com/gpu=4 reloaded", "sharing nvidia.com/gpu=4", []string{journal, write}, "fence"},
		{"another MIG strategy renames instances", "gpu 0 on 1g.10gb@0\nconfig mig=single reloaded", "sharing mig=mixed", []string{fence, write}, ""},
		{"another MIG strategy without instances", "gpu 0 on\nconfig mig=single reloaded", "sharing mig=mixed", []string{journal, write}, "fence"},
		{"the same MIG strategy", "gpu 0 on 1g.10gb@0\nconfig mig=mixed reloaded", "sharing mig=mixed", []string{journal, write}, "fence"},
		{"the former MIG strategy is not known", "gpu 0 on 1g.10gb@0\nconfig reloaded", "sharing mig=mixed", []string{journal, write}, "fence"},
		{"the next MIG strategy is not known", "gpu 0 on 1g.10gb@0\nconfig mig=mixed reloaded", "sharing none", []string{journal, write}, "fence"},

		// What another program has carried out.
		{
			"a pod holds what was withdrawn", off + "pod web/a on 0 withdrawn\nconfig set reloaded\nslot needed\nagreed=2", "sharing none",
			[]string{slot, fence, "evict web/a", resume, verify, "release", "give the slot"},
			write,
		},
		{
			"behind the fence", off + "pod web/a on 0 withdrawn ending\nconfig set reloaded\nslot has\njournal fenced", "sharing none",
			[]string{"evict web/a", resume, verify, "release", "give the slot"},
			fence,
		},
		{"the pod is gone", off + "config set reloaded\nslot has\njournal fenced", "sharing none", []string{resume, verify, "release", "give the slot"}, "evict"},
		{"its pods end anyway", off + "pod web/a on 0 withdrawn ending\nconfig set reloaded", "sharing none", []string{verify}, fence},
		{"a new node", off + "pod web/a on 0 withdrawn\nconfig set reloaded\nstartup agreed=2", "sharing none", []string{fence, "evict web/a", resume, verify, "release"}, ""},

		// MPS.
		{"MPS stays, and so does its compute mode", "gpu 0 off exclusive\nconfig nvidia.com/gpu=2 mps set reloaded\nagreed=2", "sharing nvidia.com/gpu=2 mps", nil, "GPU 0"},
		{
			"MPS ends before a GPU is cut whose compute mode is the default", "gpu 0 on 1g.10gb@0\nconfig nvidia.com/gpu=2 mps reloaded", "gpu 0 on\nsharing none",
			[]string{write, destroy},
			"",
		},
		{"MPS of which the journal knows nothing ends", "gpu 0 off exclusive\nconfig nvidia.com/gpu=2 mps reloaded", "sharing none", []string{write, compute}, ""},
	} {
		steps, err := plan.Make(parseSeen(t, row.seen), parseWant(t, row.want))
		got := text(steps, err)
		rest := got
		for _, step := range row.has {
			at := strings.Index(rest, step)
			if at < 0 {
				t.Errorf("%s: the plan lacks %q, or has it too early:\n%s", row.name, step, got)
				break
			}
			rest = rest[at+len(step):]
		}
		if row.lacks != "" && strings.Contains(got, row.lacks) {
			t.Errorf("%s: the plan has %q:\n%s", row.name, row.lacks, got)
		}
	}
}

// What a plan takes away is what the agent looks for holders of.
func TestWhatAPlanTakes(t *testing.T) {
	const small, gpu = "MIG-0/1g.10gb@0", "GPU-0"
	for name, row := range map[string]struct {
		seen, want string
		takes      []plan.Taken
	}{
		"what cannot be takes nothing": {"gpu 0 lost", "gpu 0 off", nil},
		"creating takes nothing":       {"gpu 0 on", "gpu 0 on 1g.10gb=1", nil},
		"an instance, and its GPU": {
			"gpu 0 on 1g.10gb@0 1g.10gb@1", "gpu 0 on 2g.20gb=3", []plan.Taken{{GPU: gpu, Devices: []string{small, "MIG-0/1g.10gb@1", gpu}}},
		},
		"the mode takes the whole GPU":  {"gpu 0 off", "gpu 0 on", []plan.Taken{{GPU: gpu, Devices: []string{gpu}, Whole: true}}},
		"time-slicing takes no process": {"gpu 0 off\nconfig reloaded", "sharing nvidia.com/gpu=2", nil},
		"MPS takes the processes of all GPUs that are there, once": {
			"gpu 0 on 1g.10gb@0\ngpu 1 lost\ngpu 2 off\nconfig reloaded", "gpu 0 on\nsharing nvidia.com/gpu=2 mps",
			[]plan.Taken{{GPU: gpu, Devices: []string{small, gpu}}, {GPU: "GPU-2", Devices: []string{"GPU-2"}, Compute: true}},
		},
	} {
		if diff := cmp.Diff(row.takes, plan.Takes(parseSeen(t, row.seen), parseWant(t, row.want))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
