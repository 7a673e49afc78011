package repo_test

import (
	"go/ast"
	"go/types"
	"testing"
)

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
