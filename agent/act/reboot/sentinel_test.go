package reboot_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/agent/act/reboot"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
)

// What stands in the sentinel's place, what that means, and what becomes of it when the agent asks for a reboot and withdraws that. Kubelet makes a
// directory of a hostPath that does not exist.
func TestTheSentinelIsOursOrLeftAlone(t *testing.T) {
	t.Parallel()
	write := func(text string) func(string) error {
		return func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }
	}
	for name, row := range map[string]struct {
		put   func(path string) error
		means plan.Asked
		says  string     // of asking; empty if that succeeds
		then  plan.Asked // after asking
		stays bool       // after it is withdrawn
	}{
		"nothing":                      {func(string) error { return nil }, plan.NotAsked, "", plan.AskedByUs, false},
		"our request":                  {write(config.FieldManager + ": for all-1g.10gb\n"), plan.AskedByUs, "", plan.AskedByUs, false},
		"another's":                    {write("apt\n"), plan.AskedByOthers, "", plan.AskedByOthers, true},
		"an empty file":                {write(""), plan.AskedByOthers, "", plan.AskedByOthers, true},
		"half a word of ours":          {write("gpusl"), plan.AskedByOthers, "", plan.AskedByOthers, true},
		"a file that cannot be read":   {func(path string) error { return os.Symlink("/proc/self/mem", path) }, plan.AskedByOthers, "", plan.AskedByOthers, true},
		"a directory":                  {func(path string) error { return os.Mkdir(path, 0o755) }, plan.NotAsked, "is a directory", plan.NotAsked, true},
		"a link that leads to no file": {func(path string) error { return os.Symlink("/nowhere/at/all", path) }, plan.NotAsked, "is a link that leads to no file", plan.NotAsked, true},
		"no folder":                    {func(path string) error { return os.Remove(filepath.Dir(path)) }, plan.NotAsked, "mount the folder into the agent's container", plan.NotAsked, false},
	} {
		folder := filepath.Join(t.TempDir(), "run")
		s := &reboot.Sentinel{Path: filepath.Join(folder, "reboot-required")}
		if err := os.Mkdir(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := row.put(s.Path); err != nil {
			t.Fatal(err)
		}
		if got := s.State(t.Context()); got != row.means {
			t.Errorf("%s means %v, want %v", name, got, row.means)
		}
		if err := s.Ask(t.Context(), "why"); (err == nil) != (row.says == "") || err != nil && !strings.Contains(err.Error(), row.says) {
			t.Errorf("%s: %v, want %q", name, err, row.says)
		}
		if got := s.State(t.Context()); got != row.then {
			t.Errorf("%s means %v once the agent has asked, want %v", name, got, row.then)
		}
		if err := s.Withdraw(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Lstat(s.Path); (err == nil) != row.stays {
			t.Errorf("%s: %v once the request is withdrawn", name, err)
		}
	}
}

// Any program may read the request, and none reads half of it.
func TestTheSentinelIsThereAsAWholeOrNotAtAll(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	s := &reboot.Sentinel{Path: filepath.Join(folder, "reboot-required")}
	half := filepath.Join(folder, ".reboot-required."+config.FieldManager)
	if err := os.WriteFile(half, []byte("gpusl"), 0o600); err != nil { // an agent was killed while it wrote
		t.Fatal(err)
	}
	if err := s.Ask(t.Context(), "why"); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(s.Path)
	if want := config.FieldManager + ": why\n"; err != nil || string(text) != want {
		t.Errorf("the request is %q, %v; want %q", text, err, want)
	}
	if is, err := os.Stat(s.Path); err != nil || is.Mode().Perm()&0o444 != 0o444 {
		t.Errorf("not every user may read the request: %v, %v", is, err)
	}
	if files, err := os.ReadDir(folder); err != nil || len(files) != 1 {
		t.Errorf("the folder holds %v, %v; want the request alone", files, err)
	}
}
