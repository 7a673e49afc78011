package repo_test

import (
	"go/ast"
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
