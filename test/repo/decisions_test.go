package repo_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/tools/go/packages"
)

// Each reason is a constant of config with its line of text: nothing else spells one, neither as a reason nor as the text of a condition or an
// Event.
func TestReasonsAreSpeltInOnePlace(t *testing.T) {
	t.Parallel()
	seen := 0
	for _, pkg := range productPackages(t) {
		if pkg.PkgPath == module+"config" || strings.HasPrefix(pkg.PkgPath, module+"config/") {
			continue
		}
		for _, file := range pkg.Syntax {
			ast.Inspect(file, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.BasicLit:
					if is := pkg.TypesInfo.Types[n].Type; is != nil && is.String() == module+"config.Reason" && n.Value != `""` {
						t.Errorf("%s spells the reason %s: make it a constant of config/keys.go", pkg.Fset.Position(n.Pos()), n.Value)
					}
				case *ast.CompositeLit:
					seen += checkConditionsReason(t, pkg, n)
				}
				return true
			})
		}
	}
	if seen == 0 {
		t.Error("no condition is made anywhere: this test sees nothing")
	}
}

// checkConditionsReason checks that the reason of a node's condition is made of a reason of config, and returns how many conditions it has seen.
func checkConditionsReason(t *testing.T, pkg *packages.Package, literal *ast.CompositeLit) int {
	t.Helper()
	if of := pkg.TypesInfo.Types[literal].Type; of == nil || of.String() != "k8s.io/api/core/v1.NodeCondition" {
		return 0
	}
	for _, element := range literal.Elts {
		pair, ok := element.(*ast.KeyValueExpr)
		if !ok {
			continue
		}
		if key, ok := pair.Key.(*ast.Ident); !ok || key.Name != "Reason" {
			continue
		}
		conversion, ok := pair.Value.(*ast.CallExpr)
		if !ok || len(conversion.Args) != 1 || pkg.TypesInfo.Types[conversion.Args[0]].Type.String() != module+"config.Reason" {
			t.Errorf("%s has a reason that is none of config", pkg.Fset.Position(pair.Pos()))
		}
	}
	return 1
}

// decidedByReason are the functions that compare a reason with a certain one, by the folder's name, and why they may.
var decidedByReason = map[string]string{
	"verdict Advice":       "a finding has no other kind than its reason",
	"verdict Acknowledge":  "a finding has no other kind than its reason",
	"verdict recall":       "a finding has no other kind than its reason, also in the record",
	"api PhaseBeside":      "a pass that cannot observe the whole node writes nothing but the condition",
	"decide lostInstances": "the condition alone says that the driver was away at the last pass",
	"rollout see":          "an agent that cannot read the journal writes nothing but the condition",
	"rollout waitsForUser": "an agent asks users whether they mean an older label by its condition alone",
}

// decidedByText are the functions that look into the text of an error or a message, and why they may.
var decidedByText = map[string]string{
	"validate report":    "it prints each of several errors on a line",
	"drain denialOf":     "the API server names the webhook that denies a request in its message alone",
	"drain firstPending": "it quotes what the scheduler says, another program, and leaves out what that says twice; nothing depends on it",
}

// intoText are the functions of strings that find something in a text.
var intoText = []string{"Contains", "Cut", "CutPrefix", "CutSuffix", "HasPrefix", "HasSuffix", "Index", "EqualFold", "Split", "SplitN", "SplitSeq", "Fields"}

// Reasons and messages are for people: what the agent decides, it decides by fields that have the type of what they say. A text of another
// program is another matter, as the kernel's log.
func TestNothingIsDecidedByWhatIsMeantForPeople(t *testing.T) {
	t.Parallel()
	found := map[string]bool{}
	for _, path := range files(t) {
		within, err := filepath.Rel(root, path)
		if err != nil {
			t.Fatal(err)
		}
		folder := filepath.ToSlash(filepath.Dir(within))
		top, _, _ := strings.Cut(folder, "/")
		if filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") || !slices.Contains([]string{"agent", "cmd", "drain"}, top) {
			continue
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		checkDecisions(t, set, filepath.Base(folder), file, found)
	}
	for _, table := range []map[string]string{decidedByReason, decidedByText} {
		for function := range table {
			if !found[function] {
				t.Errorf("%s does not do that any more: the table here is out of date", function)
			}
		}
	}
}

// checkDecisions checks the functions of a file, and notes which of them decide by a reason or a text.
func checkDecisions(t *testing.T, set *token.FileSet, folder string, file *ast.File, found map[string]bool) {
	t.Helper()
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok {
			continue
		}
		function := folder + " " + f.Name.Name
		ast.Inspect(f, func(n ast.Node) bool {
			switch {
			case comparesReason(n):
				found[function] = true
				if decidedByReason[function] == "" {
					t.Errorf("%s decides by a reason: give what it compares a field of its own", set.Position(n.Pos()))
				}
			case searchesText(n):
				found[function] = true
				if decidedByText[function] == "" {
					t.Errorf("%s looks into a text that is meant for people: give what it seeks a field of its own", set.Position(n.Pos()))
				}
			}
			return true
		})
	}
}

// comparesReason reports whether the node compares something with a reason of config.
func comparesReason(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.BinaryExpr:
		return (n.Op == token.EQL || n.Op == token.NEQ) && (isReason(n.X) || isReason(n.Y))
	case *ast.CaseClause:
		return slices.ContainsFunc(n.List, isReason)
	}
	return false
}

// isReason reports whether an expression is a reason of config, or that as a string.
func isReason(expr ast.Expr) bool {
	if call, ok := expr.(*ast.CallExpr); ok && len(call.Args) == 1 {
		if to, ok := call.Fun.(*ast.Ident); ok && to.Name == "string" {
			return isReason(call.Args[0])
		}
	}
	selector, ok := expr.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	of, ok := selector.X.(*ast.Ident)
	return ok && of.Name == "config" && strings.HasPrefix(selector.Sel.Name, "Reason")
}

// searchesText reports whether the node seeks something in the text of an error, or in a message.
func searchesText(n ast.Node) bool {
	call, ok := n.(*ast.CallExpr)
	if !ok || len(call.Args) == 0 {
		return false
	}
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || !slices.Contains(intoText, f.Sel.Name) {
		return false
	}
	if of, ok := f.X.(*ast.Ident); !ok || of.Name != "strings" {
		return false
	}
	switch text := call.Args[0].(type) {
	case *ast.SelectorExpr:
		return text.Sel.Name == "Message"
	case *ast.CallExpr:
		asked, ok := text.Fun.(*ast.SelectorExpr)
		return ok && asked.Sel.Name == "Error"
	}
	return false
}

// A step is what the planner has made of it: what executes it changes none of its fields, so that its traits are those of what is done.
func TestNothingButThePlannerChangesAStep(t *testing.T) {
	t.Parallel()
	planner := module + "agent/plan"
	for _, pkg := range productPackages(t) {
		if pkg.PkgPath == planner {
			continue
		}
		for _, file := range pkg.Syntax {
			ast.Inspect(file, func(n ast.Node) bool {
				assign, ok := n.(*ast.AssignStmt)
				if !ok {
					return true
				}
				for _, left := range assign.Lhs {
					selector, ok := left.(*ast.SelectorExpr)
					if !ok {
						continue
					}
					of := pkg.TypesInfo.Types[selector.X].Type
					if pointer, is := of.(*types.Pointer); is {
						of = pointer.Elem()
					}
					if of != nil && of.String() == planner+".Step" {
						t.Errorf("%s changes %s of a step", pkg.Fset.Position(assign.Pos()), selector.Sel.Name)
					}
				}
				return true
			})
		}
	}
}
