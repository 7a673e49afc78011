package clustertest

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

// answers are what an API server says one after the other; it notes what it was sent.
type answers struct {
	say  []string // "" is a success, anything else an internal error
	sent []string
}

func (a *answers) RoundTrip(request *http.Request) (*http.Response, error) {
	text, err := io.ReadAll(request.Body)
	if err != nil {
		return nil, err
	}
	a.sent = append(a.sent, string(text))
	status, say := http.StatusOK, a.say[0]
	if a.say = a.say[1:]; say != "" {
		status = http.StatusInternalServerError
	}
	return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(say)), Request: request}, nil
}

func TestWhatEtcdWasTooBusyForIsAskedAgain(t *testing.T) {
	for name, test := range map[string]struct {
		say  []string
		sent int
		want int
	}{
		"etcd is busy twice": {[]string{"k8s\x00Failure: etcdserver: request timed out", "etcdserver: request timed out", ""}, 3, http.StatusOK},
		"another error":      {[]string{"etcdserver: no space", ""}, 1, http.StatusInternalServerError},
	} {
		t.Run(name, func(t *testing.T) {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPatch, "https://api/nodes/a", strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			server := &answers{say: test.say}
			response, err := patient{server}.RoundTrip(request)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			text, err := io.ReadAll(response.Body)
			if err != nil {
				t.Fatal(err)
			}
			if response.StatusCode != test.want || test.want != http.StatusOK && string(text) != test.say[0] {
				t.Errorf("the answer is %d %q", response.StatusCode, text)
			}
			if len(server.sent) != test.sent || strings.Join(server.sent, "") != strings.Repeat("{}", test.sent) {
				t.Errorf("the API server was sent %q", server.sent)
			}
		})
	}
}
