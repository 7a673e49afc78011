package repo_test

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"reflect"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// policies are the admission policies of deploy/policies.
func policies(t *testing.T) []*admissionv1.ValidatingAdmissionPolicy {
	t.Helper()
	var out []*admissionv1.ValidatingAdmissionPolicy
	for _, m := range manifests(t) {
		if p, ok := m.object.(*admissionv1.ValidatingAdmissionPolicy); ok {
			out = append(out, p)
		}
	}
	if len(out) < 6 {
		t.Fatalf("found %d policies", len(out))
	}
	return out
}

// byItsName is how policies know the agents' account: in any namespace, since kustomize gives an account another without writing into a policy.
const byItsName = ".matches('^system:serviceaccount:[^:]+:gpuslice-agent$')"

// A policy for an account that no pod has would never act, and nothing would say so.
func TestPoliciesConfineTheAccountOfTheDaemonSet(t *testing.T) {
	if d := the[*appsv1.DaemonSet](t, "gpuslice-agent"); !strings.Contains(byItsName, ":"+d.Spec.Template.Spec.ServiceAccountName+"$'") {
		t.Errorf("the agent's pods have the account %s, and policies are for that of %s", d.Spec.Template.Spec.ServiceAccountName, byItsName)
	}
	want := "request.userInfo.username" + byItsName
	for _, p := range policies(t) {
		c := p.Spec.MatchConditions
		if p.Name == "gpuslice-assign" { // it is for all, and the agent has the right
			if text, err := json.Marshal(p.Spec); err != nil || strings.Contains(string(text), "serviceaccount") {
				t.Errorf("%s names an account, which has another namespace elsewhere: %s, %v", p.Name, text, err)
			}
			continue
		}
		if len(c) != 1 || c[0].Expression != want {
			t.Errorf("%s: matchConditions are %v, want %s alone", p.Name, c, want)
		}
	}
}

func TestPoliciesRefuseWhatTheyCannotJudge(t *testing.T) {
	bound := map[string]*admissionv1.ValidatingAdmissionPolicyBinding{}
	for _, m := range manifests(t) {
		if b, ok := m.object.(*admissionv1.ValidatingAdmissionPolicyBinding); ok {
			bound[b.Spec.PolicyName] = b
		}
	}
	for _, p := range policies(t) {
		if p.Spec.FailurePolicy == nil || *p.Spec.FailurePolicy != admissionv1.Fail {
			t.Errorf("%s: failurePolicy is not Fail", p.Name)
		}
		b := bound[p.Name]
		if b == nil || !slices.Contains(b.Spec.ValidationActions, admissionv1.Deny) || b.Spec.MatchResources != nil {
			t.Errorf("%s is not bound everywhere with the action Deny", p.Name)
			continue
		}
		if (p.Spec.ParamKind == nil) != (b.Spec.ParamRef == nil) ||
			b.Spec.ParamRef != nil && *b.Spec.ParamRef.ParameterNotFoundAction != admissionv1.DenyAction {
			t.Errorf("%s: without parameters it lets everything through", p.Name)
		}
		for _, v := range p.Spec.Validations {
			if v.Reason == nil || *v.Reason != "Forbidden" {
				t.Errorf("%s: reason of %q is not Forbidden, by which the agent distinguishes a missing right from a request that makes no sense", p.Name, v.Message)
			}
		}
	}
}

// nodePolicy is the text of the policy for nodes.
func nodePolicy(t *testing.T) string {
	t.Helper()
	for _, p := range policies(t) {
		if p.Name == "gpuslice-agent-nodes" {
			text, err := json.Marshal(p.Spec)
			if err != nil {
				t.Fatal(err)
			}
			return strings.NewReplacer(`\u0026`, "&", `\u003c`, "<", `\u003e`, ">").Replace(string(text))
		}
	}
	t.Fatal("there is no policy for nodes")
	return ""
}

func TestThePolicyForNodesKnowsEveryField(t *testing.T) {
	text := nodePolicy(t)
	for _, of := range []any{corev1.NodeSpec{}, corev1.NodeStatus{}} {
		for field := range reflect.TypeOf(of).Fields() {
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			known := strings.Contains(text, "'"+name+"'") || strings.Contains(text, "spec."+name) || strings.Contains(text, "status."+name)
			if !known && name != "unschedulable" { // the cordon is the agent's
				t.Errorf("%T has a field %q, which the policy for nodes leaves to the agent", of, name)
			}
		}
	}
}

// A condition or annotation that the agent writes and the policy does not know is refused at the first node of a cluster.
func TestThePolicyForNodesKnowsWhatTheAgentWrites(t *testing.T) {
	text := nodePolicy(t)
	file, err := parser.ParseFile(token.NewFileSet(), root+"/config/keys.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, d := range file.Decls {
		group, ok := d.(*ast.GenDecl)
		if !ok || group.Tok != token.CONST {
			continue
		}
		for _, s := range group.Specs {
			spec, ok := s.(*ast.ValueSpec)
			if !ok || !writtenByTheAgent(spec.Names[0].Name, group.Doc.Text()) {
				continue
			}
			found++
			literal, ok := spec.Values[0].(*ast.BasicLit)
			if !ok {
				t.Fatalf("%s is no literal", spec.Names[0].Name)
			}
			if value := strings.Trim(literal.Value, `"`); !strings.Contains(text, "'"+value+"'") {
				t.Errorf("the agent writes %s, which the policy for nodes does not allow", value)
			}
		}
	}
	if found < 10 {
		t.Errorf("found %d keys in config/keys.go", found)
	}
}

// writtenByTheAgent goes by the name of a key, and by what is said of the group that it is in.
func writtenByTheAgent(name, group string) bool {
	return strings.HasPrefix(name, "Condition") || strings.HasPrefix(name, "Taint") ||
		strings.HasPrefix(name, "Annotation") && strings.HasPrefix(group, "Annotations of the node that the agent writes")
}
