package main

import (
	"bytes"
	"context"
	"fmt"
	"reflect"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/state/hostfile"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/document"
)

const (
	// settingsPoll is the time between two polls of the file of the settings. Kubelet brings the edit of a ConfigMap to it within about a minute.
	settingsPoll = 15 * time.Second
	// settingsDisk bounds the time for the host's copy of it.
	settingsDisk    = 5 * time.Second
	longestSettings = 1 << 20 // bytes, as many as document reads
)

// settingsFile is the file of the settings of a running agent. An edit that is wrong leaves the settings in force, also over a restart: the host has a
// copy of the last good ones. Without it a slip in a ConfigMap would end every agent that starts again, also one that has to give its node back.
type settingsFile struct {
	path    string
	inForce config.Settings
	text    []byte // at the last observation

	mu    sync.Mutex
	other bool
	wrong string
}

// lastSettings is the host's copy of the last good settings.
func lastSettings(stateDir string) *hostfile.File {
	return hostfile.In(stateDir, "settings.yaml", longestSettings)
}

// readSettings reads the settings, or, if they are wrong, the host's copy of the last good ones.
func readSettings(ctx context.Context, path, stateDir string, log *zap.Logger) (*settingsFile, config.Settings, error) {
	f := &settingsFile{path: path, inForce: config.Default()}
	if path == "" {
		return f, f.inForce, nil
	}
	ctx, cancel := context.WithTimeout(ctx, settingsDisk)
	defer cancel()
	last := lastSettings(stateDir)
	text, settings, err := f.read()
	if err == nil {
		f.text, f.inForce = text, settings
		return f, settings, nil
	}
	was, failed := last.Read(ctx)
	if failed != nil || was == nil {
		return nil, config.Settings{}, err
	}
	if f.inForce, failed = config.Parse(was); failed != nil {
		return nil, config.Settings{}, err
	}
	f.text, f.wrong = text, err.Error()
	log.Warn("the settings cannot be read: the agent starts with the last good ones", zap.Error(err), zap.String("copy", last.Path()))
	return f, f.inForce, nil
}

// keep writes the host's copy of the settings, if they are good and it has others. Only an agent that runs does so: a command leaves nothing behind.
func (f *settingsFile) keep(ctx context.Context, stateDir string, log *zap.Logger) {
	if f.path == "" || f.wrong != "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, settingsDisk)
	defer cancel()
	last := lastSettings(stateDir)
	if was, err := last.Read(ctx); err == nil && bytes.Equal(was, f.text) {
		return
	}
	if err := last.Write(ctx, f.text); err != nil {
		log.Warn("the host has no copy of the settings: if they are wrong at the next start, the agent does not start", zap.Error(err))
	}
}

func (f *settingsFile) read() ([]byte, config.Settings, error) {
	text, err := document.ReadFile(f.path)
	if err != nil {
		return nil, config.Settings{}, fmt.Errorf("reading settings: %w", err)
	}
	settings, err := config.Parse(text)
	if err != nil {
		err = fmt.Errorf("reading settings from %s: %w", f.path, err)
	}
	return text, settings, err
}

// watch polls the file until ctx ends. It runs outside the agent's loop: a file that does not answer must not hold that up.
func (f *settingsFile) watch(ctx context.Context) {
	if f.path == "" {
		return
	}
	ticker := time.NewTicker(settingsPoll)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			f.poll()
		}
	}
}

func (f *settingsFile) poll() {
	text, settings, err := f.read()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.other, f.wrong = false, ""
	if err != nil {
		f.wrong = err.Error()
		return
	}
	f.other = !reflect.DeepEqual(settings, f.inForce)
	f.text = text
}

// edited implements agent.Options.
func (f *settingsFile) edited() (other bool, wrong string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.other, f.wrong
}
