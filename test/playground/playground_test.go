package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/receive"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// shown is what each command of the menu is to print.
var shown = map[string][]string{
	"1":  {`notebook-\S+  NeedsRecut(?s:.*)\$ kubectl gpuslice apply \S+ --mig-config`},
	"2":  {`Evicting|EvictionBlocked(?s:.*)MIG config all-balanced: 1 of 1 node converged`},
	"3":  {`labelled nvidia.com/mig.config=all-1g.10gb`, `the agent of h100-1 is dead`, `all-1g.10gb: 1 of 1 node converged`},
	"4":  {`l4-1: would be refused: NoCapableGPU`, `NoCapableGPU`},
	"5":  {`nvidia.com/gpu 16 = 4 x 4 time-slicing(?s:.*)1 of 1 node converged`},
	"6":  {``, `condition met`, `GPULost: GPU 0 .* after Xid 79`, ``},
	"7":  {`Fry`, `configured`, `h100-2: would be held up: InvalidMaintenance`, `configured`},
	"8":  {`held up: AwaitingWindow`, `annotated`, `all-3g.40gb: 1 of 1 node converged`},
	"9":  {`created`, `slurm/slurmd-0: asked behind the cordon`, `slurm/slurmd-0`, `unlabeled`, `all-balanced: 1 of 1 node converged`},
	"10": {`mig.nvidia.com 3g.40gb 1(?s:.*)1 of 1 node converged`, `dra-1`},
	"look": {
		`"level":"info"`, `The node takes pods, and nothing is left to restore`, ``, ``, `H100-80GB`,
	},
	"remove": {`patched`, `successfully rolled out`, `namespace "gpuslice" deleted`},
}

// together are items that do not disturb each other, so that the test takes less than the sum: those of one node are one after the other.
var together = [][]string{{"2", "3"}, {"4", "5", "6"}, {"8"}, {"9"}, {"10"}}

func TestEachCommandOfTheMenuDoesWhatItIsFor(t *testing.T) {
	if err := sandbox.Possible(); err != nil {
		t.Skip(err)
	}
	w := opened(t)
	one := func(t *testing.T, name string) {
		t.Helper()
		for _, it := range menu {
			if it.name == name {
				t.Run(name+" "+it.title, func(t *testing.T) { w.try(t, it) })
			}
		}
	}
	one(t, "1")
	one(t, "7")
	t.Run("each node", func(t *testing.T) {
		for _, names := range together {
			t.Run(strings.Join(names, " and "), func(t *testing.T) {
				t.Parallel()
				for _, name := range names {
					one(t, name)
				}
			})
		}
	})
	one(t, "look")
	w.distinct(t)
	if testing.Short() {
		return // kubelet asks an agent once in half a minute whether it is ready
	}
	one(t, "remove")
	w.removed(t)
}

// opened is a playground, as a user finds it.
func opened(t *testing.T) *world {
	t.Helper()
	p, err := built(t.Context(), binaries.Builder{Log: os.Stderr}, both)
	if err != nil {
		t.Fatal(err)
	}
	if p.self, err = (binaries.Builder{Log: os.Stderr}).Tool(t.Context(), "./test/playground"); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", dirPrefix) //nolint:usetesting // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	w := &world{programs: p, dir: dir}
	ctx, end := context.WithCancel(context.WithoutCancel(t.Context()))
	t.Cleanup(func() {
		if err := w.end(); err != nil {
			t.Error(err)
		}
		end()
		if t.Failed() {
			t.Logf("the logs are in %s", dir)
			return
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := w.open(ctx); err != nil {
		t.Fatal(err)
	}
	return w
}

// try runs the commands of an item in one shell after the other, each until it shows what it is to: some show what an agent has yet to do.
func (w *world) try(t *testing.T, it item) {
	t.Helper()
	if len(shown[it.name]) != len(it.commands) {
		t.Fatalf("of %d commands it is known what they show, want %d", len(shown[it.name]), len(it.commands))
	}
	for i := 0; i < len(it.commands); i++ {
		command, want := it.commands[i], regexp.MustCompile(shown[it.name][i])
		if strings.HasSuffix(command, "&") { // it is for the next
			i++
			command, want = command+" "+it.commands[i], regexp.MustCompile(`gpuslice_build_info|gpuslice_`)
		}
		var said string
		err := wait.PollUntilContextTimeout(t.Context(), pollEvery, 3*time.Minute, true, func(ctx context.Context) (bool, error) {
			said = w.run(ctx, command)
			return want.MatchString(said) || !changesNothing.MatchString(command), nil
		})
		if err != nil || !want.MatchString(said) {
			t.Fatalf("%s\n%s\nwant %s", command, said, want)
		}
	}
}

// changesNothing are commands that may be run again.
var changesNothing = regexp.MustCompile(`^kubectl gpuslice (status|plan)|^kubectl (-n gpuslice )?(get|exec|logs)`)

func (w *world) run(ctx context.Context, command string) string {
	cmd := exec.CommandContext(ctx, "bash", "-c", "set -m; "+command)
	cmd.Dir, cmd.Env = w.tries(""), w.environ()
	said, err := cmd.CombinedOutput()
	if err != nil {
		return string(said) + err.Error()
	}
	return string(said)
}

// distinct checks that no two nodes have a GPU of the same UUID.
func (w *world) distinct(t *testing.T) {
	t.Helper()
	on := map[string]string{}
	for _, n := range w.nodes {
		for _, uuid := range n.GPUs.UUIDs() {
			if on[uuid] != "" {
				t.Errorf("%s is on %s and on %s", uuid, on[uuid], n.Name)
			}
			on[uuid] = n.Name
		}
	}
}

// removed checks that the commands are those of deploy/README.md, and what is left on the nodes.
func (w *world) removed(t *testing.T) {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(w.root, "deploy", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, it := range menu {
		for _, c := range it.commands {
			if it.name == "remove" && !strings.Contains(string(page), c) {
				t.Errorf("deploy/README.md does not have\n%s", c)
			}
		}
	}
	nodes, err := w.client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		for key := range n.Labels {
			if strings.HasPrefix(key, "gpuslice.io/") {
				t.Errorf("node %s has label %s still", n.Name, key)
			}
		}
		if ready(n.Status.Conditions) != "Unknown" {
			t.Errorf("node %s has the agent's condition still", n.Name)
		}
	}
}

func TestTheMenuFitsAScreen(t *testing.T) {
	var list strings.Builder
	writeMenu(&list)
	if n := strings.Count(list.String(), "\n"); n > 20 {
		t.Errorf("the list has %d lines, want 20 at most", n)
	}
	for _, it := range menu {
		var text strings.Builder
		if err := writeItem(&text, it.name); err != nil {
			t.Error(err)
		}
		for line := range strings.Lines(list.String() + text.String()) {
			if len(line) > columns+1 && it.name != "remove" && !strings.HasPrefix(line, "curl") {
				t.Errorf("wider than %d columns: %s", columns, line)
			}
		}
	}
	if err := writeItem(&list, "eleven"); err == nil || !strings.Contains(err.Error(), "use one of 1, 2,") {
		t.Errorf("an item that is not there: %v", err)
	}
}

func TestWhatKilledPlaygroundsLeftIsRemoved(t *testing.T) {
	temp := t.TempDir()
	old := time.Now().Add(-2 * young)
	left := map[string]bool{"killed": false, "young": true, "other": true}
	for name := range left {
		dir := filepath.Join(temp, dirPrefix+name)
		if name == "other" {
			dir = filepath.Join(temp, name)
		}
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if name != "young" {
			if err := os.Chtimes(dir, old, old); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Setenv("TMPDIR", temp)
	if err := inDir(os.Stderr, func(running string) error {
		if err := os.Chtimes(running, old, old); err != nil {
			return err
		}
		removeStale(temp)
		_, err := os.Stat(running)
		return err
	}); err != nil {
		t.Errorf("a playground that runs: %v", err)
	}
	for name, stays := range left {
		dir := filepath.Join(temp, dirPrefix+name)
		if name == "other" {
			dir = filepath.Join(temp, name)
		}
		if _, err := os.Stat(dir); (err == nil) != stays {
			t.Errorf("%s is there: %t, want %t", name, err == nil, stays)
		}
	}
}

// If make leads the terminal's session, the kernel sends a hang-up to make alone.
func TestThePlaygroundEndsWithItsTerminal(t *testing.T) {
	terminal, shells, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer shells.Close()
	ctx, stop := untilHangup(t.Context(), int(shells.Fd()))
	defer stop()
	if _, err := terminal.WriteString("ls\n"); err != nil || ctx.Err() != nil {
		t.Fatalf("with the terminal there: %v, %v", err, ctx.Err())
	}
	if err := terminal.Close(); err != nil {
		t.Fatal(err)
	}
	receive.From(t, ctx.Done())
}
