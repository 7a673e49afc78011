package agenttest

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
)

// Kubeconfig is the kubeconfig of an API server that answers so; with NotFound where the answer is nil, and Forbidden where it is an error.
func Kubeconfig(t *testing.T, answer func(path string) any) (kubeconfig string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		body := answer(r.URL.Path)
		switch body.(type) {
		case nil:
			w.WriteHeader(http.StatusNotFound)
			body = map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
		case error:
			// An API server writes a refusal in the first form that the request takes.
			if protobufs := "application/vnd.kubernetes.protobuf"; strings.HasPrefix(r.Header.Get("Accept"), protobufs) {
				w.Header().Set("Content-Type", protobufs)
				w.WriteHeader(http.StatusForbidden)
				status := metav1.Status{
					TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden,
					Message: r.URL.Path + " is forbidden",
				}
				if err := protobuf.NewSerializer(nil, nil).Encode(&status, w); err != nil {
					t.Error(err)
				}
				return
			}
			w.WriteHeader(http.StatusForbidden)
			body = map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403, "message": r.URL.Path + " is forbidden"}
		}
		if err := json.NewEncoder(w).Encode(body); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(server.Close)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	config := `{"apiVersion":"v1","kind":"Config","clusters":[{"name":"c","cluster":{"server":"` + server.URL + `"}}],` +
		`"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],"users":[{"name":"u","user":{}}],"current-context":"c"}`
	if err := os.WriteFile(kubeconfig, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}

// Runs runs one of the commands, and returns what it prints.
func Runs(t *testing.T, commands []cluster.Command, stdin string, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	c := (&cluster.Options{}).Root(commands...)
	c.SetIn(strings.NewReader(stdin))
	c.SetOut(&out)
	c.SetArgs(args)
	err := c.ExecuteContext(t.Context())
	return out.String(), err
}

// Said is what one of the commands prints, and its error as the program writes it.
func Said(t *testing.T, commands []cluster.Command, stdin string, args ...string) string {
	t.Helper()
	said, err := Runs(t, commands, stdin, args...)
	if err != nil {
		said += "error: " + err.Error() + "\n"
	}
	return said
}
