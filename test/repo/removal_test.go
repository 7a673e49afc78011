package repo_test

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"testing"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	appsv1 "k8s.io/api/apps/v1"
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
