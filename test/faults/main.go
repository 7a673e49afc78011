// Command faults tries small faults in how the packages of the agent are put together. A mutation tester would run all tests of ./agent for each place, and
// they take minutes. Each fault is a text of the product, the text that replaces it, and the test that must fail for it. The compiler reads a changed copy of
// the file (-overlay): the checkout does not change.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// fault is one of the list.
type fault struct {
	what     string // what the product then does
	old, new string // old is a text that the files below agent have once, in whatever package
	test     string // of ./agent
}

var verbose bool

func main() {
	only := flag.String("run", "", "try those alone whose words match the regular expression")
	flag.BoolVar(&verbose, "v", false, "print what the tests say")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := tryAll(ctx, *only); err != nil {
		fmt.Fprintln(os.Stderr, err)
		stop()
		os.Exit(1)
	}
}

func tryAll(ctx context.Context, only string) error {
	match, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}
	work, err := os.MkdirTemp("", "faults-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	wrong, tried := 0, 0
	for _, f := range faults {
		if !match.MatchString(f.what) {
			continue
		}
		tried++
		began := time.Now()
		verdict, err := f.try(ctx, work)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			verdict = "STALE: " + err.Error()
		}
		if verdict != killed {
			wrong++
		}
		fmt.Printf("%s: %s (%s, %s)\n", verdict, f.what, f.test, time.Since(began).Round(time.Second))
	}
	if wrong > 0 || tried == 0 {
		return fmt.Errorf("%d of %d faults are not caught by the test beside them, or cannot be tried", wrong, tried)
	}
	return nil
}

const (
	killed = "KILLED"
	lived  = "LIVED"

	dir = "agent"
	pkg = "./agent"
)

// try runs the test with the fault. An error is why the fault cannot be tried: the product or the test has changed.
func (f fault) try(ctx context.Context, work string) (verdict string, _ error) {
	file, text, err := f.applied()
	if err != nil {
		return "", err
	}
	copied, overlay := filepath.Join(work, "copy.go"), filepath.Join(work, "overlay.json")
	file, err = filepath.Abs(file)
	if err != nil {
		return "", err
	}
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {file: copied}})
	if err != nil {
		return "", err
	}
	if err := errors.Join(os.WriteFile(copied, []byte(text), 0o600), os.WriteFile(overlay, replace, 0o600)); err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, "go", "test", "-overlay", overlay, "-short", "-vet=off", "-count=1", "-ldflags=-s -w", "-timeout=5m",
		"-run", "^"+f.test+"$", pkg).CombinedOutput()
	said := string(out)
	if verbose {
		fmt.Print(said)
	}
	switch {
	case strings.Contains(said, "[build failed]"), strings.Contains(said, "[setup failed]"):
		return "", fmt.Errorf("it does not compile:\n%s", said)
	case strings.Contains(said, "no tests to run"):
		return "", fmt.Errorf("%s has no %s", pkg, f.test)
	case err == nil:
		return lived, nil
	case strings.Contains(said, "--- FAIL"), strings.Contains(said, "panic:"):
		return killed, nil
	default:
		return "", fmt.Errorf("%w\n%s", err, said)
	}
}

// applied returns the file that has the old text, and what that is with the fault.
func (f fault) applied() (file, text string, _ error) {
	found := 0
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		data, err := os.ReadFile(path)
		if n := strings.Count(string(data), f.old); n > 0 {
			found += n
			file, text = path, strings.Replace(string(data), f.old, f.new, 1)
		}
		return err
	})
	if err == nil && found != 1 {
		err = fmt.Errorf("%q is %d times below %s, and not once: give the line that it is now", f.old, found, dir)
	}
	return file, text, err
}
