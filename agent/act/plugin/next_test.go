package plugin_test

import (
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/agent/act/plugin"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/config/catalog"
)

// restarts replaces the agent, and has the next one observe the plugin.
func (h *host) restarts() {
	h.t.Helper()
	last := h.plugin
	h.plugin = &plugin.Handover{
		Plugin: &deviceplugin.Plugin{
			Processes: last.Processes, File: last.File, Format: last.Format, Settings: last.Settings, Clock: last.Clock, Log: last.Log,
		},
		Retries: decide.NewRetries(last.Clock, last.Settings),
	}
	readers := h.seen.Plugin.Readers
	h.plugin.Observe(h.t.Context(), h.seen)
	h.seen.Plugin.Readers = readers
}

// Promise 12. Each signal makes the device plugin register again, and kubelet offers no GPU until it has.
func TestTheNextAgentSignalsOnlyReadersThatHaveNotReadTheFile(t *testing.T) {
	h := newManaged(t)
	h.plugin.Format.Parse = func([]byte) (catalog.PluginConfig, error) {
		return catalog.PluginConfig{Sharing: catalog.Sharing{Strategy: catalog.SharingTimeSlicing}}, nil
	}
	for _, step := range []struct {
		what   string
		writes string
		begins string // a reader whose container starts again after the write
		want   []int
	}{
		{what: "after the write", want: []int{pluginPID, discoveryPID}},
		{what: "when both have read it"},
		{what: "after another write", writes: "other", want: []int{pluginPID, discoveryPID}},
		{what: "when both have read that"},
		{what: "after a write before GPU feature discovery has started", writes: "third", begins: "gpu-feature-discovery", want: []int{pluginPID}},
	} {
		if step.writes != "" {
			h.clock.Step(time.Minute)
			if err := h.plugin.File.Write(t.Context(), step.writes, h.clock.Now()); err != nil {
				t.Fatal(err)
			}
		}
		if step.begins != "" {
			h.seen.Plugin.Readers[1] = h.pod(discoveryPID, step.begins, h.clock.Now().Add(time.Second))
		}
		h.restarts()
		h.expect(step.what, time.Second, catalog.SharingTimeSlicing, step.want, false)
	}
}
