package repo_test

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write what config/keys.go says of each reason into agent/README.md")

const (
	agentsPage   = "agent/README.md"
	reasonsBegin = "<!-- reasons: written by go generate ./config, from the comments of config/keys.go -->\n"
	reasonsEnd   = "<!-- end of reasons -->\n"
)

// People search the agent's page for the word that their node shows.
func TestTheAgentsPageHasTheReasonsOfTheCode(t *testing.T) {
	want := reasonsOfTheCode(t)
	if n := strings.Count(want, "\n| `"); n < 40 {
		t.Fatalf("found %d reasons in config/keys.go", n)
	}
	before, rest, found := strings.Cut(read(t, agentsPage), reasonsBegin)
	got, after, ended := strings.Cut(rest, reasonsEnd)
	if !found || !ended {
		t.Fatalf("%s has no place for the reasons", agentsPage)
	}
	if *update {
		if err := os.WriteFile(root+"/"+agentsPage, []byte(before+reasonsBegin+want+reasonsEnd+after), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s says otherwise than config/keys.go (-code +page); go generate ./config writes it:\n%s", agentsPage, diff)
	}
}

// reasonsOfTheCode are the reasons as tables, one for each group of constants, with what the comments say.
func reasonsOfTheCode(t *testing.T) string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), root+"/config/keys.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	values := valuesOf(t, file)
	name := regexp.MustCompile(`\b(Annotation|Condition|Label|Reason|Taint)[A-Z]\w+`)
	said := func(comment *ast.CommentGroup) string {
		text := strings.Join(strings.Fields(comment.Text()), " ")
		return name.ReplaceAllStringFunc(text, func(constant string) string {
			if values[constant] == "" {
				t.Errorf("config/keys.go has no constant %s, of which a comment speaks: %s", constant, text)
			}
			return "`" + values[constant] + "`"
		})
	}
	var tables strings.Builder
	for _, group := range constants(file) {
		var rows strings.Builder
		for _, spec := range group.Specs {
			c, ok := spec.(*ast.ValueSpec)
			if !ok || !strings.HasPrefix(c.Names[0].Name, "Reason") {
				continue
			}
			reason := "`" + values[c.Names[0].Name] + "`"
			when, ok := strings.CutPrefix(said(c.Doc), reason+" is given")
			if !ok {
				t.Errorf("the comment of %s does not begin by \"%s is given\"", c.Names[0].Name, c.Names[0].Name)
			}
			fmt.Fprintf(&rows, "| %s | %s |\n", reason, strings.TrimSuffix(strings.TrimLeft(when, ", "), "."))
		}
		if rows.Len() > 0 {
			fmt.Fprintf(&tables, "\n%s\n\n| reason | is given |\n|---|---|\n%s", said(group.Doc), rows.String())
		}
	}
	return tables.String() + "\n"
}

// constants are the groups of constants of a file.
func constants(file *ast.File) []*ast.GenDecl {
	var groups []*ast.GenDecl
	for _, decl := range file.Decls {
		if group, ok := decl.(*ast.GenDecl); ok && group.Tok == token.CONST {
			groups = append(groups, group)
		}
	}
	return groups
}

// valuesOf are the values of a file's constants that are strings, by their names.
func valuesOf(t *testing.T, file *ast.File) map[string]string {
	t.Helper()
	values := map[string]string{}
	for _, group := range constants(file) {
		for _, spec := range group.Specs {
			c, ok := spec.(*ast.ValueSpec)
			if !ok || len(c.Values) != 1 {
				continue
			}
			if literal, ok := c.Values[0].(*ast.BasicLit); ok {
				value, err := strconv.Unquote(literal.Value)
				if err != nil {
					t.Fatal(err)
				}
				values[c.Names[0].Name] = value
			}
		}
	}
	return values
}
