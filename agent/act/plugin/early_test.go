package plugin_test

import (
	"path/filepath"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// newManaged has a plugin that its config manager has told of MPS, and which offers nothing any more.
func newManaged(t *testing.T) *host {
	t.Helper()
	h := newHost(t)
	h.plugin.Format = catalog.PluginFormat{Parse: func([]byte) (catalog.PluginConfig, error) {
		return catalog.PluginConfig{Sharing: catalog.Sharing{Strategy: catalog.SharingMPS, Replicas: map[string]int{nvml.ResourceGPU: 4}}}, nil
	}}
	h.plugin.Settings.DevicePlugin.Handover = config.HandoverFile
	if err := h.plugin.File.Write(t.Context(), "mps", h.clock.Now()); err != nil {
		t.Fatal(err)
	}
	return h
}

// looks observes the plugin after d, and has the agent tell it if it is early. It returns who got a signal.
func (h *host) looks(d time.Duration) []int {
	h.t.Helper()
	h.clock.Step(d)
	h.signals = nil
	h.plugin.Observe(h.t.Context(), h.seen)
	if h.seen.Plugin.Early {
		want := state.Desired{Plugin: &state.DesiredPlugin{Known: true, Sharing: h.seen.Plugin.Current.Sharing}}
		if err := h.plugin.Reload(h.t.Context(), act.Input{Seen: h.seen, Want: want, Steps: []plan.Step{{Kind: plan.ReloadPlugin}}}); err != nil {
			h.t.Fatal(err)
		}
	}
	return h.signals
}

func (h *host) tells(what string, d time.Duration, want ...int) {
	h.t.Helper()
	if got := h.looks(d); !slices.Equal(got, want) {
		h.t.Errorf("%s: the programs %v are told, want %v", what, got, want)
	}
}

func (h *host) offers(ids ...string) {
	h.seen.Kubelet.Offered = capacity.Resources{nvml.ResourceGPU: ids}
}

func TestAPluginThatHasReadOfMPSTooEarlyIsNotifiedWhenTheDaemonIsReady(t *testing.T) {
	h := newManaged(t)
	h.offers("GPU-a")
	h.tells("while it offers what it had", 0)
	h.offers()
	h.tells("without a daemon", time.Second)
	if every := deviceplugin.AwaitsMPS(h.seen, 5*time.Second); every != time.Second {
		t.Errorf("the agent looks again after %s, and no watch tells it of the daemon", every)
	}
	h.startDaemon()
	h.tells("with a daemon that is not ready", 4*time.Second)
	h.readies()
	h.tells("with a daemon that is", 100*time.Millisecond, pluginPID)
	h.tells("while it reads", 4*time.Second)
	h.offers("GPU-a::0", "GPU-a::1")
	h.tells("when it offers", 20*time.Second)
	if every := deviceplugin.AwaitsMPS(h.seen, 5*time.Second); every != 5*time.Second {
		t.Errorf("the agent looks again after %s at a plugin that waits for nothing", every)
	}
}

func TestAnEarlyPluginIsNotNotifiedForEver(t *testing.T) {
	h := newManaged(t)
	h.tells("without a daemon", 0)
	h.startDaemon()
	h.readies()
	var told []time.Duration
	for at := time.Duration(0); at < 10*time.Minute; at += time.Second {
		if len(h.looks(time.Second)) > 0 {
			told = append(told, at)
		}
	}
	if want := []time.Duration{0, 5 * time.Second, 15 * time.Second}; !slices.Equal(told, want) {
		t.Errorf("told at %v, want %v", told, want)
	}
	if every := deviceplugin.AwaitsMPS(h.seen, 5*time.Second); every != 5*time.Second {
		t.Errorf("the agent still looks again after %s", every)
	}
}

// An agent that has just been started has not seen the plugin come too early.
func TestAPluginThatOffersNothingForLongBesideAReadyDaemonWasEarly(t *testing.T) {
	h := newManaged(t)
	h.startDaemon()
	h.readies()
	h.tells("at first", 0)
	h.tells("after four seconds", 4*time.Second)
	h.tells("after five", time.Second, pluginPID)
}

// SIGHUP ends a program that does not listen to it yet.
func TestAPluginThatHasJustStartedIsNotNotified(t *testing.T) {
	h := newManaged(t)
	h.seen.DevicePlugin.Pods[0].Status.ContainerStatuses[0].State.Running.StartedAt.Time = h.clock.Now()
	h.tells("without a daemon", 0)
	h.startDaemon()
	h.readies()
	h.tells("after a second", time.Second)
	h.tells("after two", time.Second, pluginPID)
}

// A plugin that has not read the file yet is told by that alone.
func TestAPluginThatHasNotReadTheFileIsNotEarly(t *testing.T) {
	h := newManaged(t)
	folder := corev1.HostPathVolumeSource{Path: filepath.Dir(h.plugin.Settings.DevicePlugin.ConfigFile)}
	h.seen.DevicePlugin.Pods[0].Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{HostPath: &folder}}}
	h.seen.Pods = h.seen.DevicePlugin.Pods
	h.tells("without a daemon", 0)
	h.startDaemon()
	h.readies()
	h.tells("with one", 10*time.Second)
}
