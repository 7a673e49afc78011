package verdict_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
)

//go:generate go test -count=1 . -run TestThePageHasTheXidsOfTheCode -update

var update = flag.Bool("update", false, "write the table of Xids into the page")

func TestThePageHasTheXidsOfTheCode(t *testing.T) {
	const begin, end = "<!-- xids: written by go generate ./agent/monitor/health/verdict -->\n", "<!-- end of xids -->"
	page, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(page), begin)
	got, tail, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("the page lacks %q or %q", begin, end)
	}
	var b strings.Builder
	b.WriteString("\n| Xid | what | class | critical | settled | action |\n|---|---|---|---|---|---|\n")
	yes := map[bool]string{true: "yes"}
	type row struct{ meaning, class, critical, settled, action string }
	numbers := map[row][]string{}
	var order []row
	for _, x := range verdict.Xids() {
		r := row{x.Meaning, string(x.Class), yes[x.Critical], yes[x.Settled], string(x.Action)}
		if numbers[r] == nil {
			order = append(order, r)
		}
		numbers[r] = append(numbers[r], fmt.Sprint(x.Number))
	}
	for _, r := range order {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | `%s` |\n", strings.Join(numbers[r], ", "), r.meaning, r.class, r.critical, r.settled, r.action)
	}
	b.WriteString("\n")
	if *update {
		if err := os.WriteFile("../README.md", []byte(head+begin+b.String()+end+tail), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(b.String(), got); diff != "" {
		t.Errorf("run go generate ./agent/monitor/health/verdict (-code +page):\n%s", diff)
	}
}
