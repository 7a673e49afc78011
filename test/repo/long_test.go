package repo_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// People read in test/README.md what make test leaves to make test-all. The table must name each test that asks test/long,
// and no test may go by "go test -short" in another way.
func TestTheTableOfLongTestsIsTrue(t *testing.T) {
	asks, told := map[string]bool{}, toldOfLongTests(t) // "package: function"
	for _, path := range files(t) {
		if strings.HasSuffix(path, "_test.go") {
			askLong(t, path, asks)
		}
	}
	for name := range asks {
		if !told[name] {
			t.Errorf("%s is shorter in make test: add a row to \"What runs where\" of test/README.md", name)
		}
	}
	for name := range told {
		if !asks[name] {
			t.Errorf("test/README.md says that %s is shorter in make test, which is not so", name)
		}
	}
	if len(asks) < 5 {
		t.Errorf("only %d tests ask test/long", len(asks))
	}
}

// askLong adds the functions of a file that ask test/long.
func askLong(t *testing.T, path string, asks map[string]bool) {
	t.Helper()
	below, err := filepath.Rel(root, path)
	if err != nil {
		t.Fatal(err)
	}
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, decl := range file.Decls {
		function, ok := decl.(*ast.FuncDecl)
		if !ok {
			continue
		}
		name := filepath.ToSlash(filepath.Dir(below)) + ": " + function.Name.Name
		ast.Inspect(function, func(n ast.Node) bool {
			if selector, ok := n.(*ast.SelectorExpr); ok {
				switch of, _ := selector.X.(*ast.Ident); {
				case of == nil:
				case of.Name == "long":
					asks[name] = true
				case of.Name == "testing" && selector.Sel.Name == "Short":
					t.Errorf("%s calls testing.Short: ask test/long, so that the table in test/README.md stays true", name)
				}
			}
			return true
		})
	}
}

// toldOfLongTests are the functions that the table in test/README.md names.
func toldOfLongTests(t *testing.T) map[string]bool {
	t.Helper()
	readme, err := os.ReadFile(filepath.Join(root, "test", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(readme), "### What runs where")
	if !found {
		t.Fatal("test/README.md has no section \"What runs where\"")
	}
	section, _, _ = strings.Cut(section, "\n##")
	told := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+: [^`]+)`").FindAllStringSubmatch(section, -1) {
		told[row[1]] = true
	}
	return told
}
