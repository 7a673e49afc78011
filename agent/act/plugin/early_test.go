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

// newManaged has a plugin that its config manager has notified of MPS, and which offers nothing any more.
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

// observe observes the plugin after d, and has the agent notify it if it is early. It returns who got a signal.
func (h *host) observe(d time.Duration) []int {
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

func (h *host) notifies(what string, d time.Duration, want ...int) {
	h.t.Helper()
	if got := h.observe(d); !slices.Equal(got, want) {
		h.t.Errorf("%s: the programs %v are notified, want %v", what, got, want)
	}
}

func (h *host) offers(ids ...string) {
	h.seen.Kubelet.Offered = capacity.Resources{nvml.ResourceGPU: ids}
}

func TestAPluginThatHasReadOfMPSTooEarlyIsNotifiedWhenTheDaemonIsReady(t *testing.T) {
	h := newManaged(t)
	h.offers("GPU-a")
	h.notifies("while it offers what it had", 0)
	h.offers()
	h.notifies("without a daemon", time.Second)
	if every := deviceplugin.AwaitsMPS(h.seen, 5*time.Second); every != time.Second {
		t.Errorf("the agent polls again after %s, and no watch shows it the daemon", every)
	}
	h.startDaemon()
	h.notifies("with a daemon that is not ready", 4*time.Second)
	h.readies()
	h.notifies("with a daemon that is", 100*time.Millisecond, pluginPID)
	h.notifies("while it reads", 4*time.Second)
	h.offers("GPU-a::0", "GPU-a::1")
	h.notifies("when it offers", 20*time.Second)
	if every := deviceplugin.AwaitsMPS(h.seen, 5*time.Second); every != 5*time.Second {
		t.Errorf("the agent polls again after %s at a plugin that waits for nothing", every)
	}
}

func TestAnEarlyPluginIsNotNotifiedForEver(t *testing.T) {
	h := newManaged(t)
	h.notifies("without a daemon", 0)
	h.startDaemon()
	h.readies()
	var notified []time.Duration
	for at := time.Duration(0); at < 10*time.Minute; at += time.Second {
		if len(h.observe(time.Second)) > 0 {
			notified = append(notified, at)
		}
	}
	if want := []time.Duration{0, 5 * time.Second, 15 * time.Second}; !slices.Equal(notified, want) {
		t.Errorf("notified at %v, want %v", notified, want)
	}
	if every := deviceplugin.AwaitsMPS(h.seen, 5*time.Second); every != 5*time.Second {
		t.Errorf("the agent still polls again after %s", every)
	}
}

// An agent that has just been started has not seen the plugin come too early.
func TestAPluginThatOffersNothingForLongBesideAReadyDaemonWasEarly(t *testing.T) {
	h := newManaged(t)
	h.startDaemon()
	h.readies()
	h.notifies("at first", 0)
	h.notifies("after four seconds", 4*time.Second)
	h.notifies("after five", time.Second, pluginPID)
}

// SIGHUP ends a program that does not listen to it yet.
func TestAPluginThatHasJustStartedIsNotNotified(t *testing.T) {
	h := newManaged(t)
	h.seen.DevicePlugin.Pods[0].Status.ContainerStatuses[0].State.Running.StartedAt.Time = h.clock.Now()
	h.notifies("without a daemon", 0)
	h.startDaemon()
	h.readies()
	h.notifies("after a second", time.Second)
	h.notifies("after two", time.Second, pluginPID)
}

// A plugin that has not read the file yet is notified by that alone.
func TestAPluginThatHasNotReadTheFileIsNotEarly(t *testing.T) {
	h := newManaged(t)
	folder := corev1.HostPathVolumeSource{Path: filepath.Dir(h.plugin.Settings.DevicePlugin.ConfigFile)}
	h.seen.DevicePlugin.Pods[0].Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{HostPath: &folder}}}
	h.seen.Pods = h.seen.DevicePlugin.Pods
	h.notifies("without a daemon", 0)
	h.startDaemon()
	h.readies()
	h.notifies("with one", 10*time.Second)
}
