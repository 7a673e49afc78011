package repo_test

import (
	"flag"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write what config says of each reason and metric into agent/README.md, config/reasons and config/metrics")

const (
	agentsPage   = "agent/README.md"
	reasonTexts  = "config/reasons/texts.go"
	reasonsBegin = "<!-- reasons: written by go generate ./config, from the comments of config/keys.go -->\n"
	reasonsEnd   = "<!-- end of reasons -->\n"
	metricTexts  = "config/metrics/texts.go"
	metricsBegin = "<!-- metrics: written by go generate ./config, from the comments of config/metrics.go -->\n"
	metricsEnd   = "<!-- end of metrics -->\n"
)

// People search the agent's page for the word that their node shows, and ask kubectl gpuslice to explain it.
func TestTheAgentsPageHasTheReasonsOfTheCode(t *testing.T) {
	groups := reasonsOfTheCode(t)
	generated{reasonsBegin, reasonsEnd, reasonTexts, "config/keys.go"}.hold(t, tablesOf(groups), textsOf(t, groups), 40)
}

// Each metric is described once, for the page, for kubectl gpuslice and for Prometheus.
func TestTheAgentsPageHasTheMetricsOfTheCode(t *testing.T) {
	groups := metricsOfTheCode(t)
	generated{metricsBegin, metricsEnd, metricTexts, "config/metrics.go"}.hold(t, metricTable(groups), metricTextsOf(t, groups), 30)
}

// generated is what the comments of a file are written to: a place of the agent's page, and a Go file.
type generated struct{ begin, end, texts, from string }

// hold compares both with what they should be, or writes them. There are at least so many rows.
func (g generated) hold(t *testing.T, want, texts string, least int) {
	t.Helper()
	if n := strings.Count(want, "\n| `"); n < least {
		t.Fatalf("found %d in %s", n, g.from)
	}
	before, rest, found := strings.Cut(read(t, agentsPage), g.begin)
	got, after, ended := strings.Cut(rest, g.end)
	if !found || !ended {
		t.Fatalf("%s has no place for what %s says", agentsPage, g.from)
	}
	if *update {
		for file, text := range map[string]string{agentsPage: before + g.begin + want + g.end + after, g.texts: texts} {
			if err := os.WriteFile(root+"/"+file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s says otherwise than %s (-code +page); go generate ./config writes it:\n%s", agentsPage, g.from, diff)
	}
	if diff := cmp.Diff(texts, read(t, g.texts)); diff != "" {
		t.Errorf("%s says otherwise than %s (-comments +file); go generate ./config writes it:\n%s", g.texts, g.from, diff)
	}
}

// reasonGroup is a group of constants that are reasons.
type reasonGroup struct {
	title   string
	reasons []reasonText
}

// reasonText is what the comment of a reason says.
type reasonText struct{ name, given, do string }

// reasonsOfTheCode are the reasons, with what the comments say.
func reasonsOfTheCode(t *testing.T) []reasonGroup {
	t.Helper()
	file := parsed(t, "config/keys.go")
	values, said := speaks(t, file)
	var groups []reasonGroup
	for _, group := range constants(file) {
		g := reasonGroup{title: said(group.Doc.Text())}
		for _, spec := range group.Specs {
			c, ok := spec.(*ast.ValueSpec)
			if !ok || !strings.HasPrefix(c.Names[0].Name, "Reason") {
				continue
			}
			constant := c.Names[0].Name
			comment, do, told := strings.Cut(c.Doc.Text(), "\n\nYou can: ")
			when, ok := strings.CutPrefix(said(comment), "`"+values[constant]+"` is given")
			if !ok || !told {
				t.Errorf("the comment of %s does not begin by \"%s is given\", or does not end with a paragraph \"You can: …\" for whoever reads it on a node", constant, constant)
			}
			g.reasons = append(g.reasons, reasonText{values[constant], trimmed(when), trimmed(said(do))})
		}
		if len(g.reasons) > 0 {
			groups = append(groups, g)
		}
	}
	return groups
}

// parsed is a file of the code, with its comments.
func parsed(t *testing.T, name string) *ast.File {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), root+"/"+name, nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// speaks gives the values of the constants, by name, and what a comment says with them in place of the names.
func speaks(t *testing.T, files ...*ast.File) (values map[string]string, said func(comment string) string) {
	t.Helper()
	values = map[string]string{}
	for _, file := range files {
		maps.Copy(values, valuesOf(t, file))
	}
	name := regexp.MustCompile(`\b(Annotation|Condition|Label|Metric|Reason|Taint)[A-Z]\w+`)
	return values, func(comment string) string {
		text := strings.Join(strings.Fields(comment), " ")
		return name.ReplaceAllStringFunc(text, func(constant string) string {
			if values[constant] == "" {
				t.Errorf("there is no constant %s, of which a comment speaks: %s", constant, text)
			}
			return "`" + values[constant] + "`"
		})
	}
}

// metricGroup is a group of constants that are metrics.
type metricGroup struct {
	title   string
	metrics []metricText
}

// metricText is what the comment of a metric says.
type metricText struct {
	name, is string
	labels   []string
}

// metricsOfTheCode are the metrics, with what the comments say.
func metricsOfTheCode(t *testing.T) []metricGroup {
	t.Helper()
	file := parsed(t, "config/metrics.go")
	values, said := speaks(t, parsed(t, "config/keys.go"), file)
	var groups []metricGroup
	for _, group := range constants(file) {
		g := metricGroup{title: said(group.Doc.Text())}
		for _, spec := range group.Specs {
			c, ok := spec.(*ast.ValueSpec)
			if !ok {
				continue
			}
			constant := c.Names[0].Name
			comment, labels, _ := strings.Cut(c.Doc.Text(), "\n\nLabels: ")
			is, ok := strings.CutPrefix(said(comment), "`"+values[constant]+"` is ")
			if !ok {
				t.Errorf("the comment of %s does not begin by \"%s is\"", constant, constant)
			}
			g.metrics = append(g.metrics, metricText{values[constant], trimmed(is), strings.FieldsFunc(labels, func(r rune) bool { return strings.ContainsRune(", \n", r) })})
		}
		groups = append(groups, g)
	}
	return groups
}

// metricTable is the table of the page.
func metricTable(groups []metricGroup) string {
	var table strings.Builder
	table.WriteString("\n| metric | labels | what it is |\n|---|---|---|\n")
	for _, g := range groups {
		for _, m := range g.metrics {
			labels := ""
			if len(m.labels) > 0 {
				labels = "`" + strings.Join(m.labels, "`, `") + "` "
			}
			fmt.Fprintf(&table, "| `%s` | %s| %s |\n", m.name, labels, m.is)
		}
	}
	return table.String() + "\n"
}

// metricTextsOf is the same as a Go file, for Prometheus and for the command that explains them.
func metricTextsOf(t *testing.T, groups []metricGroup) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("// Code generated by go generate ./config from the comments of config/metrics.go. DO NOT EDIT.\n\n" +
		"package metrics\n\nvar groups = []Group{\n")
	for _, g := range groups {
		fmt.Fprintf(&b, "{%s, []Text{\n", unquoted(g.title))
		for _, m := range g.metrics {
			labels := "nil"
			if len(m.labels) > 0 {
				labels = fmt.Sprintf("%#v", m.labels)
			}
			fmt.Fprintf(&b, "{%q, %s, %s},\n", m.name, unquoted(m.is), labels)
		}
		b.WriteString("}},\n")
	}
	return formatted(t, b.String()+"}\n")
}

// unquoted is a text of a page as a string of Go, without marks.
func unquoted(text string) string { return strconv.Quote(strings.ReplaceAll(text, "`", "")) }

func formatted(t *testing.T, code string) string {
	t.Helper()
	text, err := format.Source([]byte(code))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func trimmed(text string) string { return strings.TrimSuffix(strings.TrimLeft(text, ", "), ".") }

// tablesOf are the tables of the page, one for each group.
func tablesOf(groups []reasonGroup) string {
	var tables strings.Builder
	for _, g := range groups {
		fmt.Fprintf(&tables, "\n%s\n\n| reason | is given | you can |\n|---|---|---|\n", g.title)
		for _, r := range g.reasons {
			fmt.Fprintf(&tables, "| `%s` | %s | %s |\n", r.name, r.given, r.do)
		}
	}
	return tables.String() + "\n"
}

// textsOf is the same as a Go file, for the command that explains them.
func textsOf(t *testing.T, groups []reasonGroup) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("// Code generated by go generate ./config from the comments of config/keys.go. DO NOT EDIT.\n\n" +
		"package reasons\n\nvar groups = []Group{\n")
	for _, g := range groups {
		fmt.Fprintf(&b, "{%s, []Text{\n", unquoted(g.title))
		for _, r := range g.reasons {
			fmt.Fprintf(&b, "{%q, %s, %s},\n", r.name, unquoted(r.given), unquoted(r.do))
		}
		b.WriteString("}},\n")
	}
	return formatted(t, b.String()+"}\n")
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
