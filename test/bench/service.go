package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/cluster"
)

// service is a program that watches a node's label and does as it says. They differ in how they are started.
type service struct {
	*stage
	plugin deployment
	// asks requests the change. If it is nil, the label nvidia.com/mig.config does.
	asks func(context.Context, *site) (ending, error)
	// account is the user as whom the program asks the API server, if the device plugin's pod brings it; at.kubeconfig says it of others.
	account string
	// log is the name of gpuslice's log, which shows where its time went; empty for other programs.
	log string
	// start runs the program on the node. It returns when the program waits for the label. It is nil if the program comes with
	// the device plugin; then nothing is known of its cost.
	start func(context.Context, *site) (*process, error)
}

// process is a program that runs until stop.
type process struct {
	pid  int
	stop func() error
}

// patience bounds a run from the request on. The longest takes about a minute.
const patience = 2 * time.Minute

func (sv service) run(ctx context.Context, dir string, s scenario) (r result, err error) {
	at, err := sv.open(ctx, dir, s, sv.plugin)
	if err != nil {
		return r, err
	}
	defer func() {
		err = errors.Join(err, at.close(ctx))
	}()
	asks := func(ctx context.Context) (ending, error) { return sv.asks(ctx, at) }
	if sv.asks == nil {
		asks = at.byLabel
	}
	at.account = sv.account
	if sv.start == nil {
		return at.measure(ctx, asks)
	}
	p, err := sv.start(ctx, at)
	if err != nil {
		return r, err
	}
	defer func() {
		err = errors.Join(err, p.stop())
	}()
	before, err := costOf(p.pid)
	if err != nil {
		return r, err
	}
	began := time.Now()
	if r, err = at.measure(ctx, asks); err != nil {
		return r, err
	}
	after, err := costOf(p.pid)
	r.cost = after.since(before)
	if err != nil || sv.log == "" {
		return r, err
	}
	steps, err := stepsIn(filepath.Join(at.Dir, sv.log))
	r.spent = divide(r, began, steps)
	return r, err
}

// census is who and what is there at one moment.
type census struct {
	gpus           []nvml.GPU
	users, plugins map[types.UID]string
}

func (at *site) count(ctx context.Context) (c census, err error) {
	if c.gpus, err = at.GPUs.Outside().Snapshot(ctx); err != nil {
		return c, fmt.Errorf("looking at the GPUs: %w", err)
	}
	if c.users, err = at.users(ctx); err != nil {
		return c, err
	}
	c.plugins, err = at.plugins(ctx)
	return c, err
}

// ending is the last thing that a program says of a change.
type ending struct {
	word string        // success or failed
	said time.Duration // after the request
	over bool          // the node offers what its GPUs have; if not, it took too long
}

// measure has the GPUs cut, and observes the result from outside, the same way for all programs. request requests the
// change and returns when all is over.
func (at *site) measure(ctx context.Context, request func(context.Context) (ending, error)) (r result, err error) {
	before, err := at.count(ctx)
	if err != nil {
		return r, err
	}
	if err := at.GPUs.ForgetCalls(); err != nil {
		return r, err
	}
	began := time.Now()
	end, err := request(ctx)
	if err != nil {
		return r, err
	}
	asked, err := at.requests(began, time.Now()) //nolint:contextcheck // the audit log's reader has a deadline of its own
	if err != nil {
		return r, err
	}
	r.count(at.GPUs)
	r.requests = asked
	after, err := at.count(ctx)
	if err != nil {
		return r, err
	}
	if err := at.compare(&r, before, after); err != nil { //nolint:contextcheck // the audit log's reader has a deadline of its own
		return r, err
	}
	samples := at.watch.since(began)
	r.said, r.ready = end.said, readyAfter(samples, began, at.scenario.offers(after.gpus))
	if r.outcome, err = judge(at.scenario, cmp.Or(end.word, "nothing said"), before.gpus, after.gpus); err != nil {
		return r, err
	}
	if at.scenario.sharing() && !maps.Equal(samples[len(samples)-1].offers, at.scenario.offers(after.gpus)) {
		r.outcome = fmt.Sprintf("not as asked; the node offers %v", samples[len(samples)-1].offers)
	}
	if !end.over {
		r.outcome += fmt.Sprintf("; not over after %s", patience)
	}
	if left := leftovers(samples[len(samples)-1].node); len(left) > 0 {
		r.outcome += "; node left " + strings.Join(left, ", ")
	}
	return r, nil
}

// byLabel requests the change by the node's label, and returns when the program has said that it is done, or has failed.
func (at *site) byLabel(ctx context.Context) (end ending, err error) {
	began := time.Now()
	if err := at.label(ctx, map[string]string{labelConfig: at.scenario.config}); err != nil {
		return end, err
	}
	end.over, err = at.awaitEnd(ctx, func(o *corev1.Node) bool {
		state := o.Labels[labelState]
		return state == success || state == failed
	})
	if err != nil {
		return end, err
	}
	end.word, end.said = lastWord(at.watch.since(began), began)
	return end, nil
}

// awaitEnd waits until the program has said that it is done, or has failed, and the node offers what its GPUs have. It is
// not over if that takes too long, which is a result like others.
func (at *site) awaitEnd(ctx context.Context, hasSaid func(*corev1.Node) bool) (over bool, err error) {
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = at.watch.until(limited, "the end of the change", func(ctx context.Context, s sample) (bool, error) {
		if !hasSaid(s.node) {
			return false, nil
		}
		return at.offers(at.scenario.offers)(ctx, s)
	})
	if err != nil && (ctx.Err() != nil || limited.Err() == nil) {
		return false, err
	}
	return err == nil, nil
}

// compare counts the pods that are there no more.
func (at *site) compare(r *result, before, after census) error {
	evicted, err := at.evicted()
	if err != nil {
		return err
	}
	for uid, name := range before.users {
		switch {
		case after.users[uid] != "":
		case evicted[name]:
			r.evicted++
		default:
			r.ended++
		}
	}
	for uid := range before.plugins {
		if after.plugins[uid] == "" {
			r.plugins++
		}
	}
	return nil
}

// lastWord finds in the samples the label's last value, and when it came to it.
func lastWord(samples []sample, began time.Time) (word string, said time.Duration) {
	for _, s := range samples {
		if state := s.node.Labels[labelState]; state != word {
			word, said = state, max(0, s.at.Sub(began))
		}
	}
	return word, said
}

// readyAfter finds in the samples from when on the node offered what it should.
func readyAfter(samples []sample, began time.Time, want map[string]int) (ready time.Duration) {
	right := false
	for _, s := range samples {
		if now := maps.Equal(s.offers, want); now != right {
			right, ready = now, max(0, s.at.Sub(began))
		}
	}
	return ready
}

// launch starts the program with its log in a file, and returns when the log has the text, if any.
func launch(ctx context.Context, cmd *exec.Cmd, log, text string) (*process, error) {
	to, err := os.Create(log)
	if err != nil {
		return nil, fmt.Errorf("making a log: %w", err)
	}
	says, said, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("making a log: %w", err), to.Close())
	}
	cmd.Stdout, cmd.Stderr = said, said
	ended, err := start(cmd)
	said.Close()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("starting %s: %w", cmd.Path, err), says.Close(), to.Close())
	}
	found := make(chan struct{})
	if text == "" {
		close(found)
	}
	read := make(chan error, 1)
	go func() { read <- copyLines(to, says, text, found) }()
	stop := func() error {
		_ = cmd.Process.Kill() // it may be gone already
		<-ended
		return errors.Join(<-read, says.Close())
	}
	select {
	case <-found:
		return &process{pid: cmd.Process.Pid, stop: stop}, nil
	case <-ended:
		return nil, errors.Join(fmt.Errorf("%s ended before it said %q: see %s", cmd.Path, text, log), stop())
	case <-ctx.Done():
		return nil, errors.Join(fmt.Errorf("waiting for %s to say %q: %w", cmd.Path, text, ctx.Err()), stop())
	}
}

// start runs a program that ends with this process, whatever ends it. The channel is closed when it has ended.
func start(cmd *exec.Cmd) (ended <-chan struct{}, err error) {
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	started, over := make(chan error), make(chan struct{})
	go func() {
		// The kernel sends Pdeathsig when the thread that started it ends: this goroutine keeps one until then.
		runtime.LockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // that it was killed
			close(over)
		}
	}()
	return over, <-started
}

// copyLines writes what it reads until the end, and closes found at the first line that has the text.
func copyLines(to io.WriteCloser, from io.Reader, text string, found chan struct{}) error {
	waiting := text != ""
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadString('\n')
		if _, err := io.WriteString(to, line); err != nil {
			return errors.Join(err, to.Close())
		}
		if waiting && strings.Contains(line, text) {
			waiting = false
			close(found)
		}
		if err != nil { // the program has ended
			return to.Close()
		}
	}
}

// kubeconfig writes one for a service account into the node's directory, with a token that names the node. The program's requests are distinguished by both.
func (at *site) kubeconfig(ctx context.Context, namespace, account string) (file string, err error) {
	credentials, err := at.cluster.NodeConfig(ctx, namespace, account, at.Name)
	if err != nil {
		return "", err
	}
	at.account = userOf(namespace, account)
	file = filepath.Join(at.Dir, account+".kubeconfig")
	return file, cluster.WriteKubeconfig(file, credentials)
}
