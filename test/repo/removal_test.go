package repo_test

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	sigsyaml "sigs.k8s.io/yaml"
)

// The page on removing gpuslice patches the DaemonSet by positions, which must be those of the arguments in what the page says to install.
func TestThePatchOfThePageOnRemovingHasTheAgentsCleanUp(t *testing.T) {
	page, err := os.ReadFile(root + "/deploy/README.md")
	if err != nil {
		t.Fatal(err)
	}
	patch := regexp.MustCompile(`(?s)patch daemonset gpuslice-agent --type=json -p='(.*?)'`).FindSubmatch(page)
	if patch == nil {
		t.Fatal("the page has no patch of the DaemonSet")
	}
	operations, err := jsonpatch.DecodePatch(patch[1])
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := os.ReadFile(root + "/deploy/base/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	before, err := sigsyaml.YAMLToJSON(manifest)
	if err != nil {
		t.Fatal(err)
	}
	after, err := operations.Apply(before)
	if err != nil {
		t.Fatal(err)
	}
	var set appsv1.DaemonSet
	if err := json.Unmarshal(after, &set); err != nil {
		t.Fatal(err)
	}
	if args := set.Spec.Template.Spec.Containers[0].Args; !slices.Equal(args, []string{"cleanup", "--stay"}) {
		t.Errorf("the DaemonSet runs %q", args)
	}
	if at := set.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.String(); at != "100%" || set.Spec.MinReadySeconds != 0 {
		t.Errorf("it is rolled out by %s, each ready for %d s", at, set.Spec.MinReadySeconds)
	}
}

// A component that is left out of an overlay is not removed with it. What does not lie in the agents' namespace, people remove by its label.
func TestThePageOnRemovingFindsWhatIsNotInTheAgentsNamespace(t *testing.T) {
	kinds := map[string]bool{}
	for _, line := range regexp.MustCompile(`(?m)^kubectl delete ([a-z,]+)(?: -A| \\\n *)? *-l app\.kubernetes\.io/name=gpuslice$`).FindAllStringSubmatch(read(t, "deploy/README.md"), -1) {
		for kind := range strings.SplitSeq(line[1], ",") {
			kinds[kind] = true
		}
	}
	found := 0
	for _, m := range manifests(t) {
		if m.namespace == namespace || m.kind == "Namespace" || strings.Contains(m.file, "/examples/") || m.file == asNodeRole { // which is a patch
			continue
		}
		object, err := meta.Accessor(m.object)
		if err != nil {
			t.Fatal(err)
		}
		if object.GetAnnotations()[localConfig] == "true" {
			continue
		}
		found++
		if object.GetLabels()["app.kubernetes.io/name"] != "gpuslice" {
			t.Errorf("%s: %s %s has no label by which it is found", m.file, m.kind, m.name)
		}
		plural := strings.TrimSuffix(strings.ToLower(m.kind), "y") + map[bool]string{true: "ies", false: "s"}[strings.HasSuffix(m.kind, "y")]
		if !kinds[plural] {
			t.Errorf("%s: the page on removing does not delete %s by their label, but %v", m.file, plural, kinds)
		}
	}
	if found < 15 {
		t.Errorf("found %d objects that are not in the agents' namespace", found)
	}
}
