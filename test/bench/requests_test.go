package main

import (
	"strings"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/node"
)

func TestRequestsAreThoseOfTheProgramOnItsNodeForTheChange(t *testing.T) {
	from := time.Date(2026, 11, 25, 20, 0, 0, 0, time.UTC)
	to := from.Add(time.Minute)
	user := userOf(agentNamespace, "gpuslice-agent")
	at := &site{Node: &node.Node{Name: "n1-0"}, account: user}
	var events []cluster.AuditEvent
	for _, e := range []cluster.AuditEvent{
		{User: user, Node: "n1-0", Time: from, Verb: "get"},
		{User: user, Node: "n1-0", Time: from, Verb: "list"},
		{User: user, Node: "n1-0", Time: from, Verb: "watch"},
		{User: user, Node: "n1-0", Time: to, Verb: "patch"},
		{User: user, Node: "n1-0", Time: to, Verb: "create", Code: 429},
		{User: user, Node: "n1-0", Time: to, Verb: "deletecollection", As: "system:node:n1-0"},

		{User: user, Node: "n1-1", Time: from, Verb: "get"}, // another run
		{User: user, Node: "", Time: from, Verb: "get"},
		{User: userOf(operatorNamespace, "nvidia-mig-manager"), Node: "n1-0", Time: from, Verb: "get"},
		{User: user, Node: "n1-0", Time: from.Add(-time.Millisecond), Verb: "get"},
		{User: user, Node: "n1-0", Time: to.Add(time.Millisecond), Verb: "get"},
	} {
		if at.asked(e, from, to) {
			events = append(events, e)
		}
	}
	if got, want := tally(events), (requests{known: true, reads: 2, writes: 3}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got, err := (&site{}).requests(from, to); got.known || err != nil {
		t.Errorf("of a program without an account %+v are known, error %v", got, err)
	}
}

func TestTheTableOfRequestsHasMediansOfThoseThatAreKnown(t *testing.T) {
	of := func(reads, writes int) result { return result{requests: requests{true, reads, writes}} }
	got := tabulateRequests([]row{
		{scenario{name: "first"}, measured{name: "tool"}, []result{{}}},
		{scenario{name: "first"}, measured{name: "manager"}, []result{of(5, 3), of(9, 1), of(7, 2)}},
		{scenario{name: "first"}, measured{name: "agent"}, []result{of(0, 0)}},
		{scenario{name: "second"}, measured{name: "agent"}, []result{of(1, 1)}},
	}, true)
	want := "| first | manager | 7 | 2 |\n|  | agent | 0 | 0 |\n| second | agent | 1 | 1 |\n"
	if !strings.Contains(got, want) || strings.Contains(got, "tool") {
		t.Errorf("the table has not\n%s\nor has others:\n%s", want, got)
	}
	if got := tabulateRequests([]row{{scenario{name: "first"}, measured{name: "tool"}, []result{{}}}}, false); got != "" {
		t.Errorf("where nothing is known the table is\n%s", got)
	}
}
