package document_test

import (
	"slices"
	"testing"

	"github.com/gpuslice/gpuslice/config/document"
)

func TestAFieldIsFoundInTheText(t *testing.T) {
	const text = `# a comment
kind: Profiles
profiles:
  small.one: &small
    mig:
      - gpus: {all: true}
        instances: {1g.10gb: many, 1g: 2}
  other: *small
rules: [{for: 1h}, {for: 2s}]
`
	read := document.Read([]byte(text))
	for _, test := range []struct {
		steps []string
		field string
		want  document.Place
	}{
		{nil, "", document.Place{Line: 2, Column: 1}},
		{nil, "kind", document.Place{Line: 2, Column: 1}},
		{[]string{"profiles", "small.one", "mig", "0"}, "", document.Place{Line: 6, Column: 9}},
		{[]string{"profiles", "small.one", "mig", "0"}, "gpus.all", document.Place{Line: 6, Column: 16}},
		{[]string{"profiles", "small.one", "mig", "0"}, "instances.1g.10gb", document.Place{Line: 7, Column: 21}},
		{[]string{"profiles", "small.one", "mig", "0"}, "enabled", document.Place{Line: 6, Column: 9}},
		{[]string{"profiles", "other", "mig"}, "[0].gpus", document.Place{Line: 6, Column: 9}},
		{[]string{"profiles", "third"}, "mig", document.Place{Line: 3, Column: 1}},
		{nil, "rules[1].for", document.Place{Line: 9, Column: 21}},
		{nil, "rules[2].for", document.Place{Line: 9, Column: 1}},
	} {
		if got := read.Locate(test.steps, test.field); got != test.want {
			t.Errorf("%v, %q: %v, want %v", test.steps, test.field, got, test.want)
		}
	}
	for _, text := range []string{"", "{", "a: *b"} {
		if got := document.Read([]byte(text)).Locate(nil, "a"); got != (document.Place{}) {
			t.Errorf("%q: %v", text, got)
		}
	}
}

func TestTheLinesOfABlockAreFoundInTheText(t *testing.T) {
	const text = `kind: ConfigMap
data:
  config.yaml: |   # as people write it

    version: v1
    a:
      b: c
  folded: >
    a
    b
  quoted: "a\nb"
  deeper: |2
      x: y
  empty: |
`
	read := document.Read([]byte(text))
	for key, want := range map[string]struct {
		before, indent int
		ok             bool
	}{
		"config.yaml": {3, 4, true},
		"deeper":      {12, 4, true}, // two of the six belong to the value
		"folded":      {},
		"quoted":      {},
		"empty":       {},
		"missing":     {},
	} {
		before, indent, ok := read.Block("data", key)
		if before != want.before || indent != want.indent || ok != want.ok {
			t.Errorf("%s: %d lines before, indented by %d, %t; want %+v", key, before, indent, ok, want)
		}
	}
	if _, _, ok := document.Read([]byte("{")).Block("data", "a"); ok {
		t.Error("a text that cannot be read has a block")
	}
}

func TestAKeyIsFoundWithEachOfItsValues(t *testing.T) {
	text := document.Read([]byte("kind: A\nspec: {kind: B}\n# a comment\nkind: C\n"))
	if got, want := text.Values("kind"), []document.Value{{Text: "A", Line: 1}, {Text: "C", Line: 4}}; !slices.Equal(got, want) {
		t.Errorf("kind is %v, want %v", got, want)
	}
	for _, other := range []string{"[kind]", "a: [", ""} {
		if got := document.Read([]byte(other)).Values("kind"); got != nil {
			t.Errorf("%q has kind %v", other, got)
		}
	}
}
