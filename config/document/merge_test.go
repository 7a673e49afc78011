package document_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/config/migparted"
)

func TestAMergeKeyIsOverridden(t *testing.T) {
	for name, c := range map[string]struct{ text, want, refused string }{
		"by what stands behind it": {
			text: "a: &a {x: 1, y2: on}\nb: {<<: *a, x: 2}\n", want: `{"a":{"x":1,"y2":true},"b":{"x":2,"y2":true}}`,
		},
		"by the first of a list": {
			text: "a: &a {x: 1}\nb: &b {x: 2, y2: 2}\nc: {<<: [*a, *b], z: 3}\n", want: `{"a":{"x":1},"b":{"x":2,"y2":2},"c":{"x":1,"y2":2,"z":3}}`,
		},
		"by nothing behind other keys": {
			text: "a: &a {x: 1}\nb: {y2: 2, <<: *a}\n", want: `{"a":{"x":1},"b":{"x":1,"y2":2}}`,
		},
		"never by what stands before it": {
			text: "a: &a {x: 1}\nb:\n  x: 2\n  <<: *a\n", refused: `line 4: "<<" comes after "x", which it sets too: put "<<" first, to be overridden`,
		},
		"and nothing else twice": {
			text: "a: &a {x: 1}\nb: {<<: *a, y2: 2, y2: 3}\n", refused: `line 2: key "y2" is there twice`,
		},
		"by no second one": {
			text: "a: &a {x: 1}\nb: {<<: *a, <<: *a}\n", refused: `line 2: key "<<" is there twice`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := document.JSON([]byte(c.text))
			if string(got) != c.want || (err == nil) != (c.refused == "") || err != nil && err.Error() != c.refused {
				t.Errorf("got %s, %v; want %s%s", got, err, c.want, c.refused)
			}
		})
	}
}

func TestMIGConfigsMayBeMerged(t *testing.T) {
	configs, err := migparted.Parse([]byte(`version: v1
mig-configs:
  small: &small
  - &rule
    devices: all
    mig-enabled: true
    mig-devices: {1g.10gb: 7}
  large:
  - <<: *rule
    mig-devices: {3g.40gb: 2}
`))
	if err != nil || configs["small"][0].Devices["1g.10gb"] != 7 || configs["large"][0].Devices["3g.40gb"] != 2 || len(configs["large"][0].Devices) != 1 {
		t.Errorf("got %v, %v", configs, err)
	}
}
