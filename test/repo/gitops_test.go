package repo_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/ext"
	gocmp "github.com/google/go-cmp/cmp"
	lua "github.com/yuin/gopher-lua"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/config"
)

// application has the fields of Argo CD's Application (v3.2.0) that an example may have.
type application struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Project string `json:"project"`
		Source  struct {
			RepoURL        string `json:"repoURL"`
			TargetRevision string `json:"targetRevision"`
			Path           string `json:"path"`
			Kustomize      struct {
				Images []string `json:"images"`
			} `json:"kustomize"`
		} `json:"source"`
		Destination struct {
			Server    string `json:"server"`
			Namespace string `json:"namespace"`
		} `json:"destination"`
		SyncPolicy struct {
			Automated struct {
				Prune    bool `json:"prune"`
				SelfHeal bool `json:"selfHeal"`
			} `json:"automated"`
			SyncOptions []string `json:"syncOptions"`
		} `json:"syncPolicy"`
	} `json:"spec"`
}

// fluxObject has the fields of Flux' GitRepository and Kustomization (v1) that an example may have.
type fluxObject struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Interval metav1.Duration `json:"interval"`
		URL      string          `json:"url"`
		Ref      struct {
			Tag string `json:"tag"`
		} `json:"ref"`

		Timeout   metav1.Duration     `json:"timeout"`
		DependsOn []map[string]string `json:"dependsOn"`
		SourceRef struct {
			Kind string `json:"kind"`
			Name string `json:"name"`
		} `json:"sourceRef"`
		Path   string `json:"path"`
		Images []struct {
			Name    string `json:"name"`
			NewName string `json:"newName"`
			NewTag  string `json:"newTag"`
		} `json:"images"`
		Prune          bool   `json:"prune"`
		DeletionPolicy string `json:"deletionPolicy"`
		Wait           bool   `json:"wait"`
		HealthChecks   []struct {
			APIVersion string `json:"apiVersion"`
			Kind       string `json:"kind"`
			Name       string `json:"name"`
			Namespace  string `json:"namespace"`
		} `json:"healthChecks"`
		HealthCheckExprs []fluxCheck `json:"healthCheckExprs"`
	} `json:"spec"`
}

type fluxCheck struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	InProgress string `json:"inProgress"`
	Failed     string `json:"failed"`
	Current    string `json:"current"`
}

// gitops reads the documents of an example.
func gitops[T any](t *testing.T, file string) (out []T) {
	t.Helper()
	for _, doc := range strings.Split(read(t, "deploy/examples/"+file), "\n---\n") {
		var one T
		if err := sigsyaml.UnmarshalStrict([]byte(doc), &one); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		out = append(out, one)
	}
	return out
}

func TestTheExamplesForGitOpsPointAtWhatThereIs(t *testing.T) {
	argo, flux := gitops[application](t, "argocd.yaml"), gitops[fluxObject](t, "flux.yaml")
	if len(argo) != 2 || len(flux) != 3 {
		t.Fatalf("%d Applications, %d objects of Flux", len(argo), len(flux))
	}
	agents := flux[1].Spec
	for _, path := range []string{argo[0].Spec.Source.Path, agents.Path} {
		readKustomization(t, filepath.Join("..", "..", path, "kustomization.yaml"))
	}
	const image = "gpuslice/gpuslice-agent"
	daemonSet := the[*appsv1.DaemonSet](t, "gpuslice-agent")
	if got := daemonSet.Spec.Template.Spec.Containers[0].Image; !strings.HasPrefix(got, image+":") {
		t.Errorf("the agents run %s", got)
	}
	if got := argo[0].Spec.Source.Kustomize.Images; len(got) != 1 || !strings.HasPrefix(got[0], image+"=") {
		t.Errorf("Argo CD replaces the images %v", got)
	}
	if got := agents.Images; len(got) != 1 || got[0].Name != image {
		t.Errorf("Flux replaces the images %v", got)
	}
	if c := agents.HealthChecks; len(c) != 1 || c[0].Kind != "DaemonSet" || c[0].Name != daemonSet.Name || c[0].Namespace != daemonSet.Namespace {
		t.Errorf("Flux checks the health of %v", c)
	}
}

// A tool that has a manifest of a node would delete the node, or take from it what others have set.
func TestGitOpsToolsLeaveWhatElseANodeHas(t *testing.T) {
	if nodes := gitops[fluxObject](t, "flux.yaml")[2].Spec; !nodes.Wait || nodes.Prune || nodes.DeletionPolicy != "Orphan" {
		t.Error("Flux prunes nodes, or does not await their health")
	}
	if policy := gitops[application](t, "argocd.yaml")[1].Spec.SyncPolicy; policy.Automated.Prune || !slices.Contains(policy.SyncOptions, "Prune=false") {
		t.Error("Argo CD prunes nodes")
	}
	want := map[string]string{
		"argocd.argoproj.io/sync-options":   "ServerSideApply=true,Prune=false,Delete=false",
		"kustomize.toolkit.fluxcd.io/prune": "disabled", "kustomize.toolkit.fluxcd.io/ssa": "Merge",
	}
	nodes := 0
	for _, m := range manifests(t) {
		node, is := m.object.(*corev1.Node)
		if !is {
			continue
		}
		nodes++
		if diff := gocmp.Diff(want, node.Annotations); diff != "" || len(node.Labels) != 1 {
			t.Errorf("%s has the labels %v and these annotations (-want +got):\n%s", node.Name, node.Labels, diff)
		}
	}
	if nodes == 0 {
		t.Error("there is no manifest of a node")
	}
}

// argoHealth is what Argo CD makes of a node by the example's script: with the libraries that it gives scripts, and its limit of a second.
func argoHealth(t *testing.T, script string, node map[string]any) (status, message string) {
	t.Helper()
	l := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	l.SetContext(ctx)
	for name, open := range map[string]lua.LGFunction{lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable} {
		if err := l.CallByParam(lua.P{Fn: l.NewFunction(open), Protect: true}, lua.LString(name)); err != nil {
			t.Fatal(err)
		}
	}
	l.SetGlobal("obj", luaValue(l, node))
	if err := l.DoString(script); err != nil {
		t.Fatal(err)
	}
	table, ok := l.Get(-1).(*lua.LTable)
	if !ok {
		t.Fatalf("the script gives %s", l.Get(-1))
	}
	return table.RawGetString("status").String(), table.RawGetString("message").String()
}

func luaValue(l *lua.LState, of any) lua.LValue {
	switch v := of.(type) {
	case map[string]any:
		table := l.NewTable()
		for key, value := range v {
			table.RawSetString(key, luaValue(l, value))
		}
		return table
	case []any:
		table := l.NewTable()
		for _, value := range v {
			table.Append(luaValue(l, value))
		}
		return table
	case nil:
		return lua.LNil
	default:
		return lua.LString(fmt.Sprint(v))
	}
}

// fluxHealth is what Flux makes of a node by the example's expressions: in this order, and in progress if none is true.
func fluxHealth(t *testing.T, check fluxCheck, node map[string]any) string {
	t.Helper()
	env, err := cel.NewEnv(cel.HomogeneousAggregateLiterals(), cel.EagerlyValidateDeclarations(true), cel.DefaultUTCTimeZone(true),
		cel.CrossTypeNumericComparisons(true), cel.OptionalTypes(), ext.Strings(), ext.Sets(), ext.Encoders())
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range []struct{ is, expression string }{{"InProgress", check.InProgress}, {"Failed", check.Failed}, {"Current", check.Current}} {
		parsed, issues := env.Parse(one.expression)
		if issues.Err() != nil {
			t.Fatal(issues.Err())
		}
		program, err := env.Program(parsed)
		if err != nil {
			t.Fatal(err)
		}
		value, _, err := program.Eval(node)
		if err != nil {
			t.Fatalf("%s: %v", one.expression, err)
		}
		if value.Value() == true {
			return one.is
		}
	}
	return "InProgress"
}

// reported is a node with what its agent has reported, and what Argo CD makes of it.
type reported struct {
	labels  map[string]string
	desired string // in the report; empty without one
	byLabel string // in the report, if it is not that of mig.config
	status  corev1.ConditionStatus
	reason  config.Reason
	beside  []corev1.NodeCondition
	lost    bool     // the node is not Ready
	without []string // fields that are null
	argo    string
}

// object is the node as the tools get it.
func (row *reported) object(t *testing.T) map[string]any {
	t.Helper()
	node := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", Labels: row.labels}}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"}}
	if row.status != "" {
		node.Status.Conditions = append(node.Status.Conditions, corev1.NodeCondition{
			Type: config.ConditionGPUPartitionReady, Status: row.status, Reason: string(row.reason), Message: "see there",
		})
	}
	node.Status.Conditions = append(node.Status.Conditions, row.beside...)
	if row.lost {
		node.Status.Conditions[0].Status = corev1.ConditionUnknown
	}
	if row.desired != "" {
		status := api.Status{Desired: row.desired, Label: cmp.Or(row.byLabel, config.LabelMIGConfig), Reason: row.reason}
		text, fits, err := report.EncodeStatus(status, 1<<10)
		if err != nil || !fits {
			t.Fatal(err)
		}
		node.Annotations = map[string]string{config.AnnotationStatus: text}
	}
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&node)
	if err != nil {
		t.Fatal(err)
	}
	conditions, _, _ := unstructured.NestedSlice(object, "status", "conditions")
	for _, c := range conditions {
		if of, is := c.(map[string]any); is && of["type"] == "" {
			delete(of, "type")
		}
	}
	err = unstructured.SetNestedSlice(object, conditions, "status", "conditions")
	for _, field := range row.without {
		err = errors.Join(err, unstructured.SetNestedField(object, nil, strings.Split(field, ".")...))
	}
	if err != nil {
		t.Fatal(err)
	}
	return object
}

func TestGitOpsToolsReadTheHealthOfANode(t *testing.T) {
	var patch struct{ Data map[string]string }
	if err := sigsyaml.Unmarshal([]byte(read(t, "deploy/examples/argocd-health.yaml")), &patch); err != nil {
		t.Fatal(err)
	}
	script := patch.Data["resource.customizations.health.Node"]
	checks := gitops[fluxObject](t, "flux.yaml")[2].Spec.HealthCheckExprs
	if len(checks) != 1 || checks[0].APIVersion != "v1" || checks[0].Kind != "Node" {
		t.Fatalf("Flux has the checks %v", checks)
	}
	profile, mig := map[string]string{config.LabelProfile: "research"}, map[string]string{config.LabelMIGConfig: "all-balanced"}
	failed := map[string]string{config.LabelMIGConfig: "all-balanced", config.LabelMIGConfigState: string(config.StateFailed)}
	plugin := map[string]string{config.LabelDevicePluginConfig: "any"}
	both := map[string]string{config.LabelMIGConfig: "all-balanced", config.LabelDevicePluginConfig: "any"}
	own := map[string]string{config.LabelMIGConfig: "all-balanced", config.LabelDevicePluginConfig: config.OwnPluginKey + "7"}
	sick := corev1.NodeCondition{Type: config.ConditionGPUUnhealthy, Status: corev1.ConditionTrue, Reason: string(config.ReasonUnknownConfig), Message: "see there"}
	well := corev1.NodeCondition{Type: config.ConditionGPUUnhealthy, Status: corev1.ConditionFalse}
	undone := corev1.NodeCondition{Type: config.ConditionGPUPartitionReady, Status: corev1.ConditionFalse, Reason: string(config.ReasonEvicting), Message: "see there"}
	beside := func(state config.State) map[string]string {
		return map[string]string{config.LabelProfile: "research", config.LabelMIGConfig: "all-balanced", config.LabelMIGConfigState: string(state)}
	}
	for name, row := range map[string]reported{
		"no label":                            {status: corev1.ConditionTrue, reason: config.ReasonNotRequested, argo: "Healthy"},
		"another's labels alone":              {labels: map[string]string{"a": "b"}, argo: "Healthy"},
		"labels, annotations without value":   {without: []string{"metadata.labels", "metadata.annotations"}, argo: "Healthy"},
		"no label, and a state":               {labels: map[string]string{config.LabelMIGConfigState: "failed"}, status: corev1.ConditionFalse, argo: "Healthy"},
		"a label that is empty":               {labels: map[string]string{config.LabelMIGConfig: ""}, status: corev1.ConditionFalse, argo: "Healthy"},
		"no agent yet":                        {labels: mig, argo: "Progressing"},
		"no status":                           {labels: mig, without: []string{"metadata.annotations", "status"}, argo: "Progressing"},
		"no conditions":                       {labels: mig, desired: "all-balanced", without: []string{"status.conditions"}, argo: "Progressing"},
		"as asked":                            {labels: mig, desired: "all-balanced", status: corev1.ConditionTrue, reason: config.ReasonConverged, argo: "Healthy"},
		"beside a condition without a type":   {labels: mig, desired: "all-balanced", status: corev1.ConditionTrue, beside: []corev1.NodeCondition{{}}, argo: "Healthy"},
		"as a profile asks":                   {labels: profile, desired: "research", byLabel: config.LabelProfile, status: corev1.ConditionTrue, argo: "Healthy"},
		"a profile that asks for the same":    {labels: beside(config.StateSuccess), desired: "research", byLabel: config.LabelProfile, status: corev1.ConditionTrue, argo: "Healthy"},
		"a profile that asks for another":     {labels: beside(config.StateFailed), desired: "research", byLabel: config.LabelProfile, status: corev1.ConditionTrue, argo: "Degraded"},
		"as a config of the profile's name":   {labels: profile, desired: "research", status: corev1.ConditionTrue, argo: "Progressing"},
		"with a default of the plugin":        {labels: mig, desired: "all-balanced + default", status: corev1.ConditionTrue, argo: "Healthy"},
		"with one that the agent has labeled": {labels: own, desired: "all-balanced + default", status: corev1.ConditionTrue, argo: "Healthy"},
		"as the label before asked":           {labels: mig, desired: "all-disabled", status: corev1.ConditionTrue, reason: config.ReasonConverged, argo: "Progressing"},
		"as one with a longer name asked":     {labels: mig, desired: "all-balanced-2", status: corev1.ConditionTrue, reason: config.ReasonConverged, argo: "Progressing"},
		"when the label before failed":        {labels: failed, desired: "all-1g.10gb", status: corev1.ConditionFalse, reason: config.ReasonUnknownConfig, argo: "Progressing"},
		"a change is under way":               {labels: mig, desired: "all-balanced", status: corev1.ConditionFalse, reason: config.ReasonEvicting, argo: "Progressing"},
		"refused":                             {labels: failed, desired: "all-balanced", status: corev1.ConditionFalse, reason: config.ReasonUnknownConfig, argo: "Degraded"},
		"failed, and not known since":         {labels: failed, desired: "all-balanced", status: corev1.ConditionUnknown, reason: config.ReasonDriverNotLoaded, argo: "Degraded"},
		"held":                                {labels: mig, desired: "all-balanced", status: corev1.ConditionFalse, reason: config.ReasonHeld, argo: "Suspended"},
		"before its window":                   {labels: mig, desired: "all-balanced", status: corev1.ConditionFalse, reason: config.ReasonAwaitingWindow, argo: "Suspended"},
		"without a driver":                    {labels: mig, desired: "all-balanced", status: corev1.ConditionUnknown, reason: config.ReasonDriverNotLoaded, argo: "Progressing"},
		"a GPU is unhealthy":                  {labels: mig, desired: "all-balanced", status: corev1.ConditionTrue, beside: []corev1.NodeCondition{sick, well}, argo: "Degraded"},
		"kubelet is silent":                   {labels: mig, desired: "all-balanced", status: corev1.ConditionTrue, lost: true, argo: "Progressing"},
		"the condition twice":                 {labels: mig, desired: "all-balanced", status: corev1.ConditionTrue, beside: []corev1.NodeCondition{undone}, argo: "Progressing"},
		"twice, and failed":                   {labels: failed, desired: "all-balanced", status: corev1.ConditionTrue, beside: []corev1.NodeCondition{undone}, argo: "Degraded"},
		"a config of the plugin alone":        {labels: plugin, desired: "any", byLabel: config.LabelDevicePluginConfig, status: corev1.ConditionTrue, argo: "Healthy"},
		"the same, and no agent":              {labels: plugin, argo: "Progressing"},
		"as the plugin's before asked":        {labels: plugin, desired: "other", byLabel: config.LabelDevicePluginConfig, status: corev1.ConditionTrue, argo: "Progressing"},
		"both":                                {labels: both, desired: "all-balanced + any", status: corev1.ConditionTrue, argo: "Healthy"},
		"both, the plugin's before":           {labels: both, desired: "all-balanced + other", status: corev1.ConditionTrue, argo: "Progressing"},
		"both, before the plugin's":           {labels: both, desired: "all-balanced", status: corev1.ConditionTrue, argo: "Progressing"},
	} {
		t.Run(name, func(t *testing.T) {
			object := row.object(t)
			status, message := argoHealth(t, script, object)
			if status != row.argo || row.argo == "Degraded" && !strings.HasSuffix(message, ": see there") {
				t.Errorf("Argo CD shows %s: %s, want %s", status, message, row.argo)
			}
			flux := map[string]string{"Healthy": "Current", "Degraded": "Failed"}[row.argo]
			if got := fluxHealth(t, checks[0], object); got != cmp.Or(flux, "InProgress") {
				t.Errorf("Flux shows %s where Argo CD is to show %s", got, row.argo)
			}
		})
	}
}
