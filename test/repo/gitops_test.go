package repo_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/ext"
	"github.com/google/go-cmp/cmp"
	lua "github.com/yuin/gopher-lua"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
		if diff := cmp.Diff(want, node.Annotations); diff != "" || len(node.Labels) != 1 {
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
	for name, row := range map[string]struct {
		labels     map[string]string
		desired    string // in the report; empty without one
		status     corev1.ConditionStatus
		reason     config.Reason
		argo, flux string
	}{
		"no label":                        {nil, "", corev1.ConditionTrue, config.ReasonNotRequested, "Healthy", "Current"},
		"another's labels alone":          {map[string]string{"a": "b"}, "", "", "", "Healthy", "Current"},
		"no agent yet":                    {mig, "", "", "", "Progressing", "InProgress"},
		"as asked":                        {mig, "all-balanced", corev1.ConditionTrue, config.ReasonConverged, "Healthy", "Current"},
		"as a profile asks":               {profile, "research", corev1.ConditionTrue, config.ReasonConverged, "Healthy", "Current"},
		"with a default of the plugin":    {mig, "all-balanced" + api.DesiredSeparator + "default", corev1.ConditionTrue, config.ReasonConverged, "Healthy", "Current"},
		"as the label before asked":       {mig, "all-disabled", corev1.ConditionTrue, config.ReasonConverged, "Progressing", "InProgress"},
		"as one with a longer name asked": {mig, "all-balanced-2", corev1.ConditionTrue, config.ReasonConverged, "Progressing", "InProgress"},
		"when the label before failed":    {failed, "all-1g.10gb", corev1.ConditionFalse, config.ReasonUnknownConfig, "Progressing", "InProgress"},
		"a change is under way":           {mig, "all-balanced", corev1.ConditionFalse, config.ReasonEvicting, "Progressing", "InProgress"},
		"refused":                         {failed, "all-balanced", corev1.ConditionFalse, config.ReasonUnknownConfig, "Degraded", "Failed"},
		"held":                            {mig, "all-balanced", corev1.ConditionFalse, config.ReasonHeld, "Suspended", "InProgress"},
		"before its window":               {mig, "all-balanced", corev1.ConditionFalse, config.ReasonAwaitingWindow, "Suspended", "InProgress"},
		"without a driver":                {mig, "all-balanced", corev1.ConditionUnknown, config.ReasonDriverNotLoaded, "Progressing", "InProgress"},
		"a config of the plugin alone":    {map[string]string{config.LabelDevicePluginConfig: "any"}, "any", corev1.ConditionTrue, config.ReasonConverged, "Healthy", "Current"},
		"the same, and no agent":          {map[string]string{config.LabelDevicePluginConfig: "any"}, "", "", "", "Progressing", "InProgress"},
	} {
		t.Run(name, func(t *testing.T) {
			node := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", Labels: row.labels}}
			node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"}}
			if row.status != "" {
				node.Status.Conditions = append(node.Status.Conditions, corev1.NodeCondition{
					Type: config.ConditionGPUPartitionReady, Status: row.status, Reason: string(row.reason), Message: "see there",
				})
			}
			if row.desired != "" {
				text, fits, err := report.EncodeStatus(api.Status{Desired: row.desired, Label: "l", Reason: row.reason}, 1<<10)
				if err != nil || !fits {
					t.Fatal(err)
				}
				node.Annotations = map[string]string{config.AnnotationStatus: text}
			}
			object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&node)
			if err != nil {
				t.Fatal(err)
			}
			status, message := argoHealth(t, script, object)
			if status != row.argo || row.argo == "Degraded" && message != string(row.reason)+": see there" {
				t.Errorf("Argo CD shows %s: %s, want %s", status, message, row.argo)
			}
			if got := fluxHealth(t, checks[0], object); got != row.flux {
				t.Errorf("Flux shows %s, want %s", got, row.flux)
			}
		})
	}
}
