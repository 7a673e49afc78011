package binaries_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/test/binaries"
)

func TestTheProgressOfABuildIsThePackageThatIsCompiledLast(t *testing.T) {
	const list = "internal/cpu cpu\nruntime runtime\ngo.example/a-b/v2 b\ngo.example/tool main\n"
	for name, row := range map[string]struct{ list, said, shown, left string }{
		"nothing is said yet":                      {list, "", "looking at its sources", ""},
		"half of a line":                           {list, "runt", "looking at its sources", "runt"},
		"the first of four":                        {list, "internal/cpu\n", "package 1 of at most 4, internal/cpu", ""},
		"what is in the Go command's cache is not": {list, "go.example/a-b/v2\n", "package 1 of at most 4, go.example/a-b/v2", ""},
		"two compilers end out of order":           {list, "runtime\ninternal/cpu\n", "package 2 of at most 4, internal/cpu", ""},
		"a program":                                {list, "go.example/tool\n", "package 1 of at most 4, linking tool", ""},
		"a module":                                 {"", "go: downloading k8s.io/api v0.37.1\n", "downloading k8s.io/api v0.37.1", ""},
		"a list that no one asked for":             {"", "go.example/a-b/v2\n", "go.example/a-b/v2", ""},
		"a mistake": {
			list, "runtime\n# go.example/tool\n./main.go:3:15: undefined: x\n", "package 1 of at most 4, runtime",
			"# go.example/tool\n./main.go:3:15: undefined: x\n",
		},
		"a mistake without a list": {"", "go: no such tool\n", "looking at its sources", "go: no such tool\n"},
	} {
		t.Run(name, func(t *testing.T) {
			shown, left := binaries.Progress(row.list, row.said)
			if shown != row.shown || left != row.left {
				t.Errorf("shown %q, left %q; want %q, %q", shown, left, row.shown, row.left)
			}
		})
	}
}
