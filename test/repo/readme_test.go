package repo_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strconv"
	"strings"
	"testing"
)

// People search the agent's page for the word that their node shows.
func TestTheAgentsPageExplainsEveryReason(t *testing.T) {
	readme, err := os.ReadFile("../../agent/README.md")
	if err != nil {
		t.Fatal(err)
	}
	file, err := parser.ParseFile(token.NewFileSet(), "../../config/keys.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || !strings.HasPrefix(spec.Names[0].Name, "Reason") {
			return true
		}
		found++
		literal, ok := spec.Values[0].(*ast.BasicLit)
		if !ok {
			t.Fatalf("%s is no literal", spec.Names[0].Name)
		}
		reason, err := strconv.Unquote(literal.Value)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(readme), "`"+reason+"`") {
			t.Errorf("agent/README.md does not explain the reason %s", reason)
		}
		return true
	})
	if found < 10 {
		t.Fatalf("found %d reasons in config/keys.go", found)
	}
}
