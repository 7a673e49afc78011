package output

import (
	"cmp"
	_ "embed"
	"html"
	"strconv"
	"strings"

	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/gpuslice/gpuslice/config/sanitize"
)

//go:embed page.css
var pageStyle Markup

// Markup is HTML that is safe to show. The compiler lets no variable become markup except by Say: users of the cluster write names and messages.
// html/template would do that too. It links every method of every type into the program, a quarter of its size.
type Markup string

// Say returns the text as markup. It escapes what is not printable, too.
func Say(what string) Markup { return Markup(html.EscapeString(sanitize.Text(what))) }

// Element returns an element on a line of its own. Its class may be empty.
func Element(name, class Markup, inside ...Markup) Markup {
	return Inline(name, class, inside...) + "\n"
}

// Inline returns an element within a line. Its class may be empty.
func Inline(name, class Markup, inside ...Markup) Markup {
	return Opening(name, class, "") + joined(inside) + "</" + name + ">"
}

// Opening is the start of an element. Its class and its other attribute may be empty.
func Opening(name, class, attribute Markup) Markup {
	out := "<" + name
	if class != "" {
		out += ` class="` + class + `"`
	}
	if attribute != "" {
		out += " " + attribute
	}
	return out + ">"
}

// number is a number in a style.
func number(n int) Markup { return Markup(strconv.Itoa(n)) }

func joined(all []Markup) Markup {
	var b strings.Builder
	for _, m := range all {
		b.WriteString(string(m))
	}
	return Markup(b.String())
}

// Page returns the whole page. Its policy lets a browser load nothing and run nothing, should markup of others ever get into it.
func Page(title Markup, p Paper, parts ...Markup) string {
	head := Markup(`<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"/>
<meta name="referrer" content="no-referrer"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
`)
	head += Element("title", "", title) + Element("style", "", "\n", pageStyle)
	body := Element("h1", "", title) + Element("p", "time", "kubectl gpuslice, ", Say(p.Now.UTC().Format("2006-01-02 15:04:05Z"))) + joined(parts)
	return string("<!DOCTYPE html>\n<html lang=\"en\">\n" + Element("head", "", "\n", head) + Element("body", "", "\n", Element("main", "", "\n", body)) + "</html>\n")
}

// Noted are notes below all else.
func Noted(notes []string) (said Markup) {
	for _, n := range notes {
		said += Element("p", "", "note: ", Say(n))
	}
	return said
}

// Pasted is a command that the user pastes.
func Pasted(command string) Markup {
	if command == "" {
		return ""
	}
	return Element("pre", "", Inline("code", "", Say(command)))
}

var shades = map[text.Color]Markup{text.FgGreen: "good", text.FgYellow: "care", text.FgRed: "bad"}

// Shade is the class of a colour of the terminal.
func Shade(c text.Color) Markup { return cmp.Or(shades[c], "dim") }
