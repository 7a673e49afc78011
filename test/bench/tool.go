package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuslice/gpuslice/test/incumbent"
)

// tool is nvidia-mig-parted by itself, as an administrator runs it on a node. There is no cluster, and so nothing that it
// would have to pause.
type tool struct {
	programs incumbent.Programs
}

func (t tool) run(ctx context.Context, dir string, s scenario) (r result, err error) {
	host, err := incumbent.NewHost(dir, s.spec(), t.programs)
	if err != nil {
		return r, err
	}
	defer host.Close()
	if err := prepare(ctx, host.GPUs, s.start); err != nil {
		return r, err
	}
	if err := hold(ctx, host.GPUs, s.users); err != nil {
		return r, err
	}
	file := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(file, s.file(), 0o600); err != nil {
		return r, fmt.Errorf("writing the config: %w", err)
	}
	before, err := host.GPUs.Outside().Snapshot(ctx)
	if err != nil {
		return r, fmt.Errorf("looking at the GPUs before: %w", err)
	}
	if err := host.GPUs.ForgetCalls(); err != nil {
		return r, err
	}
	began := time.Now()
	_, refused := host.MIGParted(ctx, "apply", "-f", file, "-c", s.config)
	r.said, r.noNode = time.Since(began), true
	if ctx.Err() != nil {
		return r, ctx.Err()
	}
	r.count(host.GPUs)
	after, err := host.GPUs.Outside().Snapshot(ctx)
	if err != nil {
		return r, fmt.Errorf("looking at the GPUs after: %w", err)
	}
	word := success
	if refused != nil {
		word = failed
		if err := os.WriteFile(filepath.Join(dir, "stderr.log"), []byte(refused.Error()), 0o600); err != nil {
			return r, fmt.Errorf("keeping what it said: %w", err)
		}
	}
	r.outcome, err = judge(s, word, before, after)
	return r, err
}
