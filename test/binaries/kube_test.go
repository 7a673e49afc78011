package binaries_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// says is what the programs of a complete Kubernetes print when they are asked for their version, as those of v1.37 and of
// etcd v3.7 do.
func says() map[string]string {
	return map[string]string{
		"kube-apiserver":          "Kubernetes v1.37.4",
		"kube-controller-manager": "Kubernetes v1.37.4",
		"kube-scheduler":          "Kubernetes v1.37.4",
		"kubelet":                 "Kubernetes v1.37.4",
		"kubectl":                 "Client Version: v1.37.0-dispatcher\nKustomize Version: v5.8.1",
		"etcd":                    "etcd Version: 3.7.2\nGit SHA: 1234567\nGo Version: go1.26.1\nGo OS/Arch: linux/amd64",
	}
}

// install writes programs that print what they say into a new directory.
func install(t *testing.T, what map[string]string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range what {
		script(t, filepath.Join(dir, name), "cat <<'END'\n"+text+"\nEND\n")
	}
	return dir
}

func script(t *testing.T, file, text string) {
	t.Helper()
	write(t, file, "#!/bin/sh\n"+text)
	if err := os.Chmod(file, 0o700); err != nil {
		t.Fatal(err)
	}
}

// built reports whether Kubernetes was built into the cache of b.
func built(t *testing.T, b binaries.Builder) bool {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(b.Cache, "kube-????????????????"))
	if err != nil {
		t.Fatal(err)
	}
	return len(dirs) > 0
}

func TestAKubernetesThatIsNamedIsTakenAsItIs(t *testing.T) {
	b, _ := newBuilder(t)
	var lines log
	b.Log = &lines
	given := install(t, says())
	t.Setenv(binaries.KubeBin, given)
	dir, err := b.Kube(t.Context())
	if err != nil || dir != given {
		t.Fatalf("Kube returned %q, %v; want %s", dir, err, given)
	}
	if err := b.Announce(t.Context(), "kube"); err != nil {
		t.Error(err)
	}
	if want := fmt.Sprintf("kube: Kubernetes v1.37.4 and etcd v3.7.2, from %s=%s\n", binaries.KubeBin, given); lines.String() != want {
		t.Errorf("it was said %q, want %q", &lines, want)
	}
	if built(t, b) {
		t.Error("Kubernetes was built all the same")
	}
}

func TestAKubernetesThatIsNamedIsNeverPassedOver(t *testing.T) {
	for name, row := range map[string]struct {
		change func(t *testing.T, dir string)
		want   []string // in the error; DIR stands for the directory
	}{
		"another minor version": {
			func(t *testing.T, dir string) {
				t.Helper()
				script(t, dir+"/kubectl", "echo Client Version: v1.31.2\n")
			},
			[]string{"DIR/kubectl is v1.31.2, v1.37 is needed"},
		},
		"another major version of etcd": {
			func(t *testing.T, dir string) { t.Helper(); script(t, dir+"/etcd", "echo etcd Version: 4.7.0\n") },
			[]string{"DIR/etcd is v4.7.0, v3.7 is needed"},
		},
		"two programs are missing": {
			func(t *testing.T, dir string) {
				t.Helper()
				for _, name := range []string{"kubelet", "kube-scheduler"} {
					if err := os.Remove(filepath.Join(dir, name)); err != nil {
						t.Fatal(err)
					}
				}
			},
			[]string{"DIR/kubelet", "DIR/kube-scheduler", "no such file"},
		},
		"a file that is no program": {
			func(t *testing.T, dir string) {
				t.Helper()
				if err := os.Chmod(dir+"/etcd", 0o600); err != nil {
					t.Fatal(err)
				}
			},
			[]string{"DIR/etcd", "permission denied"},
		},
		"a program without a version": {
			func(t *testing.T, dir string) { t.Helper(); script(t, dir+"/kubelet", "echo built from v1.37.1\n") },
			[]string{"DIR/kubelet does not say its version when it is asked by --version"},
		},
		"a program that fails": {
			func(t *testing.T, dir string) {
				t.Helper()
				script(t, dir+"/kubelet", "echo Kubernetes v1.37.1; exit 3\n")
			},
			[]string{"DIR/kubelet does not say its version: exit status 3"},
		},
		"no directory": {
			func(t *testing.T, dir string) {
				t.Helper()
				if err := os.RemoveAll(dir); err != nil {
					t.Fatal(err)
				}
			},
			[]string{"DIR/etcd", "no such file"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, _ := newBuilder(t)
			b.Kubelet = true
			dir := install(t, says())
			row.change(t, dir)
			t.Setenv(binaries.KubeBin, dir)
			got, err := b.Kube(t.Context())
			if err == nil {
				t.Fatalf("Kube returned %s", got)
			}
			for _, want := range append(row.want, binaries.KubeBin+"="+dir) {
				if want = strings.ReplaceAll(want, "DIR", dir); !strings.Contains(err.Error(), want) {
					t.Errorf("the error does not say %q: %v", want, err)
				}
			}
			if built(t, b) {
				t.Error("Kubernetes was built in place of what was named")
			}
		})
	}
}

func TestADirectoryThatDependsOnWhereATestRunsIsRefused(t *testing.T) {
	b, _ := newBuilder(t)
	t.Setenv(binaries.KubeBin, "bin")
	if dir, err := b.Kube(t.Context()); err == nil || !strings.Contains(err.Error(), binaries.KubeBin+"=bin: name the directory from / on") {
		t.Errorf("Kube returned %q, %v", dir, err)
	}
}

func TestAProgramThatNeverSaysItsVersionIsAbandoned(t *testing.T) {
	defer binaries.SetAskFor(time.Second)()
	for name, text := range map[string]string{
		"silent":             "exec sleep 600\n",
		"leaves a child":     "sleep 600 &\nwait\n",
		"talks without end":  "exec yes v1.37.1\n",
		"does not end of it": "trap '' TERM INT\nwhile :; do :; done\n",
	} {
		t.Run(name, func(t *testing.T) {
			b, _ := newBuilder(t)
			dir := install(t, says())
			script(t, dir+"/kube-scheduler", text)
			t.Setenv(binaries.KubeBin, dir)
			got, err := b.Kube(t.Context())
			if err == nil || !strings.Contains(err.Error(), dir+"/kube-scheduler did not say its version within 1s") {
				t.Errorf("Kube returned %q, %v", got, err)
			}
		})
	}
}

// People who have a control plane need no kubelet but for test/e2e.
func TestAKubernetesWithoutKubeletIsTakenWhereNothingStartsIt(t *testing.T) {
	b, _ := newBuilder(t)
	programs := says()
	delete(programs, "kubelet")
	given := install(t, programs)
	t.Setenv(binaries.KubeBin, given)
	if dir, err := b.Kube(t.Context()); err != nil || dir != given {
		t.Errorf("Kube returned %q, %v; want %s", dir, err, given)
	}
	b.Kubelet = true
	if dir, err := b.Kube(t.Context()); err == nil || !strings.Contains(err.Error(), given+"/kubelet") {
		t.Errorf("with kubelet: Kube returned %q, %v; want an error that names it", dir, err)
	}
	t.Setenv(binaries.KubeBin, "")
	t.Setenv("PATH", given+":"+os.Getenv("PATH"))
	b.Kubelet = false
	dir, err := b.Kube(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got, want := output(t, filepath.Join(dir, "etcd")), programs["etcd"]; got != want {
		t.Errorf("from PATH: etcd prints %q, want %q", got, want)
	}
	if built(t, b) {
		t.Error("Kubernetes was built all the same")
	}
}

func TestAKubernetesOnPathIsTakenWhereverItsProgramsAre(t *testing.T) {
	b, _ := newBuilder(t)
	b.Kubelet = true
	servers := says()
	delete(servers, "kubectl")
	client := map[string]string{"kubectl": says()["kubectl"]}
	t.Setenv("PATH", install(t, servers)+":"+install(t, client)+":"+os.Getenv("PATH"))
	dir, err := b.Kube(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range says() {
		if got := output(t, filepath.Join(dir, name)); got != text {
			t.Errorf("%s prints %q, want %q", name, got, text)
		}
	}
	again, err := b.Kube(t.Context())
	if err != nil || again != dir {
		t.Errorf("a second time it is %q, %v; want %s", again, err, dir)
	}
	if built(t, b) {
		t.Error("Kubernetes was built all the same")
	}
}

// Programs of two origins may not know each other's options.
func TestAKubernetesOnPathOfWhichOneProgramDoesNotFitIsNotTaken(t *testing.T) {
	for name, row := range map[string]struct {
		change func(map[string]string)
		want   string
	}{
		"one is old": {
			func(s map[string]string) { s["kubectl"] = "Client Version: v1.31.2" },
			"kube: what is on PATH is not taken: kubectl is v1.31.2, v1.37 is needed\n",
		},
		"one is old, and alone": {
			func(s map[string]string) {
				maps.DeleteFunc(s, func(name, _ string) bool { return name != "kubectl" })
				s["kubectl"] = "Client Version: v1.31.2"
			},
			"kube: what is on PATH is not taken: kubectl is v1.31.2, v1.37 is needed; " +
				"there is no kube-apiserver, kube-controller-manager, kube-scheduler, etcd\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, _ := newBuilder(t)
			var lines log
			b.Log = &lines
			programs := says()
			row.change(programs)
			t.Setenv("PATH", install(t, programs)+":"+os.Getenv("PATH"))
			if err := b.Announce(t.Context(), "kube"); err != nil {
				t.Fatal(err)
			}
			dir, err := b.Kube(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if got := output(t, filepath.Join(dir, "kubectl")); got != "kubectl v1.37.1" {
				t.Errorf("kubectl prints %q, want that of the build", got)
			}
			said := slices.Collect(strings.Lines(lines.String()))
			if len(said) < 3 || !strings.HasPrefix(said[0], "to be built, once: Kubernetes v1.37.1 and etcd v3.7.0; about ") ||
				said[1] != row.want || !strings.HasPrefix(said[2], "kube: building Kubernetes v1.37.1 and etcd v3.7.0, about ") {
				t.Errorf("it was said\n%swant what is to be built, then %q", &lines, row.want)
			}
		})
	}
}
