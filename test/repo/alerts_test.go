package repo_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	sigsyaml "sigs.k8s.io/yaml"
)

// runbook is where people read what to do about an alert, in this repository.
const runbook = "deploy/components/prometheus/README.md"

type alert struct {
	Alert, For          string
	Labels, Annotations map[string]string
}

// Who is called at night follows a link. What the alerts ask for is held by test/shipped.
func TestEachAlertLeadsToWhatThePageSaysOfIt(t *testing.T) {
	var rules struct {
		Spec struct{ Groups []struct{ Rules []alert } }
	}
	text := read(t, "deploy/components/prometheus/prometheusrule.yaml")
	if err := sigsyaml.Unmarshal([]byte(text), &rules); err != nil {
		t.Fatal(err)
	}
	page := read(t, runbook)
	found := map[string]bool{}
	for _, group := range rules.Spec.Groups {
		for _, rule := range group.Rules {
			found[rule.Alert] = true
			leadsTo(t, page, rule)
		}
	}
	for _, heading := range regexp.MustCompile(`(?m)^## (Gpuslice\w+)$`).FindAllStringSubmatch(page, -1) {
		if !found[heading[1]] {
			t.Errorf("%s tells of the alert %s, which is not there", runbook, heading[1])
		}
	}
	for _, named := range regexp.MustCompile(`Gpuslice[A-Z]\w+`).FindAllString(page, -1) {
		if !found[named] {
			t.Errorf("%s names the alert %s, which is not there", runbook, named)
		}
	}
	if reasons := regexp.MustCompile(`(?m)^ +#.*\n +for: `).FindAllString(text, -1); len(reasons) != len(found) || len(found) < 10 {
		t.Errorf("of %d alerts %d say why they come after that time", len(found), len(reasons))
	}
}

// leadsTo fails the test unless the alert has a link to its heading on the page, and the words that people get.
func leadsTo(t *testing.T, page string, rule alert) {
	t.Helper()
	link := "https://github.com/gpuslice/gpuslice/blob/main/" + runbook + "#" + strings.ToLower(rule.Alert)
	switch {
	case rule.Annotations["runbook_url"] != link:
		t.Errorf("%s leads to %q, and not to %s", rule.Alert, rule.Annotations["runbook_url"], link)
	case !slices.Contains(anchors(page), strings.ToLower(rule.Alert)):
		t.Errorf("%s has no heading %s", runbook, rule.Alert)
	case rule.Annotations["summary"] == "" || rule.Annotations["description"] == "" || rule.For == "":
		t.Errorf("%s has no summary, no description, or no time after which it is told", rule.Alert)
	case !slices.Contains([]string{"critical", "warning"}, rule.Labels["severity"]):
		t.Errorf("%s has severity %q, which the page does not tell of", rule.Alert, rule.Labels["severity"])
	}
}
