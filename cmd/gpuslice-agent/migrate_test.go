package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

var updateMigrate = flag.Bool("update-migrate", false, "write what migrate says into testdata/migrate")

// migrates runs the command.
func migrates(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	c := command()
	c.SetOut(&out)
	c.SetErr(&out)
	c.SetArgs(append([]string{"migrate"}, args...))
	err := c.ExecuteContext(t.Context())
	return out.String(), err
}

func TestMigrateSaysWhatBecomesOfAnInstallation(t *testing.T) {
	const file, golden = "testdata/migrate/cluster.yaml", "testdata/migrate/cluster.txt"
	got, err := migrates(t, "--dry-run", "-f", file)
	if err != nil {
		t.Fatal(err)
	}
	if *updateMigrate {
		if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Migrate judges the objects of the API server as it does the same objects in a file.
func TestMigrateReadsTheClusterAsItReadsFiles(t *testing.T) {
	text, err := os.ReadFile("testdata/migrate/cluster.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var list struct{ Items []map[string]any }
	if err := yaml.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	of := map[string][]any{}
	configMaps := map[string]any{}
	for _, item := range list.Items {
		kind, _ := item["kind"].(string)
		of[kind] = append(of[kind], item)
		if meta, ok := item["metadata"].(map[string]any); ok && kind == "ConfigMap" {
			configMaps["/api/v1/namespaces/"+meta["namespace"].(string)+"/configmaps/"+meta["name"].(string)] = item //nolint:errcheck // of testdata
		}
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer, found := configMaps[r.URL.Path]
		switch r.URL.Path {
		case "/apis/nvidia.com/v1/clusterpolicies":
			answer, found = map[string]any{"items": of["ClusterPolicy"]}, true
		case "/api/v1/nodes":
			answer, found = map[string]any{"kind": "NodeList", "apiVersion": "v1", "items": of["Node"]}, true
		}
		if !found {
			w.WriteHeader(http.StatusNotFound)
			answer = map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
		}
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	defer server.Close()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	config := `{"apiVersion":"v1","kind":"Config","clusters":[{"name":"c","cluster":{"server":"` + server.URL + `"}}],` +
		`"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],"users":[{"name":"u","user":{}}],"current-context":"c"}`
	if err := os.WriteFile(kubeconfig, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := migrates(t, "--dry-run", "--kubeconfig", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/migrate/cluster.txt")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.ReplaceAll(string(want), "testdata/migrate/cluster.yaml, ", ""), got); diff != "" {
		t.Errorf("(-from the file +from the cluster):\n%s", diff)
	}
}

func TestMigrateOfAClusterThatHasNothingOfTheKind(t *testing.T) {
	file := filepath.Join(t.TempDir(), "node.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: v1\nkind: Node\nmetadata: {name: cpu-1}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := migrates(t, "--dry-run", "-f", file); err != nil || !strings.HasPrefix(got, "Nothing of mig-manager's was found") {
		t.Errorf("error %v\n%s", err, got)
	}
}

func TestMigrateSaysWhatIsWrongWithItsInput(t *testing.T) {
	dir := t.TempDir()
	for name, test := range map[string]struct {
		text, want string
		args       []string
	}{
		"without --dry-run":                {want: "say --dry-run"},
		"units that are no list":           {text: "version: v1\nsystemd-services: dcgm\n", args: []string{"--dry-run"}, want: "systemd-services: must be a list of names of units"},
		"a policy whose strategy is a map": {text: "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nspec: {mig: {strategy: {a: b}}}\n", args: []string{"--dry-run"}, want: "reading a ClusterPolicy"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(dir, "file.yaml")
			if err := os.WriteFile(file, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if got, err := migrates(t, append(test.args, "-f", file)...); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q\n%s", err, test.want, got)
			}
		})
	}
}

// A file that mig-manager takes and the agent does not is said to be wrong, with what is right in it still told.
func TestMigrateTellsOfAFileThatTheAgentWouldRefuse(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := "version: v1\nmig-configs:\n  odd\x1b[2J: [{devices: all, mig-enabled: yes-please}]\n"
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(text, "\x1b", "")), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := migrates(t, "--dry-run", "-f", file)
	if err != nil || !strings.Contains(got, "the agent would refuse the file") {
		t.Errorf("error %v\n%s", err, got)
	}
}
