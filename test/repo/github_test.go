package repo_test

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	sigsyaml "sigs.k8s.io/yaml"
)

// workflow is what is read of one.
type workflow struct {
	Permissions map[string]string
	Jobs        map[string]struct {
		RunsOn    string `json:"runs-on"`
		Container string
		Timeout   int `json:"timeout-minutes"`
		Steps     []struct {
			Run, Uses string
			With, Env map[string]any
		}
	}
}

func readWorkflow(t *testing.T, name string) (w workflow) {
	t.Helper()
	if err := sigsyaml.Unmarshal([]byte(read(t, ".github/workflows/"+name)), &w); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if w.Permissions["contents"] != "read" {
		t.Errorf("%s: jobs may do more than read unless they say so: %v", name, w.Permissions)
	}
	return w
}

func (w workflow) runs() (all []string) {
	for _, job := range w.Jobs {
		for _, step := range job.Steps {
			all = append(all, step.Run)
		}
	}
	return all
}

// What a machine runs and nobody can run at home is mended by guessing.
func TestTheWorkflowsRunWhatPeopleRun(t *testing.T) {
	// As root, with the Go that setup-go has put on PATH: sudo has a PATH of its own.
	if !slices.Contains(readWorkflow(t, "ci.yaml").runs(), `sudo -E env "PATH=$PATH" "HOME=$HOME" bash .ci/run`) {
		t.Error("ci.yaml does not run .ci/run as root with the runner's PATH and home")
	}
	release := readWorkflow(t, "release.yaml")
	if !slices.ContainsFunc(release.runs(), func(run string) bool { return strings.HasPrefix(run, "make release ") }) {
		t.Error("release.yaml does not run make release")
	}
	image := regexp.MustCompile(`(?m)^ARG BUILD_IMAGE=(\S+)$`).FindStringSubmatch(read(t, "Dockerfile"))
	if image == nil || release.Jobs["make"].Container != image[1] {
		t.Errorf("release.yaml makes the image in %q, the Dockerfile in %q: the C library is not the same", release.Jobs["make"].Container, image)
	}
}

// A run that has left e2e out has not passed, unless that was asked for.
func TestWhereNamespacesAreForbiddenCIFails(t *testing.T) {
	function := regexp.MustCompile(`(?ms)^run_e2e\(\) \{$.*?^\}$`).FindString(read(t, ".ci/run"))
	if function == "" {
		t.Fatal(".ci/run has no function run_e2e")
	}
	for _, c := range []struct {
		asked, without, unshare string
		runs, fails             bool
	}{
		{unshare: "true", runs: true},
		{asked: "true", unshare: "true", runs: true},
		{unshare: "false"},
		{asked: "true", unshare: "false", fails: true},
		{asked: "true", without: "1", unshare: "false"},
		{without: "1", unshare: "true"},
		{asked: "true", without: "0", unshare: "false", fails: true},
	} {
		run := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c",
			"asked='"+c.asked+"'; unshare() { "+c.unshare+"; }; run_tests() { echo \"runs $1\"; }\n"+function+"\nrun_e2e || exit 3")
		run.Env = append(os.Environ(), "GPUSLICE_NO_E2E="+c.without)
		said, err := run.CombinedOutput()
		if runs := strings.Contains(string(said), "runs test-e2e"); runs != c.runs || (err != nil) != c.fails || !runs && !strings.Contains(string(said), "NOT RUN") {
			t.Errorf("with CI=%q, GPUSLICE_NO_E2E=%q, unshare %s: %v\n%s", c.asked, c.without, c.unshare, err, said)
		}
	}
	if !strings.Contains(read(t, ".ci/run"), "\nasked=${CI:-}") {
		t.Error(".ci/run does not look at CI before it sets it")
	}
}

// A form with a mistake is not shown, and nobody is told.
func TestTheFormsOfIssuesAreForms(t *testing.T) {
	for _, name := range []string{"fault.yml", "wish.yml"} {
		var form struct {
			Name, Description string
			Labels            []string
			Body              []struct {
				Type, ID    string
				Attributes  map[string]any
				Validations map[string]bool
			}
		}
		if err := sigsyaml.UnmarshalStrict([]byte(read(t, ".github/ISSUE_TEMPLATE/"+name)), &form); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		ids, required := map[string]bool{}, 0
		for _, field := range form.Body {
			if !slices.Contains([]string{"textarea", "input"}, field.Type) || field.ID == "" || ids[field.ID] || field.Attributes["label"] == nil {
				t.Errorf("%s: the field %+v has no type, id or label of its own", name, field)
			}
			ids[field.ID] = true
			if field.Validations["required"] {
				required++
			}
		}
		if form.Name == "" || form.Description == "" || required == 0 {
			t.Errorf("%s: name %q, description %q, %d fields that one has to fill in", name, form.Name, form.Description, required)
		}
	}
}
