package uses_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/test/long/uses"
)

func TestTestsAreFoundThatAskByThemselvesOrByAFunctionOfTheirPackage(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{
		"a/one_test.go": `package a
func TestAsks(t *testing.T) { t.Run("x", func(t *testing.T) { long.Only(t, "why") }) }
func TestAsksByAnother(t *testing.T) { first() }
func TestDoesNot(t *testing.T) { other(); TestDoesNot(t) }`,
		"a/two_test.go":    "package a\nfunc first() { second() }\nfunc second() int { return long.Size(2, 1) }\nfunc other() {}",
		"b/one_test.go":    "package b\nfunc TestOfThatName(t *testing.T) { second() }",
		"c/no.go":          "package c\nfunc TestInNoTestFile() { long.Full() }",
		".git/one_test.go": "package a\nfunc TestOfGit(t *testing.T) { long.Full() }",
	} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := uses.Tests(root)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string][]string{"a": {"TestAsks", "TestAsksByAnother"}}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestAllThatGoTestRunsIsFound(t *testing.T) {
	root := t.TempDir()
	text := `package a
func Test(t *testing.T) {}
func TestMain(m *testing.M) {}
func Test1(t *testing.T) {}
func Tested() {}
func FuzzB(f *testing.F) {}
func Example() {}
func ExampleC() {}
func BenchmarkD(b *testing.B) {}
func (x) TestOfAType(t *testing.T) {}`
	if err := os.WriteFile(filepath.Join(root, "x_test.go"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := uses.All(root)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string][]string{".": {"Example", "ExampleC", "FuzzB", "Test", "Test1"}}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestAFileThatIsNoGoIsAnError(t *testing.T) {
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "x_test.go"), []byte("no Go"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := uses.Tests(root); err == nil {
		t.Errorf("got %v and no error", got)
	}
}
