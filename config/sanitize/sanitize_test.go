package sanitize_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/gpuslice/gpuslice/config/sanitize"
)

func TestWhatIsNotPrintableIsEscaped(t *testing.T) {
	for text, want := range map[string]string{
		"1g.10gb × 7, größer":   "1g.10gb × 7, größer",
		"a\x1b[2J\x1b[1;1Hb":    `a\x1b[2J\x1b[1;1Hb`,
		"row 1\nrow 2\r\tx\x00": `row 1\nrow 2\r\tx\x00`,
		"txt\u202egpj.exe":      `txt\u202egpj.exe`, // turns the reading direction round
		"a\u009b31mred\u200b":   `a\u009b31mred\u200b`,
		"half \xff\xc3 rune":    `half \xff\xc3 rune`,
		"tag \U000e0041":        `tag \U000e0041`,
	} {
		if got := sanitize.Text(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
	if got := sanitize.Lines("a\n\tb\x1bc\u2028"); got != "a\n\tb\\x1bc\\u2028" {
		t.Errorf("got %q", got)
	}
}

func TestCutIsByCharacters(t *testing.T) {
	for _, c := range []struct {
		text string
		most int
		want string
	}{
		{"abc", 3, "abc"},
		{"abcd", 3, "ab…"},
		{"größe", 5, "größe"},
		{"größer", 5, "größ…"},
		{"\x1b\x1b", 5, `\x1b…`},
		{strings.Repeat("€", 1000), 4, "€€€…"},
	} {
		if got := sanitize.Cut(c.text, c.most); got != c.want {
			t.Errorf("%q to %d: got %q, want %q", c.text, c.most, got, c.want)
		}
	}
}

func TestAMessageSaysTheFirstAndHowManyMore(t *testing.T) {
	for _, c := range []struct {
		text string
		most int
		want string
	}{
		{"one", 20, "one"},
		{"one\ntwo\n", 20, "one; two"},
		{"one\n\ntwo", 40, "one; two"},
		{"one\ntwo\nthree\nfour", 25, "one; two; and 2 more"},
		{strings.Repeat("x", 100) + "\ntwo", 20, "xxxxxxx…; and 1 more"},
	} {
		if got := sanitize.Message(c.text, c.most); got != c.want {
			t.Errorf("%q to %d: got %q, want %q", c.text, c.most, got, c.want)
		}
	}
	huge := strings.Repeat("profile \"p\": mig entry 1, devices: is no profile\n", 14000)
	got := sanitize.Message(huge, sanitize.Longest)
	if !strings.HasPrefix(got, `profile "p": mig entry 1`) || !strings.HasSuffix(got, " more") {
		t.Errorf("got %q", got)
	}
}

func FuzzMessage(f *testing.F) {
	f.Add("one\ntwo\nthree", 30)
	f.Add("a\x1b[2J\n\u202e\xff", 20)
	f.Fuzz(func(t *testing.T, text string, most int) {
		if most < 20 || most > 2000 { // less has no room for the count
			return
		}
		for _, got := range []string{sanitize.Message(text, most), sanitize.Cut(text, most)} {
			if n := utf8.RuneCountInString(got); n > most {
				t.Errorf("%q has %d characters, more than %d", got, n, most)
			}
			if !utf8.ValidString(got) || strings.ContainsFunc(got, func(r rune) bool { return !sanitize.Printable(r) }) {
				t.Errorf("%q is not printable", got)
			}
			if sanitize.Text(got) != got {
				t.Errorf("%q changes when it is sanitized again", got)
			}
		}
	})
}
