package check

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// colour is a type of words.
type colour string

func (colour) Values() []string { return []string{"red", "green"} }

// parity is read from a text.
type parity struct{ odd bool }

func (p *parity) ReadText(text string) error {
	if p.odd = text == "odd"; !p.odd && text != "even" {
		return errors.New("must be odd or even")
	}
	return nil
}

type inner struct {
	Few   int `json:"few" within:"1,3" called:"a few,"`
	Other int `json:"other" within:"0,9"`
}

func (i *inner) Check(c *Mistakes, at string, in Written) {
	if i.Other > 0 && i.Other < i.Few && in.Has("other") {
		c.Refuse(at+".other", in.Text("other"), "is less than few")
	}
}

type shared struct {
	Wait time.Duration `json:"wait" within:"1s,1m"`
}

// everything has a field of each form that the decoder reads.
type everything struct {
	Name string `json:"name" missing:"is missing: write one"`
	shared
	Colour  colour         `json:"colour"`
	Colours []colour       `json:"colours" jsonschema:"enum=red" empty:"must have one"`
	Parity  *parity        `json:"parity"`
	Days    []time.Weekday `json:"days" alone:"a day"`
	File    string         `json:"file" form:"path"`
	Inner   inner          `json:"inner"`
	Inners  []inner        `json:"inners" jsonschema:"minItems=1" list:"must be a list of pairs"`
}

func TestAMappingIsLaidOverWhatIsThere(t *testing.T) {
	before := func() everything {
		return everything{File: "/a", Colour: "red", Colours: []colour{"red"}, shared: shared{time.Second}}
	}
	for name, test := range map[string]struct {
		text string
		want func(*everything)
		err  string
	}{
		"nothing but what is needed": {`{"name": "a"}`, func(*everything) {}, ""},
		"without values":             {`{"name": "a", "file": null, "colours": null, "inner": null, "wait": null}`, func(*everything) {}, ""},
		"nothing":                    {`{}`, nil, "name: is missing: write one"},
		"an empty text":              {`{"name": "a", "parity": "", "days": "Mon"}`, func(e *everything) { e.Days = []time.Weekday{time.Monday} }, ""},
		"an empty text in place of a default": {
			`{"name": "a", "file": "", "colour": "", "wait": ""}`, nil,
			"wait: \"\" must be a duration with its unit, like \"90s\" or \"1h30m\"\ncolour: \"\" must be red or green\nfile: \"\" must be the absolute path of a file, like \"/a\"",
		},
		"everything": {
			`{"name": "b", "wait": "2s", "colour": "green", "parity": "odd", "days": ["Tue", "wednesday"], "file": "/b", "inner": {"few": 2}, "inners": [{"few": "3"}, null]}`,
			func(e *everything) {
				e.Wait, e.Colour, e.Parity, e.Days, e.File = 2*time.Second, "green", &parity{odd: true}, []time.Weekday{time.Tuesday, time.Wednesday}, "/b"
				e.Name, e.Inner.Few, e.Inners = "b", 2, []inner{{Few: 3}, {}}
			}, "",
		},
		"values that are refused": {
			`{"name": "a", "wait": "1h", "colour": "blue", "colours": ["red", "green", "red"], "parity": "none", "days": ["Mon", "monday", "x"], "file": "b/", "inner": {"few": 4}}`, nil,
			"wait: \"1h\" must be from 1s to 1m\ncolour: \"blue\" must be red or green\ncolours[1]: \"green\" must be red\ncolours[2]: \"red\" is there twice\n" +
				"parity: \"none\" must be odd or even\ndays[1]: \"monday\" is there twice\ndays[2]: \"x\" must be a day of the week: Mon, Tue, Wed, Thu, Fri, Sat or Sun\n" +
				"file: \"b/\" must be the absolute path of a file, like \"/a\"\ninner.few: \"4\" must be a few, from 1 to 3",
		},
		"forms that are refused": {
			`{"name": "a", "colours": {}, "inner": true, "inners": 1}`, nil,
			"colours: must be a list, not a mapping\ninner: must be a mapping, not true or false\ninners: must be a list of pairs",
		},
		"lists without elements": {`{"name": "a", "colours": [], "inners": []}`, nil, "colours: [] must have one\ninners: must be a list of pairs"},
		"fields that there are not": {
			`{"Name": "a", "name": "a", "unnamed": 1, "inner": {"many": 1}}`, nil,
			"Name: is unknown here: use name, wait, colour, colours, parity, days, file, inner, inners\n" +
				"unnamed: is unknown here: use name, wait, colour, colours, parity, days, file, inner, inners\ninner.many: is unknown here: use few, other",
		},
		"what does not go together": {`{"name": "a", "inner": {"few": 3, "other": 2}}`, nil, `inner.other: "2" is less than few`},
		"no mapping":                {`[]`, nil, "file: must be a mapping, not a list"},
	} {
		t.Run(name, func(t *testing.T) {
			var c Mistakes
			got := before()
			c.Read("file", json.RawMessage(test.text), &got)
			text := ""
			if err := errors.Join(c...); err != nil {
				text = err.Error()
			}
			if diff := cmp.Diff(test.err, text); diff != "" {
				t.Errorf("mistakes (-want +got):\n%s", diff)
			}
			if test.want == nil {
				return
			}
			want := before()
			want.Name = "a"
			test.want(&want)
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(everything{}, parity{}, shared{})); diff != "" {
				t.Errorf("read (-want +got):\n%s", diff)
			}
		})
	}
}
