package repo_test

import (
	"go/types"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// observers are what looks at the node: all that a pass does before something is decided, and what completes the look. The looks of the parts
// follow from the interfaces of agent/part.
var observers = []string{
	"(*agent.Agent).observe", "(*agent.Agent).observeTaken", "(*agent/resolve.Resolver).Desired", "(*agent/proving.Prover).Prove",
	"(*agent/proving.Prover).Await", // the executor of the one kind of step that only looks
}

// gates say whether a step may be performed now.
var gates = []string{
	"(*agent.Agent).mayPerform", "(*agent/gate.Gate).Allow", "(*agent/gate.Gate).Runs", "(*agent/fencing.Fencing).Preflight",
	"(*agent/draining.Draining).Drainable", "(*agent/draining.Draining).RequireHoldersKnown", "(*agent/budget.Budget).TooEarly",
	"(*agent/budget.Budget).CheckNoEffect", "(*agent/reboot.Rebooter).Allowed",
}

// partsThatAct are the methods of parts that are no looks, with what they do.
var partsThatAct = map[string]string{
	"(*agent/health.Monitor).Watch":   "it tells its condition, and keeps its own record, between two passes",
	"(*agent/health.Monitor).Through": "the agent's changes to a GPU go through it",
}

// tells are the fields by which parts record Events. A look of a part may do that, and change nothing.
var tells = []string{
	asField + "agent/health.TellNode", asField + "agent/health.TellPod", asField + "agent/idle.Tell", asField + "agent/memory.Tell",
}

// askOnly are the functions that only ask, by a call by which others write.
var askOnly = []string{
	"(*drain.Evictor).DryRun",                     // the API server evicts no pod in a dry run
	"(*drain/holders/openfiles.Look).sharesFiles", // the system call compares two processes
}

// givenByCommands are the fields whose functions the commands give, with what these do.
var givenByCommands = map[string]string{
	asField + "agent.Parse":               "it reads the text of a file in mig-parted's format",
	asField + "agent/deviceplugin.Parse":  "it reads the text of a config of the device plugin",
	asField + "agent/deviceplugin.Render": "it makes the text of a config of the device plugin",
}

// readers are the methods by which the interfaces of this module are read. Any other method of an interface
// counts as one that writes.
var readers = map[string][]string{
	"nvml.Driver":               {"Snapshot", "Events"},
	"nvml.HealthReader":         {"Health", "Events"},
	"nvml.UsageReader":          {"Usage"},
	"nvml.Bus":                  {"GPUs"},
	"agent.Kubelet":             {"Assignments", "Allocatable"},
	"agent/watched.Pods":        {"List"},
	"agent/part.DriverWatcher":  {"Recovered", "Critical", "ToReset"},
	"agent/occupants.Processes": {"Holders"},
	"agent/hostrecord.Store":    {"Read"},
	"agent/health.Store":        {"Read"},
	"agent/hardware.Specs":      {"Stale"},
	"agent/units.Systemd":       {"States"},
	"agent/reboot.Host":         {"CanReboot"},

	// A getter of the client, as Nodes, reads nothing and writes nothing.
	"drain/kube.Interface": {
		"ConfigMaps", "DaemonSets", "Events", "Leases", "Nodes", "PodDisruptionBudgets", "Pods", "SelfSubjectAccessReviews", "SubjectAccessReviews",
		"TokenReviews", "RawCore", "RawPolicy",
	},
	"drain/kube.ConfigMaps":           {"Get"},
	"drain/kube.DaemonSets":           {"Get"},
	"drain/kube.Leases":               {"Get"},
	"drain/kube.Nodes":                {"Get", "List", "Watch"},
	"drain/kube.PodDisruptionBudgets": {"List"},
	"drain/kube.Pods":                 {"Get", "List"},
}

// ourInterface begins the names of interfaces of this module.
const ourInterface = "interface "

// systemPackages are those by which a program changes the machine. Each of their functions counts as one that writes, unless it is among the
// readsOfSystem, or opens a file only for reading.
var systemPackages = []string{"os", "syscall", "golang.org/x/sys/unix", "github.com/google/renameio/v2"}

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
func TestWhatLooksAtTheNodeReachesNothingThatWrites(t *testing.T) {
	t.Parallel()
	c := callsOf(t)
	for _, observer := range observers {
		c.checkWritesNothing(t, observer, askOnly...)
	}
	for _, path := range []string{"(*agent.Agent).conclude", "(*agent/health.Monitor).Watch", "(*agent/hostrecord.File).Write", "(*agent/pluginfile.File).Prepare"} {
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
	if c.pathToWrite("(*agent/fencing.Fencing).Prepare") == nil {
		t.Error("no write is found below (*agent/fencing.Fencing).Prepare, which writes for the gates: this test sees nothing")
	}
}

// Each method by which the loop asks a part is a look, unless the table says what else it is: a new part is held to that without being added to any
// table.
func TestThePartsLookAndChangeNothing(t *testing.T) {
	t.Parallel()
	c := callsOf(t)
	asked, looks := asksOfParts(t), 0
	for _, part := range madeParts(t) {
		for _, function := range c.methodsOfParts("agent/"+part, asked) {
			if partsThatAct[function] != "" {
				continue
			}
			looks++
			c.checkWritesNothing(t, function, slices.Concat(tells, askOnly)...)
		}
	}
	if looks < 20 {
		t.Errorf("the parts have %d looks: this test sees too few", looks)
	}
	for function := range partsThatAct {
		if c[function] == nil {
			t.Errorf("there is no %s: the table here is out of date", function)
		}
	}
	for _, tell := range tells {
		if diff := cmp.Diff([]string{"(k8s.io/client-go/tools/record.EventRecorder).Event"}, c.writesBelow(tell)); diff != "" {
			t.Errorf("%s records Events alone (-want +reached):\n%s", tell, diff)
		}
	}
}

// asksOfParts are the methods of the interfaces by which the loop asks its parts.
func asksOfParts(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, pkg := range productPackages(t) {
		if pkg.PkgPath != module+"agent/part" {
			continue
		}
		for _, name := range pkg.Types.Scope().Names() {
			if is, ok := pkg.Types.Scope().Lookup(name).Type().Underlying().(*types.Interface); ok {
				for i := range is.NumMethods() {
					out = append(out, is.Method(i).Name())
				}
			}
		}
	}
	if len(out) == 0 {
		t.Fatal("agent/part has no interface")
	}
	return out
}

// methodsOfParts are the methods with those names of the type of a package that looks again between two passes.
func (c calls) methodsOfParts(folder string, names []string) []string {
	var out []string
	for function := range c {
		receiver, method, ok := strings.Cut(function, ").")
		if ok && strings.HasPrefix(receiver, "(*"+folder+".") && method == "LookAgain" {
			for _, name := range names {
				if own := receiver + ")." + name; c[own] != nil && !slices.Contains(out, own) {
					out = append(out, own)
				}
			}
		}
	}
	slices.Sort(out)
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

// writesBelow are all that a function reaches and that write.
func (c calls) writesBelow(from string) []string {
	var out []string
	for path := c.pathToWrite(from, out...); path != nil; path = c.pathToWrite(from, out...) {
		out = append(out, path[len(path)-1])
	}
	slices.Sort(out)
	return out
}

// writes reports whether a function is one of an interface or of the system that changes something, or one that nobody knows: what a field holds
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
	return ours && !slices.Contains(readers[of], method)
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
	"(interface drain/kube.Nodes).Patch": {
		"(*agent/access.Checker).patch", // a dry run
		"(*agent/cleanup.Cleaner).removeConditions",
		"(agent/nodewrite.Writer).once", "(agent/nodewrite.Writer).status",
	},
	// The node is given back with the journal left on it.
	"(drain/fence.Fence).Park": {"(*agent/fencing.Fencing).LeaveJournal"},
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
