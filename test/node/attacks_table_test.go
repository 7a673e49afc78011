package node_test

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The table of attacks is believed by people who do not run it.
func TestEachAttackOfTheTableHasTheTestThatItNames(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	quoted := regexp.MustCompile("`([^`]+)`")
	named := 0
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.TrimSuffix(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "| ") || len(cells) != 5 || strings.TrimSpace(cells[1]) == "attack" {
			continue
		}
		folder := "test/node"
		for _, name := range quoted.FindAllStringSubmatch(cells[4], -1) {
			if !strings.HasPrefix(name[1], "Test") {
				folder = name[1]
				continue
			}
			if named++; !testIn(t, folder, name[1]) {
				t.Errorf("there is no test %s in %s, by which people are told that this is mended: %s", name[1], folder, strings.TrimSpace(cells[1]))
			}
		}
	}
	if named < 40 {
		t.Errorf("the tables name %d tests", named)
	}
}

// testIn reports whether the folder of the repository has the test, or test/node, whose tests are named without one.
func testIn(t *testing.T, folder, name string) bool {
	t.Helper()
	for _, of := range []string{folder, "test/node"} {
		files, err := filepath.Glob(filepath.Join("..", "..", of, "*_test.go"))
		if err = errors.Join(err, notFound(files)); err != nil {
			t.Fatalf("%s: %v", of, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(filepath.Clean(file))
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(text), "\nfunc "+name+"(t *testing.T)") {
				return true
			}
		}
	}
	return false
}

func notFound(files []string) error {
	if len(files) == 0 {
		return os.ErrNotExist
	}
	return nil
}
