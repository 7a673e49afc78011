package main

import (
	"fmt"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"

	"github.com/gpuslice/gpuslice/test/cluster"
)

// requests are what a program has asked of the API server for a change.
type requests struct {
	known         bool // the program has an account of its own, and asks under it
	reads, writes int
}

// userOf is the name that the API server gives to a service account.
func userOf(namespace, account string) string {
	return "system:serviceaccount:" + namespace + ":" + account
}

// requests counts those of the program's account on this node that came in from one moment to the other. All runs share an API server and the
// accounts: a token names its node.
func (at *site) requests(from, to time.Time) (requests, error) {
	if at.account == "" {
		return requests{}, nil
	}
	events, err := at.cluster.Requests(func(e cluster.AuditEvent) bool { return at.asked(e, from, to) })
	if err != nil {
		return requests{}, fmt.Errorf("reading the audit log: %w", err)
	}
	return tally(events), nil
}

// asked reports whether a request is the program's.
func (at *site) asked(e cluster.AuditEvent, from, to time.Time) bool {
	return e.User == at.account && e.Node == at.Name && !e.Time.Before(from) && !e.Time.After(to)
}

// tally counts reads and writes. A watch is in the log when it ends, so that those which go on would be missing: none is counted.
func tally(events []cluster.AuditEvent) requests {
	out := requests{known: true}
	for _, e := range events {
		switch e.Verb {
		case "get", "list":
			out.reads++
		case "watch":
		default:
			out.writes++
		}
	}
	return out
}

// requestNotes say how the table of requests is to be read.
const requestNotes = `What a program has asked of the API server, by its audit log: requests of its account on its node, from the label until the change is
over. mig-parted asks nothing, and a full drain asks as the administrator, as the bench does.

reads   of an object or a list; a watch is neither, and all of them watch
writes  all others: Events, evictions and their tries (dryRun), questions what the account may do, and what was refused`

// tabulateRequests renders what programs have asked of the API server; it is empty if nothing is known of any.
func tabulateRequests(rows []row, markdown bool) string {
	w := newTable("scenario", "by", "reads", "writes")
	last := ""
	for _, r := range rows {
		if !r.runs[0].requests.known {
			continue
		}
		name := r.scenario.name
		if name == last {
			name = ""
		}
		last = r.scenario.name
		w.AppendRow(table.Row{
			name, r.program.name, median(r.runs, func(one result) int { return one.requests.reads }),
			median(r.runs, func(one result) int { return one.requests.writes }),
		})
	}
	return rendered(w, requestNotes, markdown)
}
