package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
)

// policy records the requests of all users except the control plane's reads, with the body where a test may want to see
// what was written.
const policy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- level: None
  verbs: [get, list, watch]
  users: [system:apiserver, system:kube-controller-manager, system:kube-scheduler]
- level: None
  verbs: [get, list, watch]
  userGroups: ["system:serviceaccounts:kube-system"]
- level: Request
  verbs: [create, update, patch, delete]
  resources:
  - resources: [nodes, nodes/status, pods/eviction, events]
  - group: events.k8s.io
    resources: [events]
- level: Metadata
`

// AuditEvent is a request that the API server has answered.
type AuditEvent struct {
	Time      time.Time     // when it came in
	Took      time.Duration // from then to the end of the answer
	User      string        // "system:serviceaccount:gpuslice:agent"
	As        string        // the user that it impersonates; empty for none
	Node      string        // that the user's token names; empty if it names none
	UserAgent string
	Verb      string // "get", "patch", …
	Group     string // of the API, "" for the core one
	Resource  string // "nodes", or with its subresource "nodes/status"; "" for other paths
	Namespace string
	Name      string
	URI       string
	Code      int    // HTTP status of the answer
	Body      string // JSON of what was sent, for writes of nodes, evictions and events
}

// changes reports whether the request was to change something, whatever the answer.
func (e AuditEvent) changes() bool {
	if strings.Contains(e.URI, "dryRun=") {
		return false
	}
	switch e.Verb {
	case "create", "update", "patch", "delete", "deletecollection":
		return true
	default:
		return false
	}
}

// String is the event in a line: "patch nodes/status gpu-1: 200".
func (e AuditEvent) String() string {
	object := e.Name
	if e.Namespace != "" {
		object = e.Namespace + "/" + e.Name
	}
	return strings.Join(strings.Fields(fmt.Sprintf("%s %s %s", e.Verb, e.Resource, object)), " ") + fmt.Sprintf(": %d", e.Code)
}

// Writes returns the user's requests to change something so far, in the order of the answers, including refused ones.
func (c *Cluster) Writes(user string) ([]AuditEvent, error) {
	return c.Requests(func(e AuditEvent) bool { return e.User == user && e.changes() })
}

// Requests returns those of the requests answered so far that match.
func (c *Cluster) Requests(match func(AuditEvent) bool) ([]AuditEvent, error) {
	marker := uuid.NewString()
	if err := c.mark(marker); err != nil {
		return nil, fmt.Errorf("marking a place in the audit log: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	path := c.file(auditLog)
	var events []AuditEvent
	err := wait.PollUntilContextCancel(ctx, 10*time.Millisecond, true, func(context.Context) (bool, error) {
		all, err := c.audit.read(path)
		if err != nil {
			return false, err
		}
		end := slices.IndexFunc(all, func(e AuditEvent) bool { return strings.Contains(e.URI, marker) })
		if end < 0 {
			return false, nil
		}
		events = slices.DeleteFunc(slices.Clone(all[:end]), func(e AuditEvent) bool { return !match(e) })
		return true, nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return events, nil
}

// mark makes a request that is unlike all others. An answer may reach the client before its event reaches the log, but
// all events before the mark are complete.
func (c *Cluster) mark(marker string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	client, err := kubernetes.NewForConfig(c.admin)
	if err != nil {
		return err
	}
	return client.RESTClient().Get().AbsPath("/version").Param("marker", marker).Do(ctx).Error()
}

// rawEvent is what is read of an event of audit.k8s.io/v1.
type rawEvent struct {
	RequestReceivedTimestamp time.Time
	StageTimestamp           time.Time
	User                     struct {
		Username string
		Extra    map[string][]string
	}
	ImpersonatedUser struct{ Username string }
	UserAgent        string
	Verb             string
	RequestURI       string
	ObjectRef        struct{ APIGroup, Resource, Subresource, Namespace, Name string }
	ResponseStatus   struct{ Code int }
	RequestObject    json.RawMessage
}

// auditReader keeps what it has read of the audit log. Many tests ask again and again for a log of many megabytes.
type auditReader struct {
	mu     sync.Mutex
	next   int64 // where the first line begins that is not among the events
	events []AuditEvent
}

// read returns all events in the log so far. The caller must not change them.
func (a *auditReader) read(path string) ([]AuditEvent, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if _, err := f.Seek(a.next, io.SeekStart); err != nil {
		return nil, err
	}
	for lines := bufio.NewReader(f); ; {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return a.events, nil // what there is of a last line is read when all of it is there
		}
		if err != nil {
			return nil, err
		}
		var raw rawEvent
		if err := json.Unmarshal(line, &raw); err != nil {
			return nil, err
		}
		a.events = append(a.events, raw.event())
		a.next += int64(len(line))
	}
}

func (r rawEvent) event() AuditEvent {
	e := AuditEvent{
		Time:      r.RequestReceivedTimestamp,
		Took:      r.StageTimestamp.Sub(r.RequestReceivedTimestamp),
		User:      r.User.Username,
		As:        r.ImpersonatedUser.Username,
		Node:      strings.Join(r.User.Extra["authentication.kubernetes.io/node-name"], ","),
		Group:     r.ObjectRef.APIGroup,
		UserAgent: r.UserAgent,
		Verb:      r.Verb,
		Resource:  r.ObjectRef.Resource,
		Namespace: r.ObjectRef.Namespace,
		Name:      r.ObjectRef.Name,
		URI:       r.RequestURI,
		Code:      r.ResponseStatus.Code,
		Body:      string(r.RequestObject),
	}
	if r.ObjectRef.Subresource != "" {
		e.Resource += "/" + r.ObjectRef.Subresource
	}
	return e
}
