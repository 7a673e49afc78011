package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/report/preview"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
)

// renewal is the longest time between two passes while a user requests a plan. No watch shows the end of some obstacles: a disruption budget, a slot of the
// pool, the beginning of a window.
const renewal = 30 * time.Second

// answer writes the answer to the request in the node's annotation, or removes the answer to a request that was removed. While a request for a plan stays,
// the agent plans again, and writes a plan that differs from the one on the node. If it cannot answer, it logs that, and continues with the change.
func (a *Agent) answer(ctx context.Context, seen *state.Observed, ended error) {
	if seen.Node == nil {
		return
	}
	request, asked := seen.Node.Annotations[config.AnnotationPreview]
	request = preview.Shortened(strings.ToValidUTF8(request, "?"))
	former, answered := seen.Node.Annotations[config.AnnotationPlan]
	given := givenFor(former, request)
	if !asked && !answered || asked && given != nil && !a.renews(request) {
		return
	}
	var text *string // nil removes the annotation
	if asked {
		encoded, err := a.encodedAnswer(ctx, seen, ended, request, given)
		if err != nil {
			a.env.Log.Warn("answering", zap.Error(err))
			return
		}
		if encoded == former {
			return
		}
		a.env.Log.Info("answering", zap.String("for", request))
		text = &encoded
	}
	err := a.env.Nodes.Patch(ctx, seen.Node, func(node *corev1.Node) ([]byte, error) {
		return json.Marshal(map[string]any{"metadata": map[string]any{
			"uid": node.UID, "annotations": map[string]*string{config.AnnotationPlan: text},
		}})
	})
	if err != nil {
		a.env.Log.Warn("answering", zap.Error(err))
	}
}

// asksForPlan reports whether the request is for a plan, which the agent keeps up to date. A diagnosis and the use of GPUs show the node at the time of the
// request.
func asksForPlan(request string) bool {
	return request != config.RequestDiagnosis && request != config.RequestTop
}

// renews reports whether the agent has to answer the node's request again: in each pass, at most once in the settle time.
func (a *Agent) renews(request string) bool {
	since := a.env.Clock.Since(a.answered)
	return asksForPlan(request) && (since < 0 || since >= settleTime)
}

// encodedAnswer is the answer as the annotation has it. If it says the same as the given one, it keeps its time.
func (a *Agent) encodedAnswer(ctx context.Context, seen *state.Observed, ended error, request string, given *api.Answer) (string, error) {
	out, room := a.answerTo(ctx, seen, ended, request), report.RoomFor(seen.Node, config.AnnotationPlan, report.AnswerRoom)
	a.answered = a.env.Clock.Now()
	if given != nil {
		now := out.At
		out.At = given.At
		if same, err := report.EncodeAnswer(out, room); err != nil || same == seen.Node.Annotations[config.AnnotationPlan] {
			return same, err
		}
		out.At = now
	}
	return report.EncodeAnswer(out, room)
}

// givenFor returns the answer in the annotation if it is for the request; otherwise nil.
func givenFor(annotation, request string) *api.Answer {
	var given api.Answer
	if json.Unmarshal([]byte(annotation), &given) != nil || given.For != request {
		return nil
	}
	return &given
}

// answerTo answers the request.
func (a *Agent) answerTo(ctx context.Context, seen *state.Observed, ended error, request string) api.Answer {
	out := api.Answer{For: request, At: a.env.Clock.Stamp()}
	switch request {
	case config.RequestDiagnosis:
		d := a.Diagnose(ctx, true)
		out.Diagnosis = &d
		return out
	case config.RequestTop:
		out.Uses = a.uses()
		return out
	}
	asked, _, ok := config.ParseAllowance(request)
	label, name, _ := strings.Cut(asked, "=")
	if !ok || name == "" || !slices.Contains(config.RequestLabels(), label) {
		out.Refused = fmt.Sprintf("annotation %s is %q: it must be %s=NAME, %s=NAME or %s=NAME, followed by %s or %s if the change may evict such pods, by %s if the label is older than the agent; or %s or %s",
			config.AnnotationPreview, request, config.LabelProfile, config.LabelMIGConfig, config.LabelDevicePluginConfig,
			config.FieldUnmanagedPods, config.FieldEmptyDir, config.AskedAgain, config.RequestDiagnosis, config.RequestTop)
		return out
	}
	if profile := seen.Node.Labels[config.LabelProfile]; profile != "" && label != config.LabelProfile {
		out.Refused = belowProfile(seen, profile, label, name)
		return out
	}
	var p preview.Result
	if ended == nil {
		node := seen.Node.DeepCopy()
		metav1.SetMetaDataLabel(&node.ObjectMeta, label, name)
		if request != asked { // as kubectl gpuslice apply writes it
			metav1.SetMetaDataAnnotation(&node.ObjectMeta, config.AnnotationAllowEviction, request)
		}
		p, ended = a.previewOf(ctx, seen, node)
	} else {
		p, ended = heldUp(p, ended)
	}
	if ended != nil {
		out.Refused, out.Reason = preview.Shortened(ended.Error()), refusal(ended)
		return out
	}
	p.AddTo(&out)
	return out
}

// belowProfile refuses a label of another config while a profile is set: it has no effect, unless the device plugin's config manager reads it.
func belowProfile(seen *state.Observed, profile, label, name string) string {
	node := seen.Node.Name
	if label == config.LabelDevicePluginConfig && seen.DevicePlugin.ObeysLabel {
		return fmt.Sprintf("remove label %[1]s=%[2]s first (kubectl label node %[3]s %[1]s-), then run kubectl gpuslice apply %[3]s --device-plugin-config %[4]s: "+
			"the agent obeys the profile alone, but NVIDIA's config manager obeys %[5]s as well, so the agent fences the node and evicts the pods "+
			"that hold devices which the device plugin no longer advertises", config.LabelProfile, profile, node, name, label)
	}
	return fmt.Sprintf("remove label %[1]s=%[2]s first (kubectl label node %[3]s %[1]s-): it wins over %[4]s, which does not count next to it",
		config.LabelProfile, profile, node, label)
}
