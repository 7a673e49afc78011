package repo_test

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/constant"
	"go/types"
	"maps"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// grant is one verb on one resource, "patch nodes/status", with its API group unless that is the core one.
type grant string

func grantOf(verb, resource, group string) grant {
	if group != "" {
		resource += "." + group
	}
	return grant(verb + " " + resource)
}

// unseen are the grants that calls need which are not made through the client of a kind, with where they are made.
// TestRawCallsToTheAPIServerAreKnown fails when a place is added.
var unseen = map[grant]string{
	"list nodes":                        "watch.watch",
	"watch nodes":                       "watch.watch",
	"list pods":                         "watch.list",
	"watch pods":                        "watch.watch",
	"list configmaps":                   "watch.watch",
	"watch configmaps":                  "watch.watch",
	"list poddisruptionbudgets.policy":  "watch.watchBudgetsOf",
	"watch poddisruptionbudgets.policy": "watch.watchBudgetsOf",

	"list resourceslices.resource.k8s.io":  "watch.listSlices",
	"watch resourceslices.resource.k8s.io": "watch.watchSlices",
}

// verbs of the methods of the client of a kind.
var verbs = map[string]string{
	"Get": "get", "List": "list", "Watch": "watch", "Create": "create", "Update": "update", "Patch": "patch", "Delete": "delete", "EvictV1": "create",
}

// groups are the API groups of the kinds that drain/kube has clients of.
var groups = map[string]string{
	"ConfigMaps": "", "Events": "", "Nodes": "", "Pods": "", "DaemonSets": "apps", "Leases": "coordination.k8s.io", "PodDisruptionBudgets": "policy",
	"DeviceTaintRules":         "resource.k8s.io",
	"ResourceClaims":           "resource.k8s.io",
	"SelfSubjectAccessReviews": "authorization.k8s.io", "SubjectAccessReviews": "authorization.k8s.io", "TokenReviews": "authentication.k8s.io",
}

func TestTheAgentMayDoWhatItsCodeCallsAndNothingElse(t *testing.T) {
	used := map[grant]bool{}
	for g := range unseen {
		used[g] = true
	}
	used["assign profiles.gpuslice.io"] = true // which no call needs, but a policy: components/assign-by-right
	forEachCall(t, func(_ string, info *types.Info, call *ast.CallExpr) {
		if g, ok := clientCall(info, call); ok {
			used[g] = true
		}
	})
	given := map[grant]bool{}
	for _, m := range manifests(t) {
		if m.file != asNodeRole { // whose rules are the same in the name of the node
			maps.Copy(given, grantsOf(rulesOf(m.object)))
		}
	}
	if diff := gocmp.Diff(slices.Sorted(maps.Keys(used)), slices.Sorted(maps.Keys(given))); diff != "" {
		t.Errorf("deploy/base/rbac.yaml beside the calls of agent, drain and cmd (-called +granted):\n%s", diff)
	}
}

// asNodeRole is what the agent may do in the name of its node.
const asNodeRole = root + "/deploy/components/impersonation/rbac.yaml"

func rulesOf(object runtime.Object) []rbacv1.PolicyRule {
	switch object := object.(type) {
	case *rbacv1.ClusterRole:
		return object.Rules
	case *rbacv1.Role:
		return object.Rules
	default:
		return nil
	}
}

func grantsOf(rules []rbacv1.PolicyRule) map[grant]bool {
	out := map[grant]bool{}
	for _, rule := range rules {
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					out[grantOf(verb, resource, group)] = true
				}
			}
		}
	}
	return out
}

// In the name of its node the agent may do what it may do in its own with pods, deletions aside, and nothing else.
func TestInTheNameOfItsNodeTheAgentMayDoTheSameWithPods(t *testing.T) {
	want, got := map[grant]bool{"impersonate:associated-node nodes.authentication.k8s.io": true}, map[grant]bool{}
	for _, m := range manifests(t) {
		switch {
		case m.name != "gpuslice-agent-pods" || m.kind != "ClusterRole":
		case m.file == asNodeRole:
			got = grantsOf(rulesOf(m.object))
		default:
			for g := range grantsOf(rulesOf(m.object)) {
				want["impersonate-on:associated-node:"+g] = true
			}
		}
	}
	if diff := gocmp.Diff(want, got); diff != "" || len(want) < 5 {
		t.Errorf("components/impersonation beside the role in base/rbac.yaml (-want +got):\n%s", diff)
	}
}

func TestRawCallsToTheAPIServerAreKnown(t *testing.T) {
	want := map[string]bool{}
	for _, where := range unseen {
		want[where] = true
	}
	got := map[string]bool{}
	forEachCall(t, func(where string, info *types.Info, call *ast.CallExpr) {
		method, receiver := methodOf(info, call)
		if where == "main.policies" || where == "kube.ServerVersion" { // migrate runs the one with a user's rights; every account may ask for the version
			return
		}
		if strings.HasPrefix(method, "Raw") && receiver.Pkg().Path() == clientPackage {
			got[where] = true
		}
	})
	if diff := gocmp.Diff(slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(got))); diff != "" {
		t.Errorf("functions that take a raw REST client (-known +found); say in the table of unseen grants what they need:\n%s", diff)
	}
}

// forEachCall visits each call of the packages that talk to the cluster, with the function it stands in.
func forEachCall(t *testing.T, visit func(where string, info *types.Info, call *ast.CallExpr)) {
	t.Helper()
	loaded, err := product() // the plugin has the rights of whoever runs it
	if err != nil {
		t.Fatal(err)
	}
	for _, pkg := range loaded {
		for _, file := range pkg.Syntax {
			for _, decl := range file.Decls {
				where := pkg.Name
				if f, ok := decl.(*ast.FuncDecl); ok {
					where += "." + f.Name.Name
				}
				ast.Inspect(decl, func(n ast.Node) bool {
					if call, ok := n.(*ast.CallExpr); ok {
						visit(where, pkg.TypesInfo, call)
					}
					return true
				})
			}
		}
	}
}

// methodOf names the method that is called, and the type that declares it. It is "" for anything but a method.
func methodOf(info *types.Info, call *ast.CallExpr) (string, *types.TypeName) {
	selector, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return "", nil
	}
	selection := info.Selections[selector]
	if selection == nil {
		return "", nil
	}
	named, ok := types.Unalias(selection.Recv()).(*types.Named)
	if !ok || named.Obj().Pkg() == nil {
		return "", nil
	}
	return selector.Sel.Name, named.Obj()
}

// clientPackage has the client of each kind, and no other is in use.
const clientPackage = module + "drain/kube"

// clientCall reports which grant a call needs, if it is a call of the client of a kind: a method of kube.Nodes, say.
func clientCall(info *types.Info, call *ast.CallExpr) (grant, bool) {
	method, receiver := methodOf(info, call)
	verb, ok := verbs[method]
	if !ok {
		return "", false
	}
	group, ok := groups[receiver.Name()]
	if !ok || receiver.Pkg().Path() != clientPackage {
		return "", false
	}
	resource := strings.ToLower(receiver.Name())
	switch {
	case strings.HasPrefix(method, "Evict"):
		resource += "/eviction"
	case method == "Patch":
		for _, sub := range call.Args[min(5, len(call.Args)):] {
			if v := info.Types[sub].Value; v != nil {
				resource += "/" + constant.StringVal(v)
			}
		}
	}
	return grantOf(verb, resource, group), true
}

func TestRolesGrantNoWildcardAndNothingThatLeadsToMore(t *testing.T) {
	for _, m := range manifests(t) {
		for i, rule := range rulesOf(m.object) {
			at := fmt.Sprintf("%s, rule %d", m.file, i+1)
			for _, word := range slices.Concat(rule.APIGroups, rule.Resources, rule.Verbs, rule.NonResourceURLs) {
				if strings.Contains(word, "*") {
					t.Errorf("%s: %q is a wildcard", at, word)
				}
			}
			for _, verb := range rule.Verbs {
				if leadsToMore(verb) {
					t.Errorf("%s: %q gives away more than it says", at, verb)
				}
			}
			writes := slices.ContainsFunc(rule.Verbs, func(verb string) bool { return !slices.Contains([]string{"get", "list", "watch"}, verb) })
			if writes && slices.Contains(rule.Resources, "configmaps") && len(rule.ResourceNames) == 0 {
				t.Errorf("%s: it may write any ConfigMap of the namespace: programs are run from some; name those it needs", at)
			}
			if elsewhere := !slices.Contains([]string{"", namespace}, m.namespace); elsewhere && len(rule.ResourceNames) == 0 {
				t.Errorf("%s: in the operator's namespace it reaches more than the objects it needs", at)
			}
			if slices.Contains(rule.Resources, "secrets") {
				t.Errorf("%s: the agent needs no secrets", at)
			}
		}
	}
}

// leadsToMore reports whether who has the verb can get other rights. In the name of its own node an account has those alone that are named.
func leadsToMore(verb string) bool {
	asItsNode := verb == "impersonate:associated-node" || strings.HasPrefix(verb, "impersonate-on:associated-node:")
	return verb == "bind" || verb == "escalate" || strings.HasPrefix(verb, "impersonate") && !asItsNode
}

func TestBindingsNameRolesAndAccountsThatAreThere(t *testing.T) {
	have := map[string]bool{}
	for _, m := range manifests(t) {
		have[m.kind+"/"+m.name] = true
	}
	for _, m := range manifests(t) {
		var role rbacv1.RoleRef
		var subjects []rbacv1.Subject
		switch object := m.object.(type) {
		case *rbacv1.ClusterRoleBinding:
			role, subjects = object.RoleRef, object.Subjects
		case *rbacv1.RoleBinding:
			role, subjects = object.RoleRef, object.Subjects
		default:
			continue
		}
		if !have[role.Kind+"/"+role.Name] && !strings.HasPrefix(role.Name, "system:") { // which comes with the cluster
			t.Errorf("%s: there is no %s %s", m.file, role.Kind, role.Name)
		}
		for _, s := range subjects {
			if !have[s.Kind+"/"+s.Name] || cmp.Or(s.Namespace, namespace) != namespace {
				t.Errorf("%s: there is no %s %s/%s", m.file, s.Kind, s.Namespace, s.Name)
			}
		}
	}
}
