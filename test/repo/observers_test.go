package repo_test

import (
	"go/ast"
	"go/types"
	"slices"
	"strings"
	"testing"

	"golang.org/x/tools/go/packages"
)

// observers are what looks at the node: all that a pass does before something is decided, with the parts and what completes the look.
var observers = []string{
	"(*agent.Agent).observe", "(*agent.Agent).observeTaken", "(*agent/resolve.Resolver).Desired", "(*agent/proving.Prover).Prove",
	"(*agent/proving.Prover).Await", // the executor of the one kind of step that only looks
	"(*agent/memory.Monitor).Look", "(*agent/memory.Monitor).LookAgain", "(*agent/health.Monitor).Look", "(*agent/health.Monitor).LookAgain",
	"(*agent/health.Monitor).Recovered", "(*agent/health.Monitor).Critical", "(*agent/idle.Monitor).Look", "(*agent/idle.Monitor).LookAgain",
	"(*agent/idle.Monitor).Watch",
	"(*agent/health.Monitor).ToReset",
}

// readers are the methods by which the interfaces of this module and the clients of the API server are read. Any other method of an interface
// counts as one that writes.
var readers = map[string][]string{
	"nvml.Driver":                {"Snapshot", "Events"},
	"nvml.HealthReader":          {"Health", "Events"},
	"nvml.UsageReader":           {"Usage"},
	"nvml.Bus":                   {"GPUs"},
	"agent.Kubelet":              {"Assignments", "Allocatable"},
	"agent/watched.Pods":         {"List"},
	"agent/part.DriverWatcher":   {"Recovered", "Critical", "ToReset"},
	"agent/occupants.Processes":  {"Holders"},
	"agent/hostrecord.Store":     {"Read"},
	"agent/health.Store":         {"Read"},
	"agent/hardware.Specs":       {"Stale"},
	"agent/units.Systemd":        {"States"},
	"agent/reboot.Host":          {"CanReboot"},
	"client-go/typed/Interfaces": {"Get", "List", "Watch"},
}

// ourInterface begins the names of interfaces of this module.
const ourInterface = "interface "

// writesOfStdlib change the machine.
var writesOfStdlib = []string{
	"os.Chmod", "os.Create", "os.CreateTemp", "os.Link", "os.Mkdir", "os.MkdirAll", "os.Remove", "os.RemoveAll", "os.Rename", "os.Symlink", "os.Truncate",
	"os.WriteFile", "(*os.Root).Create", "(*os.Root).Remove", "(*os.Root).Rename", "(*os.Root).WriteFile", "(*os.Process).Kill", "(*os.Process).Signal",
	"syscall.Kill", "golang.org/x/sys/unix.Kill", "golang.org/x/sys/unix.PidfdSendSignal",
}

// A look changes nothing: of all that the observers reach by calls, nothing writes to the API server, to a GPU, to a process or to the host.
func TestWhatLooksAtTheNodeReachesNothingThatWrites(t *testing.T) {
	t.Parallel()
	reached := namedBy(t)
	for _, observer := range observers {
		if reached[observer] == nil {
			t.Errorf("there is no %s: the table here is out of date", observer)
		}
		if path := pathToWrite(reached, observer); path != nil {
			t.Errorf("%s writes: %s", observer, strings.Join(path, " -> "))
		}
	}
	if pathToWrite(reached, "(*agent.Agent).conclude") == nil {
		t.Error("no write is found below (*agent.Agent).conclude, which tells the node: this test sees nothing")
	}
}

// pathToWrite is how a function comes to write; nil if it does not.
func pathToWrite(reached map[string][]string, from string) []string {
	parent := map[string]string{from: ""}
	for queue := []string{from}; len(queue) > 0; queue = queue[1:] {
		at := queue[0]
		if writes(at) {
			var path []string
			for ; at != ""; at = parent[at] {
				path = append(path, at)
			}
			slices.Reverse(path)
			return path
		}
		for _, next := range reached[at] {
			if _, seen := parent[next]; !seen {
				parent[next] = at
				queue = append(queue, next)
			}
		}
	}
	return nil
}

// writes reports whether a function is one of an interface or of the standard library that changes something.
func writes(function string) bool {
	if slices.Contains(writesOfStdlib, function) {
		return true
	}
	of, method, ok := strings.Cut(strings.TrimPrefix(function, "("), ").")
	if !ok {
		return false
	}
	if path, typed := strings.CutPrefix(of, "k8s.io/client-go/kubernetes/typed/"); typed {
		// A getter of a client, as Nodes of CoreV1, reads nothing and writes nothing.
		return !strings.HasSuffix(path, "Getter") && !strings.HasSuffix(path, "V1Interface") && !slices.Contains(readers["client-go/typed/Interfaces"], method)
	}
	if strings.HasPrefix(of, "k8s.io/client-go/tools/record.EventRecorder") {
		return true
	}
	of, ours := strings.CutPrefix(of, ourInterface)
	return ours && !slices.Contains(readers[of], method)
}

// namedBy are the functions that each function of the product names, and those that the variables name that it does.
func namedBy(t *testing.T) map[string][]string {
	t.Helper()
	loaded, err := packages.Load(&packages.Config{
		Mode:    packages.NeedName | packages.NeedSyntax | packages.NeedTypes | packages.NeedTypesInfo | packages.NeedImports | packages.NeedExportFile,
		Dir:     root,
		Context: t.Context(),
	}, "./agent/...", "./drain/...", "./config/...", "./nvml")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]string{}
	for _, pkg := range loaded {
		for _, err := range pkg.Errors {
			t.Fatalf("loading %s: %v", pkg.PkgPath, err)
		}
		add := func(from string, below ast.Node) {
			if out[from] == nil {
				out[from] = []string{} // it exists
			}
			ast.Inspect(below, func(n ast.Node) bool {
				if id, ok := n.(*ast.Ident); ok {
					if name := nameOf(pkg.TypesInfo.Uses[id]); name != "" {
						out[from] = append(out[from], name)
					}
				}
				return true
			})
		}
		for _, file := range pkg.Syntax {
			for _, decl := range file.Decls {
				switch decl := decl.(type) {
				case *ast.FuncDecl:
					add(nameOf(pkg.TypesInfo.Defs[decl.Name]), decl)
				case *ast.GenDecl:
					for _, spec := range decl.Specs {
						value, ok := spec.(*ast.ValueSpec)
						if !ok {
							continue
						}
						for _, name := range value.Names {
							if from := nameOf(pkg.TypesInfo.Defs[name]); from != "" {
								add(from, value)
							}
						}
					}
				}
			}
		}
	}
	return out
}

// nameOf is the full name of a function or of a variable of a package, below this module without its path; "" for anything else.
func nameOf(object types.Object) string {
	switch object := object.(type) {
	case *types.Func:
		receiver := object.Signature().Recv()
		if receiver != nil && types.IsInterface(receiver.Type()) && object.Pkg() != nil && strings.HasPrefix(object.Pkg().Path(), module) {
			return strings.Replace(object.FullName(), "("+module, "("+ourInterface, 1)
		}
		return strings.ReplaceAll(object.Origin().FullName(), module, "")
	case *types.Var:
		if object.Pkg() != nil && object.Parent() == object.Pkg().Scope() {
			return strings.ReplaceAll(object.Pkg().Path()+"."+object.Name(), module, "")
		}
	}
	return ""
}
