package repo_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// links are those of Markdown to a file of the repository, to a heading, or to both.
var links = regexp.MustCompile(`\]\(([^)\s]+)\)`)

func TestEveryLinkOfAPageLeadsSomewhere(t *testing.T) {
	checked := 0
	for _, page := range files(t) {
		if filepath.Ext(page) != ".md" {
			continue
		}
		page, err := filepath.Rel(root, page)
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range links.FindAllStringSubmatch(read(t, page), -1) {
			if strings.Contains(link[1], "://") {
				continue
			}
			checked++
			path, heading, _ := strings.Cut(link[1], "#")
			target := page
			if path != "" {
				target = filepath.Join(filepath.Dir(page), path)
			}
			info, err := os.Stat(filepath.Join(root, target))
			switch {
			case err != nil:
				t.Errorf("%s links to %s, which is not there", page, link[1])
				continue
			case info.IsDir() && heading != "":
				target = filepath.Join(target, "README.md")
			}
			if heading != "" && !hasHeading(read(t, target), heading) {
				t.Errorf("%s links to %s, and %s has no such heading", page, link[1], target)
			}
		}
	}
	if checked < 20 {
		t.Errorf("only %d links were looked at", checked)
	}
}

var (
	headings    = regexp.MustCompile(`(?m)^#+ (.*)$`)
	notInAnchor = regexp.MustCompile("[^a-z0-9 _-]")
)

// hasHeading says whether a page has a heading of this anchor, as it is made of a heading where Markdown is shown.
func hasHeading(text, anchor string) bool {
	for _, heading := range headings.FindAllStringSubmatch(text, -1) {
		if strings.ReplaceAll(notInAnchor.ReplaceAllString(strings.ToLower(heading[1]), ""), " ", "-") == anchor {
			return true
		}
	}
	return false
}

// Who opens the project reads one page in five minutes.
func TestTheREADMEIsShort(t *testing.T) {
	const most = 220
	if lines := strings.Count(read(t, "README.md"), "\n"); lines >= most {
		t.Errorf("README.md has %d lines, of which %d are one too many: tell it in the README beside what it describes", lines, most)
	}
}
