package repo_test

import (
	"go/ast"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Users look up whether the agent tries again by itself what has failed.
func TestTheAgentsPageHasTheReasonsForWhichAChangeIsUndoneForGood(t *testing.T) {
	t.Parallel()
	values, _ := speaks(t, parsed(t, "config/keys.go"))
	var want []string
	for _, constant := range failuresForGood(t) {
		want = append(want, values[constant])
	}
	slices.Sort(want)
	const begins = "A change that ends with one of these reasons is undone for good"
	_, rest, found := strings.Cut(read(t, agentsPage), begins)
	paragraph, _, ended := strings.Cut(rest, "\n\n")
	if !found || !ended {
		t.Fatalf("%s has no paragraph that begins with %q", agentsPage, begins)
	}
	var got []string
	for _, word := range regexp.MustCompile("`([A-Za-z]+)`").FindAllStringSubmatch(paragraph, -1) {
		got = append(got, word[1])
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s names other reasons than those of each api.Failure that is not for Later, sorted (-code +page):\n%s", agentsPage, diff)
	}
}

// failuresForGood are the constants of the reasons that an api.Failure has in the code, except those for Later.
func failuresForGood(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, folder := range agentFolders(t) {
		fileSet := productFiles(t, folder)
		for _, file := range fileSet {
			for _, decl := range file.Decls {
				f, ok := decl.(*ast.FuncDecl)
				if !ok {
					continue
				}
				ast.Inspect(f, func(n ast.Node) bool {
					literal, ok := n.(*ast.CompositeLit)
					if !ok || !isFailure(literal) {
						return true
					}
					fields := fieldsOf(literal)
					if fields["Later"] != nil || fields["Reason"] == nil {
						return true
					}
					reasons, known := reasonsOf(fields["Reason"], f, fileSet)
					if !known {
						t.Errorf("%s: %s makes an api.Failure, and this test does not find its reason", folder, f.Name.Name)
					}
					out = append(out, reasons...)
					return true
				})
			}
		}
	}
	slices.Sort(out)
	out = slices.Compact(out)
	if len(out) < 10 {
		t.Errorf("found %v: this test sees too little", out)
	}
	return out
}

// agentFolders are agent and the folders below it.
func agentFolders(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, path := range files(t) {
		within, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			t.Fatal(err)
		}
		if folder := filepath.ToSlash(within); filepath.Ext(path) == ".go" && (folder == "agent" || strings.HasPrefix(folder, "agent/")) {
			out = append(out, folder)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func isFailure(literal *ast.CompositeLit) bool {
	selector, ok := literal.Type.(*ast.SelectorExpr)
	if !ok || selector.Sel.Name != "Failure" {
		return false
	}
	of, ok := selector.X.(*ast.Ident)
	return ok && of.Name == "api"
}

func fieldsOf(literal *ast.CompositeLit) map[string]ast.Expr {
	out := map[string]ast.Expr{}
	for _, element := range literal.Elts {
		if pair, ok := element.(*ast.KeyValueExpr); ok {
			if key, ok := pair.Key.(*ast.Ident); ok {
				out[key.Name] = pair.Value
			}
		}
	}
	return out
}

// reasonsOf are the constants that an expression may be: one of config, a variable of the function, or what a function of the package returns. A
// conversion reads back what an agent has written before, and so is none.
func reasonsOf(expr ast.Expr, within *ast.FuncDecl, files []*ast.File) (reasons []string, known bool) {
	switch expr := expr.(type) {
	case *ast.SelectorExpr:
		return constantsIn(expr), len(constantsIn(expr)) == 1
	case *ast.CallExpr:
		return reasonsOfCall(expr, files)
	case *ast.Ident:
		ast.Inspect(within, func(n ast.Node) bool {
			assign, ok := n.(*ast.AssignStmt)
			if !ok {
				return true
			}
			for i, left := range assign.Lhs {
				if name, ok := left.(*ast.Ident); !ok || name.Name != expr.Name {
					continue
				}
				more, _ := reasonsOf(assign.Rhs[min(i, len(assign.Rhs)-1)], within, files)
				reasons = append(reasons, more...)
			}
			return true
		})
		return reasons, len(reasons) > 0
	}
	return nil, false
}

// reasonsOfCall are those that a function of the files names, which may be what it returns.
func reasonsOfCall(call *ast.CallExpr, files []*ast.File) (reasons []string, known bool) {
	called, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return nil, false
	}
	if of, ok := called.X.(*ast.Ident); ok && of.Name == "config" && called.Sel.Name == "Reason" {
		return nil, true
	}
	for _, file := range files {
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Name.Name == called.Sel.Name {
				reasons = append(reasons, constantsIn(f)...)
			}
		}
	}
	return reasons, len(reasons) > 0
}

// constantsIn are the reasons of config that the code below a node names.
func constantsIn(below ast.Node) []string {
	var out []string
	ast.Inspect(below, func(n ast.Node) bool {
		if selector, ok := n.(*ast.SelectorExpr); ok {
			if of, ok := selector.X.(*ast.Ident); ok && of.Name == "config" && strings.HasPrefix(selector.Sel.Name, "Reason") && selector.Sel.Name != "Reason" {
				out = append(out, selector.Sel.Name)
			}
		}
		return true
	})
	return out
}
