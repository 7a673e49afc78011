package main

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

func TestProfilesAreServedOnLoopbackAndOnlyIfAskedFor(t *testing.T) {
	for address, want := range map[string]string{
		"":              "",
		"127.0.0.1:0":   "serving profiles",
		"0.0.0.0:0":     "choose another --pprof-address",
		"192.0.2.1:999": "choose another --pprof-address",
	} {
		core, logged := observer.New(zapcore.InfoLevel)
		o := options{pprofAddress: address}
		o.serveProfiles(t.Context(), zap.New(core))
		if all := logged.All(); want == "" && len(all) > 0 || want != "" && (len(all) != 1 || !strings.Contains(all[0].Message, want)) {
			t.Errorf("%q is logged as %v, want %q", address, all, want)
		}
		if want != "serving profiles" {
			continue
		}
		at, isText := logged.All()[0].ContextMap()["address"].(string)
		if !isText {
			t.Fatalf("logged: %v", logged.All())
		}
		text := getText(t, "http://"+at+"/debug/pprof/goroutine?debug=1")
		if !strings.Contains(text, "goroutine profile: total") {
			t.Errorf("the profile is:\n%s", text)
		}
	}
}

// getText is what a server answers to a GET of the URL.
func getText(t *testing.T, url string) string {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s is answered by %s, %v:\n%s", url, response.Status, err, text)
	}
	return string(text)
}
