package show

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
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
			said, err := a.text(formatHTML, paper{width: 80, colour: true, now: time.Now()})
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
	said, err := (&statusRequest{format: formatHTML}).text([]nodeView{known, sick}, true, paper{now: screenTime})
	if err != nil {
		t.Fatal(err)
	}
	out["status-node"] = said
	return out
}

func TestPages(t *testing.T) {
	for name, page := range pages(t) {
		golden(t, "testdata/"+name+".html", page)
		harmless(t, page)
	}
}

// harmless returns the text of the page. It fails the test if the page has an element or an attribute that can load, run or ask for anything.
func harmless(t *testing.T, page string) string {
	t.Helper()
	elements := strings.Fields("html head meta title style body main section h1 h2 h3 p dl dt dd figure figcaption div span b em table thead tbody tr th td pre code")
	style := regexp.MustCompile(`^grid-(column:\d+/span \d+|template-columns:repeat\(\d+,minmax\(0,1fr\)\))$`)
	var text strings.Builder
	for d := xml.NewDecoder(strings.NewReader(page)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return text.String()
		}
		if err != nil {
			t.Fatalf("%v in %s", err, page)
		}
		switch token := token.(type) {
		case xml.StartElement:
			for _, a := range token.Attr {
				named := slices.Contains([]string{"class", "lang", "charset", "name", "content", "http-equiv", "data-name"}, a.Name.Local)
				if !named && (a.Name.Local != "style" || !style.MatchString(a.Value)) {
					t.Errorf("%s has %s=%q", token.Name.Local, a.Name.Local, a.Value)
				}
			}
			if !slices.Contains(elements, token.Name.Local) {
				t.Errorf("the page has an element %s", token.Name.Local)
			}
		case xml.CharData:
			text.Write(token)
		}
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
		p := paper{now: screenTime}
		for name, page := range map[string]string{
			"one": (&advised{Moves: []adviceFor{one}}).page(p), "many": many.page(p), "none": none.page(p), "unknown": explained.page(p), "known": known.page(p), "together": together.page(p),
			"status": statusPage([]nodeView{view, whole}, true, p),
		} {
			said := harmless(t, page)
			if visible := say(evil); !strings.Contains(page, string(visible)) || strings.Contains(page, evil) && string(visible) != evil {
				t.Errorf("%s shows %q otherwise:\n%s", name, evil, said)
			}
		}
	}
}

// A status that claims anything of its instances draws no bar that is wider than its GPU.
func TestBarsAreBounded(t *testing.T) {
	for _, slots := range []int{-1, 0, 8, 1 << 40} {
		drawn := string(bar(slots, []cell{{at: -5, size: 1 << 40}, {at: 1 << 62, size: 1 << 62}, {at: 0, size: 1, name: "first"}, {at: 0, size: 1}, {at: 1, size: -1}}))
		if n := strings.Count(drawn, "<div"); n > 3 || strings.Count(drawn, "first") != 1 {
			t.Errorf("%d slots: %s", slots, drawn)
		}
	}
	out := &advised{}
	for i := range 1000 {
		out.Moves = append(out.Moves, adviceFor{Move: judge.Move{Pod: fmt.Sprintf("team/p%d", i), Verdict: judge.WillFit}})
		out.Proposals, out.Waiting = append(out.Proposals, proposal{}), append(out.Waiting, waiting{})
	}
	page := out.page(paper{now: screenTime})
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
	if page := statusPage(views, true, paper{now: screenTime}); strings.Count(page, "<section") != mostRows || !strings.Contains(page, "and 800 more") {
		t.Errorf("%d sections", strings.Count(page, "<section"))
	}
}

// measures shows other pages at two widths, and writes what the browser makes of them.
const measures = `<!DOCTYPE html><html><body><pre id="said"></pre>%s
<script>
onload = () => {
  const said = [];
  for (const f of document.querySelectorAll("iframe")) {
    const d = f.contentDocument, w = f.contentWindow, root = d.documentElement;
    const wrong = what => said.push(f.src + " at " + f.width + ": " + what);
    if (root.scrollWidth > root.clientWidth) wrong("it is wider than the window");
    if (!f.src.endsWith("hostile") && w.performance.getEntriesByType("resource").length) wrong("it has loaded something");
    if (w.getComputedStyle(d.body).margin !== "0px") wrong("its style does not count");
    for (const bar of d.querySelectorAll(".bar")) {
      const slots = +bar.style.gridTemplateColumns.match(/repeat\((\d+)/)[1], all = bar.getBoundingClientRect(), gap = 3;
      let slices = 0;
      for (const c of bar.children) {
        const span = +c.style.gridColumn.match(/span (\d+)/)[1], r = c.getBoundingClientRect();
        slices += span;
        if (Math.abs(r.width - (span * (all.width + gap) / slots - gap)) > 1) wrong("width of " + c.outerHTML);
        if (c.textContent === "" || w.getComputedStyle(c).borderStyle === "none") wrong("only a colour shows " + c.outerHTML);
        if (r.top !== all.top || c.scrollWidth > c.clientWidth) wrong("does not fit: " + c.outerHTML);
      }
      if (slices !== slots || all.width < 200) wrong(slices + " of " + slots + " slices are drawn");
      said.push("bar");
    }
  }
  document.getElementById("said").textContent = "measured " + said.join("\n");
};
</script></body></html>`

// The pages are opened as users open them: nothing is asked for, and each bar is as wide as its memory slices at both widths.
func TestABrowserShowsThePages(t *testing.T) {
	browser, err := exec.LookPath("chromium")
	if err != nil {
		t.Skipf("%v: Debian's package chromium has it", err)
	}
	all := pages(t)
	all["hostile"] = page(`<img src="/loaded"/><script src="/loaded"></script><link rel="stylesheet" href="/loaded"/>`, paper{now: screenTime}) // as if it were not escaped
	var frames strings.Builder
	bars := 0
	for name, page := range all {
		bars += 2 * strings.Count(page, `class="bar"`)
		fmt.Fprintf(&frames, `<iframe src="/page/%[1]s" width="1280" height="900"></iframe><iframe src="/page/%[1]s" width="600" height="900"></iframe>`, name)
	}
	var mu sync.Mutex
	var asked []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		switch name, is := strings.CutPrefix(r.URL.Path, "/page/"); {
		case is && all[name] != "":
			_, _ = io.WriteString(w, all[name])
		case r.URL.Path == "/":
			_, _ = fmt.Fprintf(w, measures, &frames)
		case r.URL.Path != "/favicon.ico": // that of the page that measures
			mu.Lock()
			defer mu.Unlock()
			asked = append(asked, r.URL.Path)
		}
	}))
	defer server.Close()
	dom, err := exec.CommandContext(t.Context(), browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
		"--user-data-dir="+t.TempDir(), "--virtual-time-budget=10000", "--dump-dom", server.URL).Output()
	if err != nil {
		t.Fatalf("%v: %s", err, dom)
	}
	_, said, _ := strings.Cut(string(dom), `<pre id="said">measured `)
	said, _, _ = strings.Cut(said, "</pre>")
	if lines := strings.Fields(strings.ReplaceAll(said, "bar\n", "")); bars == 0 || strings.Count(said+"\n", "bar\n") != bars || len(lines) > 1 {
		t.Errorf("of %d bars the browser says:\n%s", bars, said)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(asked) > 0 {
		t.Errorf("the browser asked for %q", asked)
	}
}
