// Package uses finds the tests of each package, and those that ask package long, by reading the code. It runs none.
package uses

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Tests are the tests below the folder that ask package long, themselves or by functions of their package: names by the
// package's folder, slash-separated, both sorted. An error is that of a file that cannot be read or parsed.
func Tests(root string) (map[string][]string, error) {
	return tests(root, func(of calls, name string) bool {
		return strings.HasPrefix(name, "Test") && of.asks(name, map[string]bool{})
	})
}

// All are all that "go test" runs below the folder, in the same form: tests, the seeds of fuzz tests, examples.
func All(root string) (map[string][]string, error) {
	return tests(root, func(_ calls, name string) bool {
		return name != "TestMain" && isRun.MatchString(name)
	})
}

// isRun matches the functions that "go test" runs.
var isRun = regexp.MustCompile(`^(Test|Fuzz|Example)($|[^a-z])`)

func tests(root string, wanted func(of calls, name string) bool) (map[string][]string, error) {
	packages, err := read(root)
	if err != nil {
		return nil, err
	}
	tests := map[string][]string{}
	for folder, of := range packages {
		for _, name := range slices.Sorted(maps.Keys(of)) {
			if wanted(of, name) {
				tests[folder] = append(tests[folder], name)
			}
		}
	}
	return tests, nil
}

// read reads the files with tests below the folder.
func read(root string) (map[string]calls, error) {
	packages := map[string]calls{}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && path != root && strings.HasPrefix(entry.Name(), "."):
			return filepath.SkipDir
		case entry.IsDir() || !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		folder, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		folder = filepath.ToSlash(folder)
		if packages[folder] == nil {
			packages[folder] = calls{}
		}
		return packages[folder].read(path)
	})
	return packages, err
}

// calls are the functions of one package, with what each calls: names of its own package, and asksLong.
type calls map[string]map[string]bool

// asksLong stands for a call of package long. No function has this name.
const asksLong = "package long"

func (c calls) read(path string) error {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		return err
	}
	for _, decl := range file.Decls {
		function, ok := decl.(*ast.FuncDecl)
		if !ok {
			continue
		}
		called := map[string]bool{}
		ast.Inspect(function, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.SelectorExpr:
				if of, ok := n.X.(*ast.Ident); ok && of.Name == "long" {
					called[asksLong] = true
				}
			case *ast.CallExpr:
				if name, ok := n.Fun.(*ast.Ident); ok {
					called[name.Name] = true
				}
			}
			return true
		})
		if function.Recv == nil { // methods are not followed: a name alone does not say whose it is
			c[function.Name.Name] = called
		}
	}
	return nil
}

func (c calls) asks(name string, seen map[string]bool) bool {
	if seen[name] {
		return false
	}
	seen[name] = true
	for called := range c[name] {
		if called == asksLong || c.asks(called, seen) {
			return true
		}
	}
	return false
}
