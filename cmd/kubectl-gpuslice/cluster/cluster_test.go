package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// A kubeconfig that names no cluster is named, with what is wrong with it, in no decoder's words.
func TestAKubeconfigThatNamesNoClusterIsNamed(t *testing.T) {
	const clusters = "apiVersion: v1\nkind: Config\nclusters: [{name: a, cluster: {server: 'https://127.0.0.1:1'}}]\n"
	for name, row := range map[string]struct {
		texts []string // of the files; "none" for one that is not there, "folder" for a folder
		want  string   // of the error, without the folder of the files
	}{
		"one that is not there":                {[]string{"none"}, "names config0, which is not there"},
		"none that is there":                   {[]string{"none", "none"}, "names config0, which is not there; config1, which is not there"},
		"nonsense":                             {[]string{"a: ["}, "names config0, which is no kubeconfig: reading YAML: line 1: did not find expected node content"},
		"text":                                 {[]string{"hello"}, "names config0, which is no kubeconfig: this is text, not a mapping of fields to values"},
		"an empty one":                         {[]string{""}, "names config0, which names no cluster"},
		"one of another kind":                  {[]string{"kind: Pod\n"}, "names config0, which names no cluster"},
		"a folder":                             {[]string{"folder"}, "names config0, which is a folder"},
		"several":                              {[]string{"none", "", "folder"}, "names config0, which is not there; config1, which names no cluster; config2, which is a folder"},
		"a context that is not there":          {[]string{clusters + "current-context: b\n"}, "context was not found for specified context: b"},
		"nonsense, next to one with a context": {[]string{clusters + "contexts: [{name: c, context: {cluster: a}}]\ncurrent-context: c\n", "a: ["}, "error loading config file"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir() + string(filepath.Separator)
			var files []string
			for i, text := range row.texts {
				file := dir + "config" + string(rune('0'+i))
				files = append(files, file)
				var err error
				switch text {
				case "none":
				case "folder":
					err = os.Mkdir(file, 0o700)
				default:
					err = os.WriteFile(file, []byte(text), 0o600)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("KUBECONFIG", strings.Join(files, string(filepath.ListSeparator)))
			of := map[string]string{"KUBECONFIG ": ""}
			if len(files) == 1 {
				of["--kubeconfig "] = files[0]
			}
			for by, flag := range of {
				var o Options
				o.bind(pflag.NewFlagSet("", pflag.ContinueOnError))
				o.loading.ExplicitPath = flag
				want := row.want
				if strings.HasPrefix(want, "names ") {
					want = by + want
				}
				if _, err := o.Client(); err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), dir, ""), want) {
					t.Errorf("error is %v, want %s", err, want)
				}
			}
		})
	}
}

func TestTheNamespaceIsThatOfKubectl(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config")
	const text = "apiVersion: v1\nkind: Config\nclusters: [{name: a, cluster: {server: 'https://127.0.0.1:1'}}]\n" +
		"contexts: [{name: c, context: {cluster: a, namespace: team}}, {name: d, context: {cluster: a}}]\ncurrent-context: c\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", file)
	for args, want := range map[string]string{"": "team false", "-n other": "other true", "--context d": "default false", "--context d -n other": "other true"} {
		var o Options
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		o.bind(flags)
		if err := flags.Parse(strings.Fields(args)); err != nil {
			t.Fatal(err)
		}
		name, asked, err := o.Namespace()
		if got := fmt.Sprint(name, " ", asked); got != want || err != nil {
			t.Errorf("%q: %s, %v; want %s", args, got, err, want)
		}
	}
}
