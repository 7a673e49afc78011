package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"
)

// An edit is checked before it is obeyed: a good one ends the process for a new one, and a bad one changes nothing, also over a restart.
func TestAnEditOfTheSettingsIsCheckedBeforeItIsObeyed(t *testing.T) {
	t.Parallel()
	const good, other = "apiVersion: gpuslice.io/v1alpha1\nkind: Settings\nnodeHeartbeat: 5m\n", "apiVersion: gpuslice.io/v1alpha1\nkind: Settings\nnodeHeartbeat: 7m\n"
	bad := strings.Replace(good, "5m", "often", 1)
	path, state := filepath.Join(t.TempDir(), "settings.yaml"), t.TempDir()
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(bad)
	if _, _, err := readSettings(t.Context(), path, state, zap.NewNop()); err == nil {
		t.Fatal("an agent that has never had good settings starts with bad ones")
	}
	write(good)
	f, first, err := readSettings(t.Context(), path, state, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	f.keep(t.Context(), state, zap.NewNop())
	for _, step := range []struct {
		text  string
		other bool
		wrong string
	}{
		{good, false, ""},
		{good + "# a comment\n", false, ""},
		{bad, false, "nodeHeartbeat"},
		{good, false, ""},
		{other, true, ""},
		{bad, false, "nodeHeartbeat"},
	} {
		write(step.text)
		f.poll()
		if is, wrong := f.edited(); is != step.other || !strings.Contains(wrong, step.wrong) || step.wrong == "" && wrong != "" {
			t.Errorf("of %q: other %t, wrong %q", step.text, is, wrong)
		}
	}
	f, again, err := readSettings(t.Context(), path, state, zap.NewNop()) // the file is bad now
	if err != nil {
		t.Fatal("an agent does not start again by the settings of before: ", err)
	}
	if _, wrong := f.edited(); again.NodeHeartbeat != first.NodeHeartbeat || !strings.Contains(wrong, "nodeHeartbeat") {
		t.Errorf("it starts with a heartbeat of %s, and says %q", again.NodeHeartbeat, wrong)
	}
}
