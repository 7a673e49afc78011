package document_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/config/migparted"
)

// most is what reading one file may allocate in all, freed or not. An agent has 256 MiB.
const most = 64 << 20

// parsers are all parsers of files of users or of other programs.
var parsers = map[string]func([]byte) error{
	"JSON":          func(text []byte) error { _, err := document.JSON(text); return err },
	"Into":          func(text []byte) error { var into any; return document.Into(text, &into) },
	"MIG configs":   func(text []byte) error { _, err := migparted.Parse(text); return err },
	"plugin config": func(text []byte) error { _, err := deviceplugin.Parse(text); return err },
	"rendering": func(text []byte) error {
		_, err := deviceplugin.Render(text, catalog.Sharing{Strategy: catalog.SharingNone}, "")
		return err
	},
	"profiles":    func(text []byte) error { _, err := catalog.ParseProfiles(text); return err },
	"settings":    func(text []byte) error { _, err := config.Parse(text); return err },
	"maintenance": func(text []byte) error { _, err := maintenance.Parse(text); return err },
}

// shapes are texts of up to 1 MiB that take much more memory than their length, or many mistakes to report.
func shapes() map[string]string {
	const size = 1 << 20
	fill := func(before, unit, after string) string {
		return before + strings.Repeat(unit, (size-len(before)-len(after))/len(unit)) + after
	}
	times := func(n int, before, unit, after string) string { return before + strings.Repeat(unit, n) + after }
	numbered := func(n int, before, format string) string {
		var b strings.Builder
		b.WriteString(before)
		for i := range n {
			fmt.Fprintf(&b, format, i)
		}
		return b.String()
	}
	const (
		migs     = "version: v1\nmig-configs:\n"
		profiles = "apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\nprofiles:\n"
		plugins  = "version: v1\nsharing:\n  timeSlicing:\n    resources:\n"
		pools    = "apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\npools:\n"
		settings = "apiVersion: gpuslice.io/v1alpha1\nkind: Settings\n"
	)
	laughs := "a0: &a0 [x, x]\n"
	for i := range 40 {
		laughs += fmt.Sprintf("a%d: &a%d [*a%d, *a%d]\n", i+1, i+1, i, i)
	}
	return map[string]string{
		"a long scalar, aliased 300 times":            "long: &long " + strings.Repeat("x", 900_000) + "\nall:\n" + strings.Repeat("- *long\n", 300),
		"a long name, aliased":                        migs + "  a: &a [{devices: all, mig-enabled: " + strings.Repeat("x", 500_000) + "}]\n" + numbered(300, "", "  b%d: *a\n"),
		"aliases of aliases":                          laughs,
		"an alias within itself":                      "a: &a [*a]\n",
		"a list of ones":                              fill("[", "1,", "]"),
		"lists in lists":                              fill("[", "[],", "]"),
		"mappings without values":                     fill("[", "{a},", "]"),
		"lists, deep":                                 fill("", "[", ""),
		"dashes, deep":                                fill("", "- ", ""),
		"question marks":                              fill("", "? ", ""),
		"empty lines":                                 fill("a:", "\n", "b"),
		"spaces":                                      fill("a:", " ", "b"),
		"anchors":                                     numbered(80_000, "", "- &a%d x\n"),
		"signs that take six bytes":                   fill("a: ", "<", ""),
		"signs that are escaped":                      fill(`a: "`, `\0`, `"`),
		"quotes":                                      fill("a: '", `"`, "'"),
		"one long scalar":                             fill("a: ", "x", ""),
		"a long literal":                              fill("a: |\n", " x\n", ""),
		"documents":                                   fill("", "---\n", ""),
		"comments":                                    fill("", "#\n", ""),
		"as many parts as are read":                   times(24_900, "[", "1,", "]"),
		"as many fields as are read":                  numbered(12_400, "", "k%d: 1\n"),
		"as many long numbers as are read":            times(24_900, "[", "99999999999999999999,", "]"),
		"a key that is there many times":              times(12_400, "", "k: 1\n", ""),
		"as many mistakes as are read, MIG configs":   times(3_550, migs+"  a:\n", "  - {devices: [-1], mig-enabled: x}\n", ""),
		"as many names as are read, MIG configs":      numbered(3_550, migs, "  '%d+': [{devices: all, mig-enabled: false}]\n"),
		"as many mistakes as are read, profiles":      numbered(4_950, profiles, "  '%d+': {mig: [x]}\n"),
		"one long mistake, profiles":                  fill(profiles+"  a: {sharing: ", "x", "}"),
		"as many mistakes as are read, plugin config": times(4_150, plugins, "    - {name: x, replicas: y}\n", ""),
		"as many mistakes as are read, maintenance":   times(3_550, pools, "- {name: X, windows: [x]}\n", ""),
		"as many mistakes as are read, settings":      times(6_200, settings+"drain:\n  rules:\n", "  - {action: x}\n", ""),
		"one long mistake, settings":                  fill(settings+"migStrategy: ", "x", ""),
	}
}

func TestNoFileTakesMuchMemory(t *testing.T) {
	if raced {
		t.Skip("with the race detector it is not the parsers' memory that is measured")
	}
	for shape, text := range shapes() {
		if _, err := document.JSON([]byte(text)); err != nil && strings.HasPrefix(shape, "as many") {
			t.Errorf("%s: %v", shape, err)
		}
		for parser, parse := range parsers {
			took, err := allocated(parse, text)
			if took > most {
				t.Errorf("%s: reading %s allocates %d MiB, want at most %d", parser, shape, took>>20, most>>20)
			}
			if err != nil && len(err.Error()) > 200_000 {
				t.Errorf("%s: the error about %s has %d bytes", parser, shape, len(err.Error()))
			}
		}
	}
}

// allocated is what a call allocates, in bytes.
func allocated(parse func([]byte) error, text string) (uint64, error) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err := parse([]byte(text))
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc, err
}

func BenchmarkLargestFile(b *testing.B) {
	for shape, text := range shapes() {
		for parser, parse := range parsers {
			b.Run(strings.ReplaceAll(parser+"/"+shape, " ", "-"), func(b *testing.B) {
				var largest uint64
				for b.Loop() {
					took, _ := allocated(parse, text) // a text that is refused is as good a subject
					largest = max(largest, took)
				}
				b.ReportMetric(float64(largest), "bytes")
			})
		}
	}
}

func TestWhatIsRefusedBeforeItIsDecoded(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"a text that is too long": {
			strings.Repeat("#", 1<<20+1), "the text is longer than 1048576 bytes: split it",
		},
		"aliases of a long scalar": {
			"a: &a " + strings.Repeat("x", 900_000) + "\nb: [*a, *a, *a]",
			`line 2: with its aliases expanded, the text takes more than 1572864 bytes when it is read, or has too many of the signs <, >, & and \`,
		},
		"too many parts": {
			"[" + strings.Repeat("1,", 40_000) + "]",
			"the text has more than 25000 keys, values and entries, or signs that may separate them: split it up",
		},
		"an alias within itself":         {"a: &a {b: *a}", "line 1: an alias contains itself"},
		"what is no YAML":                {"a: 1\nb: [", "line 2: did not find expected node content"},
		"what is no YAML, with an alias": {"a: &a 1\nc: *a\nb: [", "line 3: did not find expected node content"},
		"keys that are there twice":      {"a: 1\na: 2\nb: 1\nb: 2", `line 2: key "a" already set in map` + "\n" + `line 4: key "b" already set in map`},
		"many keys that are there twice": {
			strings.Repeat("a: 1\n", 1000), strings.Join(slices.Collect(func(yield func(string) bool) {
				for i := range 100 {
					yield(fmt.Sprintf(`line %d: key "a" already set in map`, i+2))
				}
				yield("and 899 more")
			}), "\n"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := document.JSON([]byte(c.text))
			if err == nil || err.Error() != c.want {
				t.Errorf("got %v, want %s", err, c.want)
			}
		})
	}
}

func TestAliasesAreRead(t *testing.T) {
	got, err := document.JSON([]byte("a: &a {x: 1}\nb: [*a, *a]\nc: 2 * 3\n"))
	if want := `{"a":{"x":1},"b":[{"x":1},{"x":1}],"c":"2 * 3"}`; err != nil || string(got) != want {
		t.Errorf("got %s, %v; want %s", got, err, want)
	}
}

// A number that JSON has not, or another one, is quoted by messages as it is written.
func TestNumbersThatNoMachineHoldsAreText(t *testing.T) {
	for text, want := range map[string]string{
		"a: 18446744073709551615": `{"a":18446744073709551615}`,
		"a: 18446744073709551616": `{"a":"18446744073709551616"}`,
		"a: -9223372036854775808": `{"a":-9223372036854775808}`,
		"a: -9223372036854775809": `{"a":"-9223372036854775809"}`,
		"{ä: 99999999999999999999, b: [1, 99999999999999999998]} # 99999999999999999999": `{"b":[1,"99999999999999999998"],"ä":"99999999999999999999"}`,
		"a: &x 99999999999999999999\r\nb: *x\r\nc: &y 99999999999999999997":              `{"a":"99999999999999999999","b":"99999999999999999999","c":"99999999999999999997"}`,
		"a: .inf\nb: -.Inf\nc: .NaN":                          `{"a":".inf","b":"-.Inf","c":".NaN"}`,
		"a: '99999999999999999999'\nb: x99999999999999999999": `{"a":"99999999999999999999","b":"x99999999999999999999"}`,
		"a: |\n  99999999999999999999\nb: 1.5":                `{"a":"99999999999999999999\n","b":1.5}`,
		"99999999999999999999: 1":                             `{"99999999999999999999":1}`,
	} {
		if got, err := document.JSON([]byte(text)); err != nil || string(got) != want {
			t.Errorf("%q: got %s, %v; want %s", text, got, err, want)
		}
	}
}

func TestAFileIsReadToItsBound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(strings.Repeat("#", 1<<20)), 0o600); err != nil {
		t.Fatal(err)
	}
	if text, err := document.ReadFile(path); err != nil || len(text) != 1<<20 {
		t.Errorf("read %d bytes, %v; want all", len(text), err)
	}
	if _, err := document.ReadFile("/dev/zero"); err == nil || !strings.Contains(err.Error(), "reading /dev/zero: the text is longer than") {
		t.Errorf("a file without an end: %v", err)
	}
	if _, err := document.ReadFile(path + "x"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
}

var numbers = regexp.MustCompile(`[0-9_]{19}|(?i)\.(inf|nan)`)

// FuzzJSON demands that what is taken is what the decoder makes of it, within the bound.
func FuzzJSON(f *testing.F) {
	f.Add("a: &a {x: 1}\nb: [*a, *a]")
	f.Add("a: &a\n  b: c\nd:\n  <<: *a\n  e: '*'")
	f.Fuzz(func(t *testing.T, text string) {
		got, err := document.JSON([]byte(text))
		if err != nil || numbers.MatchString(text) { // which are not as the decoder has them
			return
		}
		if len(got) > 4<<20 {
			t.Errorf("%d bytes", len(got))
		}
		want, err := yaml.YAMLToJSON([]byte(text))
		if diff := cmp.Diff(string(want), string(got)); err != nil || diff != "" {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
	})
}

// JSON has no such number. The parser of the field reports where it is: an error of Decode could not.
func TestANumberThatIsNoneIsDecodedAsText(t *testing.T) {
	for _, number := range []string{".nan", "-.inf", "18446744073709551616"} {
		for name, decode := range map[string]func([]byte, any) error{"a file": document.Into, "a manifest": document.ManifestInto} {
			var into struct{ A []any }
			if err := decode([]byte("a: [1, "+number+"]\n"), &into); err != nil || len(into.A) != 2 || into.A[1] != number {
				t.Errorf("%s with %s: %v, %v", name, number, into.A, err)
			}
		}
	}
}

func orNil(want string) string {
	if want == "" {
		return "<nil>"
	}
	return want
}

// A message names a key as the file does, and no label of another name is set.
func TestKeysThatAreReadAsOthersAreRefused(t *testing.T) {
	for text, want := range map[string]string{
		"labels: {n: 1}":                         "line 1: the key n is read as false: put it in quotes",
		"a: 1\nlabels:\n  ON : x\n  y: z":        "line 3: the key ON is read as true: put it in quotes\nline 4: the key y is read as true: put it in quotes",
		"- 010: a\n- {0x1f: b}":                  "line 1: the key 010 is read as 8: put it in quotes\nline 2: the key 0x1f is read as 31: put it in quotes",
		"1" + strings.Repeat("0", 400) + "e9: a": "",
		"1.50: a":                                "line 1: the key 1.50 is read as 1.5: put it in quotes",
		"labels: {'n': 1, \"on\": 2, north: 3, 1: 4, 10: 5, 1g.10gb: 6, true: 7, on-call: 8}\nn-1: 9": "",
		"text: |\n  n: 1\n# y: 2\nurl: http://y:80":                                                   "",
		strings.Repeat("n: 1\n", 3):                                                                   "line 1: the key n is read as false: put it in quotes\nline 2: the key n is read as false: put it in quotes\nline 3: the key n is read as false: put it in quotes",
	} {
		_, err := document.JSON([]byte(text))
		if got := fmt.Sprint(err); got != orNil(want) {
			t.Errorf("%.40q: got %s, want %s", text, got, want)
		}
	}
}
