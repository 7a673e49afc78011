// Package browser checks the pages that commands write, and shows them to a real browser.
package browser

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
)

// Harmless returns the text of the page. It fails the test if the page has an element or an attribute that can load, run or ask for anything.
func Harmless(t *testing.T, page string) string {
	t.Helper()
	elements := strings.Fields("html head meta title style body main section h1 h2 h3 p dl dt dd ol li figure figcaption div span b em table thead tbody tr th td pre code")
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

// Shows opens the pages as users do: they load nothing, and each bar is as wide as its memory slices at both widths. The page "hostile" may ask, in vain.
// Without Chromium it skips the test.
func Shows(t *testing.T, all map[string]string) {
	t.Helper()
	browser, err := exec.LookPath("chromium")
	if err != nil {
		t.Skipf("%v: Debian's package chromium has it", err)
	}
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
	_, said, measured := strings.Cut(string(dom), `<pre id="said">measured `)
	said, _, _ = strings.Cut(said, "</pre>")
	if lines := strings.Fields(strings.ReplaceAll(said, "bar\n", "")); !measured || strings.Count(said+"\n", "bar\n") != bars || len(lines) > 1 {
		t.Errorf("of %d bars the browser says:\n%s", bars, said)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(asked) > 0 {
		t.Errorf("the browser asked for %q", asked)
	}
}
