package preview_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report/preview"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

func TestAnAskIsALabelAndAName(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		ask                        preview.Ask
		label, name, geometry, key string
	}{
		{preview.Ask{Profile: "team"}, config.LabelProfile, "team", "team", ""},
		{preview.Ask{MIGConfig: "all-1g"}, config.LabelMIGConfig, "all-1g", "all-1g", ""},
		{preview.Ask{PluginConfig: "two"}, config.LabelDevicePluginConfig, "two", "", "two"},
		{preview.Ask{MIGConfig: "all-1g", PluginConfig: "two"}, config.LabelMIGConfig, "all-1g + two", "all-1g", "two"},
		{preview.Ask{Profile: "team", MIGConfig: "all-1g", PluginConfig: "two"}, config.LabelProfile, "team", "team", ""},
	} {
		label, name := row.ask.Label()
		node := &corev1.Node{}
		preview.SetLabels(node, label, name)
		geometry, key := node.Labels[config.LabelProfile]+node.Labels[config.LabelMIGConfig], node.Labels[config.LabelDevicePluginConfig]
		if label != row.label || name != row.name || geometry != row.geometry || key != row.key {
			t.Errorf("%+v is %s=%q, that is %q and %q", row.ask, label, name, geometry, key)
		}
	}
}

// Promise 16: an answer has its place among the annotations of a node, whatever it is about, and says what it leaves out.
func TestAnAnswerIsBounded(t *testing.T) {
	t.Parallel()
	const most, longest = 100, 1000
	p := preview.Result{HeldUp: strings.Repeat("ü", longest), Runs: "at once", Reason: config.ReasonHeld, Patience: time.Hour}
	evicts := plan.Step{Kind: plan.Evict}
	for i := range most + 7 {
		evicts.Pods = append(evicts.Pods, plan.Pod{Namespace: "team", Name: fmt.Sprintf("pod-%03d", most+6-i)})
		p.Lost = append(p.Lost, strings.Repeat("x", longest+1))
		p.Asked = append(p.Asked, strings.Repeat("x", longest+1))
	}
	p.Steps = append(p.Steps, plan.Step{Kind: plan.PauseOperands, Pods: []plan.Pod{{Namespace: "kube-system", Name: "plugin"}}}, evicts, evicts) // a pod counts once
	for range most {
		p.Steps = append(p.Steps, plan.Step{Kind: plan.StopUnits, Unit: "a.service"})
	}
	var got api.Answer
	p.AddTo(&got)
	if counts := []int{len(got.Steps), got.More, len(got.Pods), got.MorePods, len(got.Lost), got.MoreLost, len(got.Asked)}; !slices.Equal(counts, []int{most, 3, most, 7, most, 7, 11}) {
		t.Errorf("steps and more, pods and more, losses and more, pods that are asked: %v", counts)
	}
	if got.Pods[0] != "team/pod-000" || !slices.IsSorted(got.Pods) || slices.Contains(got.Pods, "kube-system/plugin") {
		t.Errorf("pods that leave: %v", got.Pods)
	}
	for _, text := range slices.Concat(got.Steps, got.Lost, got.Asked, []string{got.HeldUp}) {
		if len(text) > longest+len("…") || !utf8.ValidString(text) {
			t.Errorf("%d bytes of text: %q", len(text), text)
		}
	}
	if got.Runs != "at once" || got.Reason != config.ReasonHeld || time.Duration(got.Patience) != time.Hour || got.Reboot {
		t.Errorf("got %+v", got)
	}
}

// Eight equal GPUs are one group: the answer has room for them, and a drawing fits a screen.
func TestGPUsThatAreAlikeAreOneGroup(t *testing.T) {
	t.Parallel()
	grid := []nvml.Profile{{Name: "1g.10gb", Slices: 1, Max: 7, Placements: []nvml.Span{{Start: 0, Size: 1}, {Start: 7, Size: 1}}}}
	p := preview.Result{Steps: []plan.Step{{Kind: plan.Fence}}, Offers: "nvidia.com/mig-1g.10gb 8", Takes: time.Minute, Measured: true}
	for i := range 8 {
		whole := nvml.GPU{UUID: nvml.UUID(fmt.Sprint(i)), Index: i, Model: "NVIDIA H100", Profiles: grid}
		cut := whole
		cut.Enabled = true
		if i != 3 {
			cut.Instances = []nvml.Instance{{Placed: nvml.Placed{Profile: "1g.10gb", Span: nvml.Span{Start: 2, Size: 1}}}}
		}
		p.Before, p.After = append(p.Before, whole), append(p.After, cut)
	}
	p.AtReboot = p.Before[7:]
	one := api.Recut{
		GPUs: []int{0, 1, 2, 4, 5, 6}, Model: "NVIDIA H100", Slices: 8,
		After: api.Layout{MIG: true, Instances: []api.Place{{Is: "1g.10gb@2", At: 2, Size: 1}}},
	}
	empty, later := one, one
	empty.GPUs, empty.After.Instances = []int{3}, nil
	later.GPUs, later.AtReboot = []int{7}, true
	var got api.Answer
	p.AddTo(&got)
	if diff := cmp.Diff([]api.Recut{one, empty, later}, got.GPUs); diff != "" || got.Offers != p.Offers || time.Duration(got.Takes) != p.Takes || !got.Measured {
		t.Errorf("offers %q, takes %s, GPUs (-want +got):\n%s", got.Offers, time.Duration(got.Takes), diff)
	}
	p.Steps = nil
	var nothing api.Answer
	if p.AddTo(&nothing); nothing.GPUs != nil {
		t.Errorf("where nothing changes: %+v", nothing.GPUs)
	}
}

func TestATextIsShortenedBetweenTwoCharacters(t *testing.T) {
	t.Parallel()
	const longest = 1000
	for _, row := range []struct{ text, want string }{
		{strings.Repeat("x", longest), strings.Repeat("x", longest)},
		{strings.Repeat("x", longest+1), strings.Repeat("x", longest) + "…"},
		{"x" + strings.Repeat("ü", longest/2), "x" + strings.Repeat("ü", longest/2-1) + "…"},
		{"", ""},
	} {
		if got := preview.Shortened(row.text); got != row.want {
			t.Errorf("%d bytes are shortened to %d, want %d", len(row.text), len(got), len(row.want))
		}
	}
}

// A change that waits for a reboot, or does it, says so.
func TestAnAnswerNamesTheReboot(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		result preview.Result
		want   bool
	}{
		"by the agent":    {preview.Result{Reboot: true}, true},
		"by another user": {preview.Result{AtReboot: []nvml.GPU{{UUID: "GPU-a"}}}, true},
		"without one":     {preview.Result{Before: []nvml.GPU{{UUID: "GPU-a"}}}, false},
	} {
		var got api.Answer
		if row.result.AddTo(&got); got.Reboot != row.want {
			t.Errorf("%s: %v", name, got.Reboot)
		}
	}
}

// What no class of NVIDIA's DRA driver gives after the change is said, and not of nodes that a device plugin serves.
func TestThatNoWholeGPUIsLeftIsSaid(t *testing.T) {
	t.Parallel()
	whole, cut := nvml.GPU{UUID: "GPU-a"}, nvml.GPU{UUID: "GPU-a", Enabled: true}
	claims, plugin := state.Owner{Kind: api.OwnerDRAStatic}, state.Owner{Kind: api.OwnerPlugin, Plugin: "pod"}
	for name, row := range map[string]struct {
		owner         state.Owner
		before, after []nvml.GPU
		says          bool
	}{
		"all are cut":             {claims, []nvml.GPU{whole, cut}, []nvml.GPU{cut, cut}, true},
		"one is left":             {claims, []nvml.GPU{whole, whole}, []nvml.GPU{whole, cut}, false},
		"the one left is lost":    {claims, []nvml.GPU{whole, whole}, []nvml.GPU{{UUID: "GPU-a", Lost: true}, cut}, true},
		"none was before":         {claims, []nvml.GPU{cut}, []nvml.GPU{cut}, false},
		"a device plugin's GPUs":  {plugin, []nvml.GPU{whole}, []nvml.GPU{cut}, false},
		"one becomes whole again": {claims, []nvml.GPU{cut}, []nvml.GPU{whole}, false},
	} {
		p := preview.Result{Before: row.before, After: row.after}
		p.Notes = offer.Of(&state.Observed{Owner: row.owner}).Notes(p.Before, p.After)
		var got api.Answer
		if p.AddTo(&got); (len(got.Notes) == 1) != row.says || row.says && !strings.Contains(got.Notes[0], "class gpu.nvidia.com matches no device") {
			t.Errorf("%s: %v", name, got.Notes)
		}
	}
}

// Some programs of NVIDIA's do not start on nodes with many MIG devices, whoever offers these.
func TestThatManyMIGDevicesAreTooManyForSomeProgramsIsSaid(t *testing.T) {
	t.Parallel()
	with := func(devices int) (out []nvml.GPU) {
		for range devices / 2 {
			g := nvml.GPU{Enabled: true}
			g.Instances = []nvml.Instance{
				{Placed: nvml.Placed{Profile: "3g.71gb"}}, {Placed: nvml.Placed{Profile: "3g.71gb", Span: nvml.Span{Start: 4, Size: 4}}},
			}
			out = append(out, g)
		}
		return out
	}
	divided := with(14)
	divided[0].Instances[0].Compute = strings.TrimSuffix(strings.Repeat("1c+", 11), "+")
	for name, row := range map[string]struct {
		before, after []nvml.GPU
		says          string
	}{
		"as many as have been seen to work": {with(0), with(16), ""},
		"more":                              {with(0), with(24), "the node has 24 MIG devices"},
		"still more":                        {with(24), with(56), "the node has 56 MIG devices"},
		"fewer than before":                 {with(56), with(24), ""},
		"instances that are divided":        {with(0), divided, "the node has 24 MIG devices"},
	} {
		for _, owner := range []state.Owner{{Kind: api.OwnerPlugin, Plugin: "pod"}, {Kind: api.OwnerDRAStatic}} {
			said := strings.Join(offer.Of(&state.Observed{Owner: owner}).Notes(row.before, row.after), "\n")
			if !strings.Contains(said, row.says) || (said == "") != (row.says == "") {
				t.Errorf("%s, %s: %q", name, owner.Kind, said)
			}
		}
	}
}

// Only what goes with the pods that leave is lost, and only what nothing brings back.
func TestWhatIsLostForGood(t *testing.T) {
	t.Parallel()
	pods := map[string]holders.Pod{
		"bare":     {},
		"of-a-set": {Controller: "ReplicaSet/api"},
		"static":   {Mirror: true},
		"ending":   {Terminating: true},
		"scratch":  {Controller: "Job/train", EmptyDirs: []string{"cache", "work"}},
		"both":     {EmptyDirs: []string{"work"}},
		"stays":    {EmptyDirs: []string{"work"}},
	}
	seen, leave := &state.Observed{}, plan.Step{Kind: plan.Evict}
	for name, p := range pods {
		p.Namespace, p.Name = "team", name
		seen.Holders.Pods = append(seen.Holders.Pods, p)
		if name != "stays" {
			leave.Pods = append(leave.Pods, plan.Pod{Namespace: "team", Name: name})
		}
	}
	stays := plan.Step{Kind: plan.PauseOperands, Pods: []plan.Pod{{Namespace: "team", Name: "stays"}}}
	want := []string{
		"pod team/bare, which no controller recreates", "pod team/both, which no controller recreates",
		"the files of team/both on emptyDir work", "the files of team/scratch on emptyDir cache, work",
	}
	if diff := cmp.Diff(want, preview.Losses(seen, []plan.Step{stays, leave, leave})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A config of the device plugin that a user has set stays beside a profile alone, and one that an agent has set stays everywhere.
func TestTheLabelsOfAPlan(t *testing.T) {
	t.Parallel()
	const own = config.OwnPluginKey + "0d1e2f"
	for name, row := range map[string]struct{ label, asked, former, want string }{
		"a config":                             {config.LabelMIGConfig, "all-1g.10gb", "", ""},
		"a config, after one of the plugin":    {config.LabelMIGConfig, "all-1g.10gb", "shared", ""},
		"a config, after one of the agent's":   {config.LabelMIGConfig, "all-1g.10gb", own, own},
		"a profile, beside one of the plugin":  {config.LabelProfile, "team", "shared", "shared"},
		"a profile, after one of the agent's":  {config.LabelProfile, "team", own, own},
		"a config of the plugin, after one":    {config.LabelDevicePluginConfig, "shared", "other", "shared"},
		"a config of the plugin, after others": {config.LabelDevicePluginConfig, "shared", own, "shared"},
	} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{config.LabelMIGConfig: "former", config.LabelProfile: "former"}}}
		if row.former != "" {
			node.Labels[config.LabelDevicePluginConfig] = row.former
		}
		preview.SetLabels(node, row.label, row.asked)
		want := map[string]string{row.label: row.asked}
		if row.want != "" {
			want[config.LabelDevicePluginConfig] = row.want
		}
		if diff := cmp.Diff(want, node.Labels); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
