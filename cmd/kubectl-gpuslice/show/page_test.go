package show

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/test/browser"
)

// pages are one of each kind.
func pages(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	inPool(t, func(w adviser) {
		w.screen()
		few := w.read(&advice{})
		w.more()
		for name, a := range map[string]answer{
			"advise": few, "advise-many": w.read(&advice{whatIf: map[string]int{"3g.40gb": 2}, pending: true}),
			"advise-explain": w.ofNodes(&advice{explain: true, names: []string{"gpu-2", "gpu-1"}}), "advise-defrag": w.ofNodes(&advice{defrag: true}),
		} {
			said, err := a.text(output.HTML, output.Paper{Width: 80, Colour: true, Now: time.Now()})
			if err != nil {
				t.Fatal(err)
			}
			out[name] = said
		}
	})
	nodes := screenNodes()
	known, sick := viewOf(&nodes[1], screenTime), viewOf(&nodes[3], screenTime)
	known.addDiagnosis(diagnosed())
	sick.Pods.Why = "the agent has not answered within 5s"
	said, err := (&statusRequest{format: output.HTML}).text([]nodeView{known, sick}, true, output.Paper{Now: screenTime})
	if err != nil {
		t.Fatal(err)
	}
	out["status-node"] = said
	return out
}

func TestPages(t *testing.T) {
	for name, page := range pages(t) {
		golden(t, "testdata/"+name+".html", page)
		browser.Harmless(t, page)
	}
}

// filled sets each text to the same, and makes lists of one.
func filled(v reflect.Value, text string) {
	switch kind := v.Kind(); {
	case kind == reflect.String:
		v.SetString(text)
	case kind == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		filled(v.Elem(), text)
	case kind == reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		filled(v.Index(0), text)
	case kind == reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		filled(key, text)
		filled(value, text)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case kind == reflect.Struct:
		for i := range v.NumField() {
			if f := v.Field(i); f.CanSet() && v.Type() != reflect.TypeFor[time.Time]() {
				filled(f, text)
			}
		}
	case kind == reflect.Int:
		v.SetInt(1)
	case kind == reflect.Bool:
		v.SetBool(true)
	}
}

// Whoever can write an object of the cluster writes text into the page, and nothing else.
func TestNoMarkupOfOthersReachesAPage(t *testing.T) {
	for _, evil := range []string{
		`<script>alert(1)</script>`, `"><img src="http://evil.invalid/x" onerror="x()">`, `' style='x`, `</style><link href="http://evil.invalid">`, `&lt;b&gt;&#60;b&#62;`,
		"]]><!--", "\x00\x1b[2J\u202e</title>", "\xff\xc0\xaf<b>",
	} {
		var one adviceFor
		filled(reflect.ValueOf(&one).Elem(), evil)
		one.Cuts[0].Slices = 8
		var many advised
		filled(reflect.ValueOf(&many).Elem(), evil)
		for range mostBlocks {
			many.Moves = append(many.Moves, one)
		}
		many.Proposals[0].Cuts = one.Cuts
		none := advised{none: evil}
		var explained fragmented
		filled(reflect.ValueOf(&explained).Elem(), evil)
		known := fragmented{Nodes: slices.Clone(explained.Nodes)}
		known.Nodes[0].Unknown = ""
		known.Nodes[0].Profiles[0].Idle = 0
		together := fragmented{Nodes: known.Nodes, pool: true}
		var view nodeView
		filled(reflect.ValueOf(&view).Elem(), evil)
		view.Pods.Known, view.GPUs[0].Missing, view.GPUs[0].Lost = false, false, false
		view.GPUs[0].Slices, view.GPUs[0].Instances[0].At = 8, 0
		whole := view
		whole.GPUs = []gpuView{{UUID: evil, Pods: []string{evil}}, {UUID: evil, MIG: true, Slices: 8, Geometry: evil}}
		p := output.Paper{Now: screenTime}
		for name, page := range map[string]string{
			"one": (&advised{Moves: []adviceFor{one}}).page(p), "many": many.page(p), "none": none.page(p), "unknown": explained.page(p), "known": known.page(p), "together": together.page(p),
			"status": statusPage([]nodeView{view, whole}, true, p),
		} {
			said := browser.Harmless(t, page)
			if visible := output.Say(evil); !strings.Contains(page, string(visible)) || strings.Contains(page, evil) && string(visible) != evil {
				t.Errorf("%s shows %q otherwise:\n%s", name, evil, said)
			}
		}
	}
}

// What others write makes no page long.
func TestPagesAreBounded(t *testing.T) {
	out := &advised{}
	for i := range 1000 {
		out.Moves = append(out.Moves, adviceFor{Move: judge.Move{Pod: fmt.Sprintf("team/p%d", i), Verdict: judge.WillFit}})
		out.Proposals, out.Waiting = append(out.Proposals, proposal{}), append(out.Waiting, waiting{})
	}
	page := out.page(output.Paper{Now: screenTime})
	if n := strings.Count(page, "\n"); n > mostRows+3*mostSums+200 || strings.Count(page, "more: -o json has them all") != 3 {
		t.Errorf("%d lines:\n%s", n, page)
	}
	var views []nodeView
	for range 1000 {
		v := nodeView{Node: "gpu", Agent: true}
		for i := range 8 {
			v.GPUs = append(v.GPUs, viewOfGPU(api.StatusGPU{Index: i, MIG: true, Slices: 8}))
		}
		views = append(views, v)
	}
	if page := statusPage(views, true, output.Paper{Now: screenTime}); strings.Count(page, "<section") != mostRows || !strings.Contains(page, "and 800 more") {
		t.Errorf("%d sections", strings.Count(page, "<section"))
	}
}

func TestABrowserShowsThePages(t *testing.T) {
	all := pages(t)
	all["hostile"] = output.Page(`<img src="/loaded"/><script src="/loaded"></script><link rel="stylesheet" href="/loaded"/>`, output.Paper{Now: screenTime}) // as if it were not escaped
	browser.Shows(t, all)
}
