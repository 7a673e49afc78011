package repo_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/constant"
	"go/types"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/tools/go/packages"
)

// calls are, for each function of agent/, drain/, config/ and nvml, for each of their variables, for each field that holds functions, and for
// each parameter that is put into such a field: what it names, and so may call.
type calls map[string][]string

// Fields and parameters that hold functions have names that begin so.
const (
	asField     = "field "
	asParameter = "parameter "
)

// product are the packages that run on a node and are not the driver's, with their types, loaded once for all tests.
var product = sync.OnceValues(func() ([]*packages.Package, error) {
	loaded, err := packages.Load(&packages.Config{
		Mode: packages.NeedName | packages.NeedSyntax | packages.NeedTypes | packages.NeedTypesInfo | packages.NeedImports | packages.NeedExportFile,
		Dir:  root,
	}, "./agent/...", "./drain/...", "./config/...", "./nvml", "./cmd/gpuslice-agent/...")
	for _, pkg := range loaded {
		for _, wrong := range pkg.Errors {
			err = errors.Join(err, fmt.Errorf("loading %s: %w", pkg.PkgPath, wrong))
		}
	}
	return loaded, err
})

// productPackages are the loaded packages, but for the command.
func productPackages(t *testing.T) []*packages.Package {
	t.Helper()
	loaded, err := product()
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(slices.Clone(loaded), func(pkg *packages.Package) bool { return pkg.Name == "main" })
}

// callsOf finds the calls of the product, once for all tests.
func callsOf(t *testing.T) calls {
	t.Helper()
	loaded := productPackages(t)
	readCalls.Do(func() {
		callGraph = calls{}
		for _, pkg := range loaded {
			r := reader{calls: callGraph, info: pkg.TypesInfo}
			for _, file := range pkg.Syntax {
				for _, decl := range file.Decls {
					r.read(decl)
				}
			}
		}
	})
	return callGraph
}

var (
	readCalls sync.Once
	callGraph calls
)

// reader reads the declarations of one package.
type reader struct {
	calls      calls
	info       *types.Info
	parameters map[types.Object]string // of the function that is read
}

func (r reader) read(decl ast.Decl) {
	switch decl := decl.(type) {
	case *ast.FuncDecl:
		name := nameOf(r.info.Defs[decl.Name])
		r.parameters = map[types.Object]string{}
		at := 0
		for _, field := range decl.Type.Params.List {
			for _, parameter := range field.Names {
				r.parameters[r.info.Defs[parameter]] = parameterOf(name, at)
				at++
			}
			if len(field.Names) == 0 {
				at++
			}
		}
		r.add(name, name, decl)
	case *ast.GenDecl:
		for _, spec := range decl.Specs {
			value, ok := spec.(*ast.ValueSpec)
			if !ok {
				continue
			}
			for _, variable := range value.Names {
				if name := nameOf(r.info.Defs[variable]); name != "" {
					r.add(name, name, value)
				}
			}
		}
	}
}

func parameterOf(function string, at int) string {
	return asParameter + strconv.Itoa(at) + " of " + function
}

// add adds what the code below a node names, in the function or variable within.
func (r reader) add(from, within string, below ast.Node) {
	if r.calls[from] == nil {
		r.calls[from] = []string{} // it exists
	}
	harmless := map[*ast.Ident]bool{}
	ast.Inspect(below, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Ident:
			if name := nameOf(r.info.Uses[n]); name != "" && !harmless[n] {
				r.calls[from] = append(r.calls[from], name)
			}
		case *ast.CallExpr:
			r.readCall(within, n, harmless)
		case *ast.CompositeLit:
			r.readLiteral(within, n)
		case *ast.AssignStmt:
			for i, left := range n.Lhs {
				if element, ok := left.(*ast.IndexExpr); ok {
					left = element.X
				}
				if selector, ok := left.(*ast.SelectorExpr); ok {
					r.give(nameOf(r.info.Uses[selector.Sel]), within, n.Rhs[min(i, len(n.Rhs)-1)])
				}
			}
		}
		return true
	})
}

// readCall follows functions that a call hands over, and finds out whether a call that opens a file only reads it.
func (r reader) readCall(within string, call *ast.CallExpr, harmless map[*ast.Ident]bool) {
	var id *ast.Ident
	switch f := ast.Unparen(call.Fun).(type) {
	case *ast.Ident:
		id = f
	case *ast.SelectorExpr:
		id = f.Sel
	default:
		return
	}
	called, ok := r.info.Uses[id].(*types.Func)
	if !ok {
		return
	}
	name := nameOf(called)
	if at, opens := openers[name]; opens && at < len(call.Args) {
		flags := r.info.Types[call.Args[at]].Value
		if flags != nil && flags.Kind() == constant.Int {
			n, exact := constant.Int64Val(flags)
			harmless[id] = exact && int(n)&(os.O_WRONLY|os.O_RDWR|os.O_CREATE|os.O_TRUNC|os.O_APPEND) == 0
		}
	}
	signature := called.Signature()
	for i, arg := range call.Args {
		at := min(i, signature.Params().Len()-1)
		if at >= 0 && holdsFunctions(signature.Params().At(at).Type()) {
			r.give(parameterOf(name, at), within, arg)
		}
	}
}

// readLiteral follows functions that are put into the fields of a struct.
func (r reader) readLiteral(within string, literal *ast.CompositeLit) {
	of, isStruct := types.Unalias(r.info.Types[literal].Type).Underlying().(*types.Struct)
	if !isStruct {
		return
	}
	for i, element := range literal.Elts {
		if pair, keyed := element.(*ast.KeyValueExpr); keyed {
			if key, ok := pair.Key.(*ast.Ident); ok {
				r.give(nameOf(r.info.Uses[key]), within, pair.Value)
			}
			continue
		}
		r.give(nameOf(of.Field(i)), within, element)
	}
}

// give notes that a field or a parameter holds what the value names. Of a variable of the function within, that may be all that the function
// names.
func (r reader) give(to, within string, value ast.Expr) {
	if !strings.HasPrefix(to, asField) && !strings.HasPrefix(to, asParameter) {
		return
	}
	if r.calls[to] == nil {
		r.calls[to] = []string{} // it is given something
	}
	ast.Inspect(value, func(n ast.Node) bool {
		id, ok := n.(*ast.Ident)
		if !ok {
			return true
		}
		object := r.info.Uses[id]
		name := nameOf(object)
		if variable, is := object.(*types.Var); is && name == "" && holdsFunctions(variable.Type()) {
			name = within
			if parameter := r.parameters[object]; parameter != "" {
				name = parameter
			}
		}
		if name != "" {
			r.calls[to] = append(r.calls[to], name)
		}
		return true
	})
}

// holdsFunctions reports whether a value of the type is a function, or has some as its elements.
func holdsFunctions(of types.Type) bool {
	switch of := types.Unalias(of).Underlying().(type) {
	case *types.Signature:
		return true
	case *types.Slice:
		return holdsFunctions(of.Elem())
	case *types.Map:
		return holdsFunctions(of.Elem())
	case *types.Array:
		return holdsFunctions(of.Elem())
	case *types.Chan:
		return holdsFunctions(of.Elem())
	}
	return false
}

// nameOf is the full name of a function, of a variable of a package, or of a field that holds functions; "" for anything else. A package of this
// module stands there by its name alone, so that one may move.
func nameOf(object types.Object) string {
	switch object := object.(type) {
	case *types.Func:
		full := object.Origin().FullName()
		receiver := object.Signature().Recv()
		if receiver != nil && types.IsInterface(receiver.Type()) && strings.HasPrefix(full, "("+module) { // it has a name
			return strings.Replace(byName(full), "(", "("+ourInterface, 1)
		}
		return byName(full)
	case *types.Var:
		switch {
		case object.Pkg() == nil:
		case object.IsField():
			if holdsFunctions(object.Type()) && strings.HasPrefix(object.Pkg().Path(), module) {
				return asField + byName(object.Pkg().Path()+"."+object.Name())
			}
		case object.Parent() == object.Pkg().Scope():
			return byName(object.Pkg().Path() + "." + object.Name())
		}
	}
	return ""
}

var pathOfOurs = regexp.MustCompile(regexp.QuoteMeta(module) + `(?:[\w-]+/)*`)

// byName leaves the paths of this module's packages out.
func byName(name string) string { return pathOfOurs.ReplaceAllString(name, "") }

// pathToWrite is how a function comes to write; nil if it does not. It does not follow what the caller names besides.
func (c calls) pathToWrite(from string, besides ...string) []string {
	return c.path(from, c.writes, besides...)
}

// path is how a function comes to one that is so; nil if it does not. It does not follow what the caller names besides.
func (c calls) path(from string, is func(function string) bool, besides ...string) []string {
	parent := map[string]string{from: ""}
	for queue := []string{from}; len(queue) > 0; queue = queue[1:] {
		at := queue[0]
		if is(at) {
			var path []string
			for ; at != ""; at = parent[at] {
				path = append(path, at)
			}
			slices.Reverse(path)
			return path
		}
		for _, next := range c[at] {
			if _, seen := parent[next]; !seen && !slices.Contains(besides, next) {
				parent[next] = at
				queue = append(queue, next)
			}
		}
	}
	return nil
}

// callers are the functions that name one.
func (c calls) callers(of string) []string {
	var out []string
	for _, from := range slices.Sorted(maps.Keys(c)) {
		if slices.Contains(c[from], of) && !strings.HasPrefix(from, asField) && !strings.HasPrefix(from, asParameter) {
			out = append(out, from)
		}
	}
	return out
}
