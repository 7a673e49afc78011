package repo_test

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestEveryLinkOfAPageLeadsSomewhere(t *testing.T) {
	checked := 0
	for _, page := range pages(t) {
		for _, link := range linksOf(t, page) {
			checked++
			switch target, heading := link.target(); {
			case !exists(filepath.Join(root, target)):
				t.Errorf("%s links to %s, which is not there", page, link.text)
			case heading != "" && !slices.Contains(anchors(read(t, pageOf(target))), heading):
				t.Errorf("%s links to %s, and %s has no such heading", page, link.text, pageOf(target))
			}
		}
	}
	if checked < 50 {
		t.Errorf("only %d links were looked at", checked)
	}
}

// A page that no other page links to is found by no one.
func TestEveryPageIsFoundFromTheREADME(t *testing.T) {
	found := map[string]bool{"README.md": true}
	for unread := []string{"README.md"}; len(unread) > 0; unread = unread[1:] {
		for _, link := range linksOf(t, unread[0]) {
			target, _ := link.target()
			if page := pageOf(target); exists(filepath.Join(root, page)) && !found[page] {
				found[page] = true
				if filepath.Ext(page) == ".md" {
					unread = append(unread, page)
				}
			}
		}
	}
	for _, page := range pages(t) {
		if !found[page] {
			t.Errorf("no page links to %s: name it in the map of README.md or test/README.md", page)
		}
	}
}

// Pages name tests with their packages; without one, a test is of the package before it in the line, or of any if there is none.
func TestEachTestThatAPageNamesIsThere(t *testing.T) {
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)[A-Z]\w*)\(`)
	there := map[string]bool{}
	for _, file := range files(t) {
		if !strings.HasSuffix(file, "_test.go") {
			continue
		}
		path, err := filepath.Rel(root, file)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range declared.FindAllStringSubmatch(read(t, path), -1) {
			there[filepath.Dir(path)+": "+found[1]], there[": "+found[1]] = true, true
		}
	}
	named := regexp.MustCompile("`(?:([\\w./-]+): )?((?:Test|Fuzz|Benchmark)[A-Z]\\w*)`")
	checked := 0
	for _, page := range pages(t) {
		for _, line := range strings.Split(read(t, page), "\n") {
			folder := ""
			for _, found := range named.FindAllStringSubmatch(line, -1) {
				checked++
				folder = cmp.Or(found[1], folder)
				if !there[folder+": "+found[2]] {
					t.Errorf("%s names %s: %s, which is not there", page, folder, found[2])
				}
			}
		}
	}
	if checked < 200 {
		t.Errorf("only %d names were looked at", checked)
	}
}

// Manifests and programs name pages by where GitHub shows them: the runbooks of the alerts, for one.
func TestEveryLinkToGitHubLeadsSomewhere(t *testing.T) {
	shown := regexp.MustCompile(`https://github\.com/gpuslice/gpuslice/(?:blob|tree)/main/([\w./-]+)(?:#([\w-]+))?`)
	checked := 0
	for _, file := range files(t) {
		if !slices.Contains([]string{".yaml", ".yml", ".md", ".go", ".json", ".tpl", ".txt"}, filepath.Ext(file)) || strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range shown.FindAllStringSubmatch(string(text), -1) {
			checked++
			switch target, heading := strings.TrimRight(found[1], "."), found[2]; {
			case !exists(filepath.Join(root, target)):
				t.Errorf("%s links to %s, which is not there", file, found[0])
			case heading != "" && !slices.Contains(anchors(read(t, pageOf(target))), heading):
				t.Errorf("%s links to %s, and %s has no such heading", file, found[0], pageOf(target))
			}
		}
	}
	if checked < 10 {
		t.Errorf("only %d links were looked at", checked)
	}
}

func TestHeadingsHaveTheAnchorsThatGitHubGivesThem(t *testing.T) {
	page := "# One, two: three's `code_name`\n" +
		"```sh\n# a comment\n```\n" +
		"## [A page](page.md) – and more\n### Again\n## Again #\n    # indented code\n#no heading\n"
	want := []string{"one-two-threes-code_name", "a-page--and-more", "again", "again-1"}
	if got := anchors(page); !slices.Equal(got, want) {
		t.Errorf("the anchors are %q, want %q", got, want)
	}
}

// link is a link to a file of the repository, to a heading of a page, or to both.
type link struct{ page, text string }

var (
	linkPattern = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	fences      = regexp.MustCompile("(?ms)^[ \t]*```.*?^[ \t]*```[^\n]*$")
)

func linksOf(t *testing.T, page string) []link {
	t.Helper()
	var all []link
	for _, found := range linkPattern.FindAllStringSubmatch(fences.ReplaceAllString(read(t, page), ""), -1) {
		if !strings.Contains(found[1], "://") {
			all = append(all, link{page, found[1]})
		}
	}
	return all
}

// target is the path of what the link leads to, from the root, and the heading there, if it names one.
func (l link) target() (path, heading string) {
	path, heading, _ = strings.Cut(l.text, "#")
	if path == "" {
		return l.page, heading
	}
	return filepath.Join(filepath.Dir(l.page), path), heading
}

// pageOf is what a reader sees at a path: of a folder its README.
func pageOf(path string) string {
	if readme := filepath.Join(path, "README.md"); exists(filepath.Join(root, readme)) {
		return readme
	}
	return path
}

var (
	headingPattern = regexp.MustCompile(`(?m)^#{1,6} +(.*?)(?: +#+)?$`)
	linkText       = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	notInAnchor    = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchors are what the headings of a page are linked by, as GitHub makes them.
func anchors(text string) []string {
	var all []string
	for _, heading := range headingPattern.FindAllStringSubmatch(fences.ReplaceAllString(text, ""), -1) {
		shown := linkText.ReplaceAllString(heading[1], "$1")
		anchor := strings.ReplaceAll(notInAnchor.ReplaceAllString(strings.ToLower(shown), ""), " ", "-")
		unique := anchor
		for n := 1; slices.Contains(all, unique); n++ {
			unique = fmt.Sprintf("%s-%d", anchor, n)
		}
		all = append(all, unique)
	}
	return all
}

// pages are the Markdown files of the repository, as paths from the root.
func pages(t *testing.T) []string {
	t.Helper()
	all := map[string]bool{}
	for _, file := range files(t) {
		if filepath.Ext(file) != ".md" {
			continue
		}
		page, err := filepath.Rel(root, file)
		if err != nil {
			t.Fatal(err)
		}
		all[page] = true
	}
	return slices.Sorted(maps.Keys(all))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
