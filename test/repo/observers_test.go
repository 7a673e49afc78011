package repo_test

import (
	"go/token"
	"go/types"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// beforeAct are the functions that a pass calls before it acts, and that may write, with what they do.
var beforeAct = map[string]string{
	"(*agent.Agent).learn":    "it records what users and other programs have done since the last pass",
	"(*agent.Agent).upkeep":   "it does the chores of each pass, which are idempotent",
	"(*agent.Agent).conclude": "it ends a pass that could not observe the node",
}

// agentActs are the exported methods of the agent that may write, with what they do.
var agentActs = map[string]string{
	"(*agent.Agent).Run":            "it is the loop",
	"(*agent.Agent).Recover":        "it passes until the node is restored",
	"(*agent.Agent).Restore":        "it restores labels of operands",
	"(*agent.Agent).AwaitRecovered": "it reads the host's record again, which the agent on the node writes",
}

// observersOf returns what may write nothing: all that a pass calls before it acts, and each way into the agent that is not known to act.
func observersOf(t *testing.T, c calls) []string {
	t.Helper()
	var out []string
	called := c["(*agent.Agent).pass"]
	act := slices.Index(called, "(*agent.Agent).act")
	if act < 0 {
		t.Fatal("a pass does not act: this test sees nothing")
	}
	for _, function := range called[:act] {
		if beforeAct[function] == "" && c[function] != nil && strings.HasPrefix(function, "(") {
			out = append(out, function)
		}
	}
	for function := range c {
		method, ofAgent := strings.CutPrefix(function, "(*agent.Agent).")
		if ofAgent && token.IsExported(method) && agentActs[function] == "" {
			out = append(out, function)
		}
	}
	for function := range maps.Keys(beforeAct) {
		if !slices.Contains(called[:act], function) {
			t.Errorf("a pass does not call %s before it acts: the table here is out of date", function)
		}
	}
	for function := range maps.Keys(agentActs) {
		if c[function] == nil {
			t.Errorf("there is no %s: the table here is out of date", function)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// gates say whether a step may be performed now.
var gates = []string{
	"(*agent.Agent).mayPerform", "(*decide.Gate).Allow", "(*decide.Gate).Runs", "(*fencing.Fencing).Preflight",
	"(*evict.Evictions).Drainable", "(*evict.Evictions).RequireHoldersKnown", "(*decide.Retries).TooEarly",
	"(*decide.Retries).CheckNoEffect", "(*reboot.Rebooter).Allowed",
}

// partsThatAct are the methods of parts that are no looks, with what they do.
var partsThatAct = map[string]string{
	"(*health.Monitor).Watch":   "it reports its condition, and keeps its own record, between two passes",
	"(*health.Monitor).Through": "the agent's changes to a GPU go through it",
}

// ownRecords are the fields by which a part is given where it keeps what it remembers.
var ownRecords = []string{"health.Options.Store"}

// recordsAnEvent is what a look of a part may do besides.
const recordsAnEvent = "(k8s.io/client-go/tools/record.EventRecorder).Event"

// askOnly are the functions that only ask, by a call by which others write.
var askOnly = []string{
	"(*drain.Evictor).DryRun",       // the API server evicts no pod in a dry run
	"(*openfiles.Scan).sharesFiles", // the system call compares two processes
	"(interface journal.Store).Try", // it removes again what it has written beside the record
	"(*plugin.Handover).Foresee",    // the same with the plugin's file; the API server takes the key in a dry run
}

// givenByCommands are the fields whose functions the commands give, with what these do.
var givenByCommands = map[string]string{
	asField + "agent.Parse":    "it reads the text of a file in mig-parted's format",
	asField + "catalog.Parse":  "it reads the text of a config of the device plugin",
	asField + "catalog.Render": "it makes the text of a config of the device plugin",
}

// readers are the methods by which the interfaces of this module are read. Any other method of an interface
// counts as one that writes.
var readers = map[string][]string{
	"nvml.Driver":       {"Snapshot", "Events"},
	"nvml.HealthReader": {"Health", "Events"},
	"nvml.UsageReader":  {"Usage"},
	"nvml.Bus":          {"GPUs"},
	"agent.Kubelet":     {"Assignments", "Allocatable"},
	"watch.Pods":        {"List"},
	"monitor.Health":    {"Recovered", "Critical", "ToReset", "Causes"},
	"monitor.Processes": {"Holders"},
	"journal.Store":     {"Read"},
	"health.Store":      {"Read"},
	"health.KernelLog":  {"Xids"},
	"health.Processes":  {"Holders"},
	"hardware.Specs":    {"Stale"},
	"units.Systemd":     {"States"},
	"reboot.Host":       {"CanReboot"},

	// A getter of the client, as Nodes, reads nothing and writes nothing.
	"kube.Interface": {
		"ConfigMaps", "DaemonSets", "DeviceTaintRules", "Events", "Leases", "Nodes", "PodDisruptionBudgets", "Pods", "SelfSubjectAccessReviews", "SubjectAccessReviews",
		"ResourceClaims", "TokenReviews", "RawCore", "RawPolicy", "RawResource",
	},
	"kube.ConfigMaps":           {"Get"},
	"kube.DaemonSets":           {"Get"},
	"kube.DeviceTaintRules":     {"List"},
	"kube.Leases":               {"Get"},
	"kube.Nodes":                {"Get", "List", "Watch"},
	"kube.PodDisruptionBudgets": {"List"},
	"kube.Pods":                 {"Get", "List"},
	"kube.ResourceClaims":       {"Get"},
}

// ourInterface begins the names of interfaces of this module.
const ourInterface = "interface "

// systemPackages are those by which a program changes the machine. Each of their functions counts as one that writes, unless it is among the
// readsOfSystem, or opens a file only for reading.
var systemPackages = []string{"os", "syscall", "golang.org/x/sys/unix", "github.com/google/renameio/v2"}

// serverPackages are those by which a program asks other programs, beside the client of the API server.
var serverPackages = []string{"net", "net/http", "os/exec"}

// pureInterfaces are those of this module whose methods work on what they are given alone. Those of package offer are held to that, as what decides is.
var pureInterfaces = []string{"check.checked", "check.readable", "check.words", "offer.Offer"}

// openers open a file by flags, with the place of these among the arguments.
var openers = map[string]int{"os.OpenFile": 1, "(*os.Root).OpenFile": 1, "golang.org/x/sys/unix.Open": 1, "golang.org/x/sys/unix.Openat": 2}

// readsOfSystem change nothing on the machine.
var readsOfSystem = []string{
	"os.Open", "os.Stat", "os.Lstat", "os.ReadFile", "os.ReadDir", "os.Readlink", "os.Getpid", "os.Hostname", "os.OpenRoot", "os.NewFile",
	"(*os.File).Close", "(*os.File).Read", "(*os.File).ReadDir", "(*os.File).Readdirnames", "(*os.File).Stat", "(*os.File).Fd", "(*os.File).Name",
	"(*os.Root).Open", "(*os.Root).Close", "(*os.Root).Stat", "(*os.Root).Lstat", "(*os.Root).ReadFile", "(*os.Root).Readlink",
	"golang.org/x/sys/unix.Statfs", "golang.org/x/sys/unix.Statx", "golang.org/x/sys/unix.Stat", "golang.org/x/sys/unix.Fstat",
	"golang.org/x/sys/unix.Close", "golang.org/x/sys/unix.Read", "golang.org/x/sys/unix.Readlinkat", "golang.org/x/sys/unix.ReadDirent",
	"golang.org/x/sys/unix.Major", "golang.org/x/sys/unix.Minor", "golang.org/x/sys/unix.Getrlimit",
}

// A look changes nothing: of all that the observers reach by calls, nothing writes to the API server, to a GPU, to a process or to the host.
func TestWhatObservesTheNodeReachesNothingThatWrites(t *testing.T) {
	t.Parallel()
	c := callsOf(t)
	observers := observersOf(t, c)
	for _, want := range []string{"(*agent.Agent).observe", "(*agent.Agent).plan", "(*agent.Agent).Preview", "(*agent.Agent).Diagnose"} {
		if !slices.Contains(observers, want) {
			t.Errorf("%s is none of what observes: %v", want, observers)
		}
	}
	for _, observer := range append(observers, "(*verify.Verifier).Await") { // the executor of the one kind of step that only observes
		c.checkWritesNothing(t, observer, askOnly...)
	}
	for _, path := range []string{"(*agent.Agent).conclude", "(*health.Monitor).Watch", "(*journal.RecordFile).Write", "(*deviceplugin.File).Prepare"} {
		if c.pathToWrite(path) == nil {
			t.Errorf("no write is found below %s: this test sees nothing", path)
		}
	}
}

// A gate says whether something may be done, and does nothing: what has to be written before a step is written when all gates are open.
func TestNoGateReachesAnythingThatWrites(t *testing.T) {
	t.Parallel()
	c := callsOf(t)
	for _, gate := range gates {
		c.checkWritesNothing(t, gate, askOnly...)
	}
	if c.pathToWrite("(*fencing.Fencing).Prepare") == nil {
		t.Error("no write is found below (*fencing.Fencing).Prepare, which writes for the gates: this test sees nothing")
	}
}

// A decision follows from what was observed: of all that the packages which decide and plan reach by calls, nothing asks the API server, kubelet, the driver
// or the host, and nothing writes. They may ask what time it is.
func TestWhatDecidesReadsNothing(t *testing.T) {
	t.Parallel()
	c, functions := callsOf(t), 0
	for _, function := range slices.Sorted(maps.Keys(c)) {
		if !slices.Contains([]string{"decide", "offer", "plan", "state"}, packageOf(function)) {
			continue
		}
		functions++
		if path := c.path(function, c.readsOrWrites); path != nil {
			t.Errorf("%s reads, or writes: %s", function, strings.Join(path, " -> "))
		}
	}
	if functions < 100 || c["(*decide.Resolver).Desired"] == nil || c["plan.Make"] == nil {
		t.Errorf("%d functions decide and plan: this test sees too few", functions)
	}
	for _, function := range []string{"(*observe.Files).Observe", "(*deviceplugin.Plugin).ObserveWithLabels", "(*hardware.GPUs).Snapshot", "(*deviceplugin.File).Read"} {
		if c.path(function, c.readsOrWrites) == nil {
			t.Errorf("no read is found below %s: this test sees nothing", function)
		}
	}
}

// Each method by which the loop asks a part is a look, unless the table says what else it is: a new part is held to that without being added to any
// table. A look may record Events, and change nothing.
func TestTheMonitorsObserveAndChangeNothing(t *testing.T) {
	t.Parallel()
	c := callsOf(t)
	asked, observations := asksOfParts(t), 0
	for _, part := range parts(t) {
		for _, function := range methodsOf(part, asked) {
			if partsThatAct[function] != "" || c[function] == nil {
				continue
			}
			observations++
			c.checkWritesNothing(t, function, slices.Concat(askOnly, []string{recordsAnEvent})...)
		}
	}
	if observations < 20 {
		t.Errorf("the parts have %d looks: this test sees too few", observations)
	}
	for function := range partsThatAct {
		if c[function] == nil {
			t.Errorf("there is no %s: the table here is out of date", function)
		}
	}
}

// What a part is given has no method that writes to the API server, to a GPU, to a process or to the host. Events it sends by a function.
func TestAPartIsGivenNothingThatWrites(t *testing.T) {
	t.Parallel()
	c, fields := callsOf(t), 0
	for _, part := range parts(t) {
		options, ok := part.Pkg().Scope().Lookup("Options").(*types.TypeName)
		if !ok {
			t.Fatalf("%s has no Options", part.Pkg().Path())
		}
		for _, field := range fieldsOf(options.Type()) {
			fields++
			if slices.Contains(ownRecords, part.Pkg().Name()+".Options."+field.Name()) {
				continue
			}
			for _, method := range methodsOf(field, nil) {
				if path := c.pathToWrite(method); path != nil {
					t.Errorf("%s is given %s, which writes: %s", part.Pkg().Path(), field.Name(), strings.Join(path, " -> "))
				}
			}
		}
	}
	if fields < 10 {
		t.Errorf("the parts are given %d fields: this test sees too few", fields)
	}
}

// parts are the types below agent/ that look again between two passes.
func parts(t *testing.T) []types.Object {
	t.Helper()
	var out []types.Object
	for _, pkg := range productPackages(t) {
		if !strings.HasPrefix(pkg.PkgPath, module+"agent/") || pkg.PkgPath == module+"agent/monitor" { // by which the loop asks them
			continue
		}
		for _, name := range pkg.Types.Scope().Names() {
			object, ok := pkg.Types.Scope().Lookup(name).(*types.TypeName)
			if ok && !types.IsInterface(object.Type()) && len(methodsOf(object, []string{"Poll"})) > 0 {
				out = append(out, object)
			}
		}
	}
	if len(out) < 3 {
		t.Fatalf("found the parts %v", out)
	}
	return out
}

// asksOfParts are the methods of the interfaces by which the loop asks its parts.
func asksOfParts(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, pkg := range productPackages(t) {
		if pkg.PkgPath != module+"agent/monitor" {
			continue
		}
		for _, name := range pkg.Types.Scope().Names() {
			if is, ok := pkg.Types.Scope().Lookup(name).Type().Underlying().(*types.Interface); ok {
				for method := range is.Methods() {
					out = append(out, method.Name())
				}
			}
		}
	}
	if len(out) == 0 {
		t.Fatal("agent/monitor has no interface")
	}
	return out
}

// methodsOf are the methods of an object's type, or of a pointer to it, that have one of the names; all of them without names.
func methodsOf(object types.Object, names []string) []string {
	of := object.Type()
	if _, pointer := of.(*types.Pointer); !pointer && !types.IsInterface(of) {
		of = types.NewPointer(of)
	}
	var out []string
	for method := range types.NewMethodSet(of).Methods() {
		if names == nil || slices.Contains(names, method.Obj().Name()) {
			out = append(out, nameOf(method.Obj()))
		}
	}
	return out
}

// fieldsOf are the fields of a struct, and of the structs that are embedded in it.
func fieldsOf(of types.Type) []*types.Var {
	is, ok := of.Underlying().(*types.Struct)
	if !ok {
		return nil
	}
	var out []*types.Var
	for field := range is.Fields() {
		if field.Embedded() {
			out = append(out, fieldsOf(field.Type())...)
			continue
		}
		out = append(out, field)
	}
	return out
}

// checkWritesNothing checks one function.
func (c calls) checkWritesNothing(t *testing.T, function string, besides ...string) {
	t.Helper()
	if c[function] == nil {
		t.Errorf("there is no %s: the table here is out of date", function)
	}
	if path := c.pathToWrite(function, besides...); path != nil {
		t.Errorf("%s writes: %s", function, strings.Join(path, " -> "))
	}
}

// writes reports whether a function is one of an interface or of the system that changes something, or one that no one knows: what a field holds
// that nothing of the product gives to it.
func (c calls) writes(function string) bool {
	if strings.HasPrefix(function, asField) || strings.HasPrefix(function, asParameter) {
		return c[function] == nil && givenByCommands[function] == ""
	}
	of, method, isMethod := strings.Cut(strings.TrimPrefix(function, "("), ").")
	if slices.Contains(systemPackages, packageOf(function)) {
		return !slices.Contains(readsOfSystem, function)
	}
	if !isMethod {
		return false
	}
	if strings.HasPrefix(of, "k8s.io/client-go/tools/record.EventRecorder") {
		return true
	}
	of, ours := strings.CutPrefix(of, ourInterface)
	return ours && !slices.Contains(pureInterfaces, of) && !slices.Contains(readers[of], method)
}

// readsOrWrites reports whether a function is one of an interface or of the system that reads or changes something, or an unknown one.
func (c calls) readsOrWrites(function string) bool {
	of := packageOf(function)
	if slices.Contains(systemPackages, of) || slices.Contains(serverPackages, of) || strings.HasPrefix(of, "k8s.io/client-go/") {
		return true
	}
	if name, ours := strings.CutPrefix(strings.TrimPrefix(function, "("), ourInterface); ours {
		name, _, _ = strings.Cut(name, ").")
		return !slices.Contains(pureInterfaces, name)
	}
	return c.writes(function)
}

// packageOf is the path of the package of a function, or of the type of a method.
func packageOf(function string) string {
	of := strings.TrimLeft(function, "(*")
	slash := strings.LastIndex(of, "/") + 1
	name, _, _ := strings.Cut(of[slash:], ".")
	return of[:slash] + name
}

// writers are what writes a fact, with the one function that calls it.
var writers = map[string][]string{
	// The node's metadata and spec, and its status.
	"(interface kube.Nodes).Patch": {
		"(*access.Checker).patch", // a dry run
		"(*cleanup.Cleaner).removeConditions",
		"(nodewrite.Writer).once", "(nodewrite.Writer).status",
	},
	// The node is given back with the journal left on it.
	"(fence.Fence).Park": {"(*fencing.Fencing).LeaveJournal"},
}

// One function writes a fact: a second one would lack its retries and what it remembers.
func TestOneFunctionWritesAFact(t *testing.T) {
	t.Parallel()
	c := callsOf(t)
	for write, want := range writers {
		if diff := cmp.Diff(want, c.callers(write)); diff != "" {
			t.Errorf("callers of %s (-want +got):\n%s", write, diff)
		}
	}
}
