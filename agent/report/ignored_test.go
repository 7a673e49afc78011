package report

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
)

// What a user has written in vain is named once by an Event, and by each condition.
func TestAKeyWithoutEffectIsNamed(t *testing.T) {
	const profile, mig, plugin = config.LabelProfile, config.LabelMIGConfig, config.LabelDevicePluginConfig
	long := strings.Repeat("x", 1000)
	for name, row := range map[string]struct {
		labels, annotations map[string]string
		older               bool // the annotations were there before the agent
		want                string
	}{
		"misspelt profile":    {labels: map[string]string{"gpuslice.io/profle": "x"}, want: "did you mean " + profile + " by the label gpuslice.io/profle?"},
		"misspelt MIG config": {labels: map[string]string{"nvidia.com/mig-config": "x"}, want: "did you mean " + mig + " by the label nvidia.com/mig-config?"},
		"misspelt config":     {labels: map[string]string{plugin + "s": "x"}, want: "did you mean " + plugin + " by the label " + plugin + "s?"},
		"misspelt annotation": {annotations: map[string]string{"gpuslice.io/holds": ""}, want: "did you mean gpuslice.io/hold by the annotation gpuslice.io/holds?"},
		"annotation as label": {labels: map[string]string{config.AnnotationHold: "x"}, want: "label gpuslice.io/hold has no effect: it is the key of an annotation"},
		"label as annotation": {annotations: map[string]string{profile: "x"}, want: "annotation gpuslice.io/profile has no effect: it is the key of a label"},
		"force by another value": {
			annotations: map[string]string{config.AnnotationForce: "true"},
			want:        "annotation gpuslice.io/force=true begins no change: its value is now, or the id of the change",
		},
		"force by a long value": {
			annotations: map[string]string{config.AnnotationForce: long},
			want:        "annotation gpuslice.io/force=" + long[:63] + "… begins no change: its value is now, or the id of the change",
		},
		"force from before the agent": {
			annotations: map[string]string{config.AnnotationForce: config.ForceNow}, older: true,
			want: "annotation gpuslice.io/force begins no change: it was there before the agent",
		},
		"force now":        {annotations: map[string]string{config.AnnotationForce: config.ForceNow}},
		"force this":       {annotations: map[string]string{config.AnnotationForce: "f1"}},
		"the agent's own":  {annotations: map[string]string{config.AnnotationStatus: "", config.AnnotationPublished: "", config.AnnotationJournal: "", config.AnnotationPlan: ""}},
		"users' own":       {annotations: map[string]string{config.AnnotationHold: "", config.AnnotationHealthAck: "", config.AnnotationKeepCordoned: ""}},
		"requests":         {labels: map[string]string{profile: "x", mig: "x", plugin: "x"}},
		"answers":          {labels: map[string]string{config.LabelMIGConfigState: "x", "nvidia.com/mig.capable": "x", "nvidia.com/mig.strategy": "x"}},
		"NVIDIA's others":  {labels: map[string]string{"nvidia.com/gpu.count": "8", "nvidia.com/gpu.deploy.mig-manager": "x"}},
		"of other domains": {labels: map[string]string{"example.com/profle": "x", "profle": "x"}},
		"a hundred": {
			labels: map[string]string{"gpuslice.io/profil": "", "gpuslice.io/profile1": "", "gpuslice.io/profile2": "", "gpuslice.io/profile3": ""},
			want:   "did you mean " + profile + " by the label gpuslice.io/profil?; did you mean " + profile + " by the label gpuslice.io/profile1?; did you mean " + profile + " by the label gpuslice.io/profile2?",
		},
	} {
		t.Run(name, func(t *testing.T) {
			seen := &state.Observed{Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: row.labels, Annotations: row.annotations}}}
			if row.older {
				seen.Record.Learnt.Found = row.annotations
			}
			got := (&Writer{}).Ignored(seen, state.Desired{Name: "research", Fingerprint: "f1"})
			if got = strings.TrimPrefix(got, "; "); got != row.want {
				t.Errorf("got %q, want %q", got, row.want)
			}
		})
	}
}
