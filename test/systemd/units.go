package systemd

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/godbus/dbus/v5"
)

const (
	systemdPath    = "/org/freedesktop/systemd1"
	systemdManager = "org.freedesktop.systemd1.Manager"

	noSuchUnit = "org.freedesktop.systemd1.NoSuchUnit"
	unitMasked = "org.freedesktop.systemd1.UnitMasked"
	noJob      = dbus.ObjectPath("/")
)

// Methods of systemd, for Fail and for reading Calls.
const (
	StartUnit    = systemdManager + ".StartUnit"
	StopUnit     = systemdManager + ".StopUnit"
	RestartUnit  = systemdManager + ".RestartUnit"
	DaemonReload = systemdManager + ".Reload"

	ListUnitsByNames = systemdManager + ".ListUnitsByNames"
)

// Result is how a job ends.
type Result string

// How a job may end. Never is none of systemd's results: the job stays until EndJobs.
const (
	Done       Result = "done"
	Canceled   Result = "canceled"
	Timeout    Result = "timeout"
	Failed     Result = "failed"
	Dependency Result = "dependency"
	Skipped    Result = "skipped"
	Never      Result = "never"
)

// Unit is what systemd reports of one. Empty fields have the usual values of a running service.
type Unit struct {
	Description   string
	LoadState     string // "loaded", "not-found", "masked"
	ActiveState   string // "active", "inactive", "failed", "activating", "deactivating"
	SubState      string // follows from ActiveState where it is empty
	UnitFileState string // "enabled", "disabled", "static"
	Type          string // of a service: "simple", "oneshot", "notify"
	PIDs          []uint32
	Aliases       []string // other names it goes by

	// OnStart and OnStop are how such jobs end; empty is Done. A job that has nothing to do is done in any case.
	OnStart, OnStop Result
}

// units is what the simulated systemd knows. Host.mu guards all but the emitter.
type units struct {
	emitter
	units   map[string]Unit
	jobs    map[uint32]job // those that have not ended
	lastJob uint32
}

// job is one that has begun.
type job struct {
	unit   string
	starts bool
	was    string // the unit's ActiveState before
}

// unitName is what systemd takes as one, leaving its length aside.
var unitName = regexp.MustCompile(`^[0-9A-Za-z:_.\\@-]+\.(service|socket|device|mount|automount|swap|target|path|timer|slice|scope)$`)

// missing is what systemd reports of a unit that it does not have.
var missing = Unit{LoadState: "not-found", ActiveState: "inactive", SubState: "dead"}

// complete fills in what a test left open.
func (u Unit) complete() Unit {
	fill := func(field *string, value string) {
		if *field == "" {
			*field = value
		}
	}
	fill(&u.LoadState, "loaded")
	fill(&u.ActiveState, "active")
	fill(&u.UnitFileState, "enabled")
	fill(&u.Type, "simple")
	if u.SubState == "" {
		u = u.in(u.ActiveState)
	}
	return u
}

// in is the unit in another state.
func (u Unit) in(active string) Unit {
	sub := map[string]string{
		"active": "running", "inactive": "dead", "failed": "failed", "activating": "start", "deactivating": "stop-sigterm",
	}
	u.ActiveState, u.SubState = active, sub[active]
	return u
}

// SetUnit adds a unit, or replaces it.
func (h *Host) SetUnit(name string, u Unit) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.systemd.units[name] = u.complete()
	h.change()
}

// Unit reports how a unit is. One that systemd does not have is "not-found".
func (h *Host) Unit(name string) Unit {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.unit(name)
}

// RemoveUnit is a package that takes its unit away.
func (h *Host) RemoveUnit(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.systemd.units, name)
	h.change()
}

// EndJobs ends all jobs that hang.
func (h *Host) EndJobs(result Result) {
	h.mu.Lock()
	ids := slices.Sorted(maps.Keys(h.systemd.jobs))
	h.mu.Unlock()
	for _, id := range ids {
		h.mu.Lock()
		h.endJob(id, result)
		h.mu.Unlock()
	}
}

// unit needs mu.
func (h *Host) unit(name string) Unit {
	if u, ok := h.systemd.units[h.id(name)]; ok {
		return u
	}
	return missing
}

// id is the name that systemd has for a unit, which may go by others. The caller holds mu.
func (h *Host) id(name string) string {
	if _, ok := h.systemd.units[name]; ok {
		return name
	}
	for id, u := range h.systemd.units {
		if slices.Contains(u.Aliases, name) {
			return id
		}
	}
	return name
}

// jobOf is the job of a unit that has not ended, and 0 if there is none. The caller holds mu.
func (h *Host) jobOf(id string) uint32 {
	for number, j := range h.systemd.jobs {
		if j.unit == id {
			return number
		}
	}
	return 0
}

func (h *Host) systemdAnswers(r request) *reply {
	method, ok := strings.CutPrefix(r.method, systemdManager+".")
	switch {
	case r.method == propertyGet, r.method == propertyGetAll:
		return property(r, h.systemdProperties(r.path))
	case !ok:
		return refuse(unknownMethod, "Unknown method %s.", r.method)
	case strings.HasPrefix(method, "List"):
		return h.list(method, r.args)
	case strings.HasSuffix(method, "Unit") && len(r.args) > 1:
		return h.begin(method, r.args)
	}
	switch method {
	case "Subscribe", "Unsubscribe", "Reload":
		return done()
	case "GetUnit", "LoadUnit", "GetUnitFileState", "ResetFailedUnit":
		return h.ofUnit(method, r.args)
	case "GetUnitByPID":
		return h.byPID(r.args)
	default:
		return refuse(unknownMethod, "Unknown method %s.", r.method)
	}
}

// systemdProperties are those of the manager, or of the unit at that path.
func (h *Host) systemdProperties(at dbus.ObjectPath) map[string]map[string]any {
	h.mu.Lock()
	defer h.mu.Unlock()
	if at == systemdPath {
		return map[string]map[string]any{systemdManager: {"Version": fmt.Sprint(h.options.Version), "SystemState": "running"}}
	}
	name := h.id(unescape(path.Base(string(at))))
	u := h.unit(name)
	return map[string]map[string]any{
		"org.freedesktop.systemd1.Unit": {
			"Id": name, "Description": u.Description, "LoadState": u.LoadState, "ActiveState": u.ActiveState,
			"SubState": u.SubState, "UnitFileState": u.UnitFileState,
		},
		"org.freedesktop.systemd1.Service": {"Type": u.Type},
	}
}

// status is systemd's struct (ssssssouso).
type status struct {
	Name, Description, LoadState, ActiveState, SubState, Following string
	Path                                                           dbus.ObjectPath
	JobID                                                          uint32
	JobType                                                        string
	JobPath                                                        dbus.ObjectPath
}

// list answers the methods that list units: all units, or those with certain states, matching names or given names.
func (h *Host) list(method string, args []any) *reply {
	var states, names []string
	var err error
	switch method {
	case "ListUnits":
		err = dbus.Store(args)
	case "ListUnitsFiltered":
		err = dbus.Store(args, &states)
	case "ListUnitsByPatterns":
		err = dbus.Store(args, &states, &names)
	case "ListUnitsByNames":
		err = dbus.Store(args, &names)
	default:
		return refuse(unknownMethod, "Unknown method %s.", method)
	}
	if err != nil {
		return refuse(invalidArgument, "%v", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if method != "ListUnitsByNames" {
		names = h.matching(states, names)
	}
	out := []status{}
	for _, name := range names {
		if unitName.MatchString(name) { // the others are passed over
			out = append(out, h.status(h.id(name)))
		}
	}
	return done(out)
}

// status needs mu.
func (h *Host) status(id string) status {
	u := h.unit(id)
	s := status{
		Name: id, Description: u.Description, LoadState: u.LoadState, ActiveState: u.ActiveState, SubState: u.SubState,
		Path: unitPath(id), JobPath: noJob,
	}
	if s.JobID = h.jobOf(id); s.JobID != 0 {
		s.JobType, s.JobPath = "stop", jobPath(s.JobID)
		if h.systemd.jobs[s.JobID].starts {
			s.JobType = "start"
		}
	}
	return s
}

// matching needs mu.
func (h *Host) matching(states, patterns []string) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(h.systemd.units)) {
		u := h.systemd.units[name]
		isIn := func(state string) bool { return state == u.ActiveState || state == u.LoadState || state == u.SubState }
		matches := func(pattern string) bool {
			ok, err := path.Match(pattern, name)
			return ok && err == nil
		}
		if (len(states) == 0 || slices.ContainsFunc(states, isIn)) && (len(patterns) == 0 || slices.ContainsFunc(patterns, matches)) {
			out = append(out, name)
		}
	}
	return out
}

// ofUnit answers calls about one unit that begin no job.
func (h *Host) ofUnit(method string, args []any) *reply {
	var name string
	if err := dbus.Store(args, &name); err != nil {
		return refuse(invalidArgument, "%v", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	id := h.id(name)
	u, ok := h.systemd.units[id]
	if !ok && method != "LoadUnit" {
		return refuse(noSuchUnit, "Unit %s not loaded.", name)
	}
	switch method {
	case "GetUnitFileState":
		return done(u.UnitFileState)
	case "ResetFailedUnit":
		if u.ActiveState == "failed" {
			h.systemd.units[id] = u.in("inactive")
			h.change()
		}
		return done()
	default:
		return done(unitPath(id))
	}
}

func (h *Host) byPID(args []any) *reply {
	var pid uint32
	if err := dbus.Store(args, &pid); err != nil {
		return refuse(invalidArgument, "%v", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for name, u := range h.systemd.units {
		if slices.Contains(u.PIDs, pid) {
			return done(unitPath(name))
		}
	}
	return refuse("org.freedesktop.systemd1.NoUnitForPID", "PID %d does not belong to any loaded unit.", pid)
}

// begin answers StartUnit and similar methods: the job starts at once, and ends after the answer.
func (h *Host) begin(method string, args []any) *reply {
	var name, mode string
	if err := dbus.Store(args, &name, &mode); err != nil {
		return refuse(invalidArgument, "%v", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	id := h.id(name)
	u := h.unit(id)
	j := job{unit: id, starts: method != "StopUnit", was: u.ActiveState}
	switch {
	case method != "StartUnit" && method != "StopUnit" && method != "RestartUnit":
		return refuse(unknownMethod, "Unknown method %s.", method)
	case j.starts && u.LoadState == "masked":
		return refuse(unitMasked, "Unit %s is masked.", name)
	case j.starts && u.LoadState != "loaded":
		return refuse(noSuchUnit, "Unit %s not found.", name)
	case !j.starts && u.LoadState == "not-found" && u.isDown():
		return refuse(noSuchUnit, "Unit %s not loaded.", name)
	}
	number, isNew := h.enqueue(j)
	result := h.resultOf(j, method, u)
	return &reply{body: []any{jobPath(number)}, after: func() {
		if isNew && result != Never {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.endJob(number, result)
		}
	}}
}

// enqueue gives the unit a job. A job that already does the same serves both; an opposite one is canceled (job_install
// in systemd's src/core/job.c). The caller holds mu.
func (h *Host) enqueue(j job) (number uint32, isNew bool) {
	if running := h.jobOf(j.unit); running != 0 {
		if h.systemd.jobs[running].starts == j.starts {
			return running, false
		}
		h.endJob(running, Canceled)
	}
	h.systemd.lastJob++
	h.systemd.jobs[h.systemd.lastJob] = j
	switch u := h.unit(j.unit); {
	case j.starts && u.ActiveState != "active":
		h.systemd.units[j.unit] = u.in("activating")
	case !j.starts && !u.isDown():
		h.systemd.units[j.unit] = u.in("deactivating")
	}
	h.change()
	return h.systemd.lastJob, true
}

// resultOf is how a job ends. One that has nothing to do is done, whatever the test has set.
func (h *Host) resultOf(j job, method string, before Unit) Result {
	switch {
	case method == "StartUnit" && before.ActiveState == "active", !j.starts && before.isDown():
		return Done
	case j.starts:
		return cmp.Or(before.OnStart, Done)
	default:
		return cmp.Or(before.OnStop, Done)
	}
}

// endJob ends a job that has not ended, and reports it to all. The caller holds mu.
func (h *Host) endJob(number uint32, result Result) {
	j, ok := h.systemd.jobs[number]
	if !ok {
		return
	}
	delete(h.systemd.jobs, number)
	if u, ok := h.systemd.units[j.unit]; ok {
		h.systemd.units[j.unit] = u.after(j, result)
	}
	if runs := h.unit(j.unit).ActiveState == "active"; h.options.OnUnit != nil && runs != (j.was == "active") {
		h.options.OnUnit(j.unit, runs)
	}
	h.change()
	if h.options.Mute {
		return
	}
	h.systemd.emit(systemdPath, systemdManager+".JobRemoved", number, jobPath(number), j.unit, string(result))
}

// isDown reports whether there is nothing to stop.
func (u Unit) isDown() bool { return u.ActiveState == "inactive" || u.ActiveState == "failed" }

// after is the unit after a job.
func (u Unit) after(j job, result Result) Unit {
	switch result {
	case Done:
		switch {
		case j.starts && u.Type != "oneshot":
			return u.in("active")
		case u.isDown():
			return u
		default:
			return u.in("inactive")
		}
	case Failed:
		return u.in("failed")
	case Dependency, Skipped: // it never ran
		return u.in(j.was)
	case Canceled, Timeout, Never: // the unit stays on its way
	}
	return u
}

func jobPath(id uint32) dbus.ObjectPath {
	return dbus.ObjectPath(fmt.Sprintf("%s/job/%d", systemdPath, id))
}

// unitPath is the object of a unit: every byte but ASCII letters and digits is written as _ and two hex digits, and so is
// a digit at the beginning.
func unitPath(name string) dbus.ObjectPath {
	var b strings.Builder
	b.WriteString(systemdPath + "/unit/")
	for i := range len(name) {
		c := name[i]
		if isLetter := 'a' <= c|0x20 && c|0x20 <= 'z'; isLetter || (i > 0 && '0' <= c && c <= '9') {
			b.WriteByte(c)
			continue
		}
		fmt.Fprintf(&b, "_%02x", c)
	}
	return dbus.ObjectPath(b.String())
}

// unescape is the name of a unit, from the end of its path.
func unescape(escaped string) string {
	var out []byte
	for i := 0; i < len(escaped); i++ {
		if escaped[i] == '_' && i+2 < len(escaped) {
			if b, err := hex.DecodeString(escaped[i+1 : i+3]); err == nil {
				out = append(out, b...)
				i += 2
				continue
			}
		}
		out = append(out, escaped[i])
	}
	return string(out)
}
