package repo_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/health"
	"github.com/gpuslice/gpuslice/agent/idle"
	"github.com/gpuslice/gpuslice/agent/memory"
)

// parts are the packages below agent/ that watch something of the node, with what each is given.
var parts = map[string]reflect.Type{
	"health": reflect.TypeFor[health.Options](),
	"idle":   reflect.TypeFor[idle.Options](),
	"memory": reflect.TypeFor[memory.Options](),
}

// unconditional are the parts that tell by Events and metrics alone. The others have conditions of their own.
var unconditional = []string{"idle"}

// ownMemory are the fields by which a part writes what it remembers, and nothing of anybody else.
var ownMemory = []string{"health.Store"}

// A part is one directory and one line: of the agent, nothing but new.go knows it, and nothing but its directory knows its conditions.
func TestAPartIsOneDirectoryAndOneLine(t *testing.T) {
	t.Parallel()
	made := madeParts(t)
	for part := range parts {
		if !slices.Contains(made, part) {
			t.Errorf("agent/new.go makes no part of agent/%s: its list is %v", part, made)
		}
	}
	conditions := map[string]string{} // and the part whose they are
	for _, part := range made {
		if parts[part] == nil {
			t.Errorf("agent/%s is a part: add what it is given to the table here", part)
		}
		own := conditionsOf(t, filepath.Join("agent", part))
		if (len(own) == 0) != slices.Contains(unconditional, part) {
			t.Errorf("agent/%s has the conditions %v of config", part, own)
		}
		for _, name := range own {
			conditions[name] = part
		}
	}
	checkWiring(t)
	for _, path := range files(t) {
		within, err := filepath.Rel(root, path)
		if err != nil {
			t.Fatal(err)
		}
		folder := filepath.ToSlash(filepath.Dir(within))
		if filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") || folder != "agent" && !strings.HasPrefix(folder, "agent/") {
			continue
		}
		checkKnowsNoPart(t, path, filepath.ToSlash(within), conditions)
	}
}

// Who installs the agent finds each condition of a part where it says what the agent writes, and at the right by which it writes it.
func TestTheConditionsOfPartsAreAmongWhatTheAgentWrites(t *testing.T) {
	t.Parallel()
	values, _ := speaks(t, parsed(t, "config/keys.go"))
	_, writes, found := strings.Cut(read(t, "deploy/README.md"), "\n## What it writes\n")
	writes, _, ended := strings.Cut(writes, "\n## ")
	if !found || !ended {
		t.Fatal("deploy/README.md has no section What it writes")
	}
	for part := range parts {
		for _, name := range conditionsOf(t, filepath.Join("agent", part)) {
			if !strings.Contains(writes, "`"+values[name]+"`") {
				t.Errorf("deploy/README.md does not say, in What it writes, when the agent writes the condition %s", values[name])
			}
			if !strings.Contains(read(t, "deploy/base/rbac.yaml"), values[name]) {
				t.Errorf("deploy/base/rbac.yaml does not say, at nodes/status, that the agent writes the condition %s", values[name])
			}
		}
	}
}

// checkWiring checks that of the functions in agent/new.go only the list of the parts names one, and that by its New and its Options alone.
func checkWiring(t *testing.T) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, "agent", "new.go"), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	uses := map[string]int{}
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok {
			continue
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if selector, ok := n.(*ast.SelectorExpr); ok {
				if of, ok := selector.X.(*ast.Ident); ok && parts[of.Name] != nil {
					uses[f.Name.Name+" "+of.Name+"."+selector.Sel.Name]++
				}
			}
			return true
		})
	}
	want := map[string]int{}
	for part := range parts {
		want["addParts "+part+".New"], want["addParts "+part+".Options"] = 1, 1
	}
	if diff := cmp.Diff(want, uses); diff != "" {
		t.Errorf("a part is one line in addParts of agent/new.go (-want +got):\n%s", diff)
	}
}

// checkKnowsNoPart checks one file.
func checkKnowsNoPart(t *testing.T, path, within string, conditions map[string]string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, spec := range file.Imports {
		part, below := strings.CutPrefix(strings.Trim(spec.Path.Value, `"`), module+"agent/")
		if below && parts[part] != nil && within != "agent/new.go" {
			t.Errorf("%s knows the part %s: only agent/new.go should", within, part)
		}
	}
	for _, name := range conditionsIn(file) {
		if part, is := conditions[name]; is && !strings.HasPrefix(within, "agent/"+part+"/") {
			t.Errorf("%s knows config.%s: only agent/%s should", within, name, part)
		}
	}
}

// A part looks, and changes nothing: what it is given has no method that writes to the API server, to a GPU, to a process or to the host. Events
// it sends by a function.
func TestAPartIsGivenNothingThatWrites(t *testing.T) {
	t.Parallel()
	writes := []string{
		"Create", "CreatePart", "Destroy", "DestroyPart", "SetMode", "SetPersistence", "SetComputeMode", "Reset", "Release", "Patch", "Patched", "Update",
		"UpdateStatus", "Delete", "Evict", "Hangup", "Write", "Tell", "Start", "Stop", "Reboot", "Inhibit", "RawCore",
	}
	for part, given := range parts {
		for _, field := range givenFields(given) {
			if slices.Contains(ownMemory, part+"."+field.Name) {
				continue
			}
			for _, kind := range []reflect.Type{field.Type, reflect.PointerTo(field.Type)} {
				for method := range kind.Methods() {
					if slices.Contains(writes, method.Name) {
						t.Errorf("agent/%s is given %s, which can %s", part, field.Name, method.Name)
					}
				}
			}
		}
	}
}

// givenFields are those of what a part is given, and of the structs in it by which it is given some together.
func givenFields(given reflect.Type) []reflect.StructField {
	var out []reflect.StructField
	for field := range given.Fields() {
		if field.Anonymous {
			out = append(out, givenFields(field.Type)...)
			continue
		}
		out = append(out, field)
	}
	return out
}

// madeParts are the packages below agent/ that have a part and whose New agent/new.go calls.
func madeParts(t *testing.T) []string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, "agent", "new.go"), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		if made, ok := call.Fun.(*ast.SelectorExpr); ok && made.Sel.Name == "New" {
			if of, ok := made.X.(*ast.Ident); ok && hasPart(t, filepath.Join("agent", of.Name)) {
				out = append(out, of.Name)
			}
		}
		return true
	})
	if len(out) == 0 {
		t.Fatal("agent/new.go makes no part")
	}
	return out
}

// hasPart reports whether a type of a folder is a part: it looks again between two passes.
func hasPart(t *testing.T, folder string) bool {
	t.Helper()
	for _, file := range productFiles(t, folder) {
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Recv != nil && f.Name.Name == "LookAgain" {
				return true
			}
		}
	}
	return false
}

// productFiles are the files of a folder but for tests.
func productFiles(t *testing.T, folder string) []*ast.File {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(root, folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	var out []*ast.File
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, file)
	}
	return out
}

// conditionsOf are the conditions of config that a folder names.
func conditionsOf(t *testing.T, folder string) []string {
	t.Helper()
	var out []string
	for _, file := range productFiles(t, folder) {
		out = append(out, conditionsIn(file)...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// conditionsIn are the conditions of config that a file names.
func conditionsIn(file *ast.File) []string {
	var out []string
	ast.Inspect(file, func(n ast.Node) bool {
		selector, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if of, ok := selector.X.(*ast.Ident); ok && of.Name == "config" && strings.HasPrefix(selector.Sel.Name, "Condition") {
			out = append(out, selector.Sel.Name)
		}
		return true
	})
	return out
}
