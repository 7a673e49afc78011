package kubelet

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/renameio/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// checkpointFile has the name that a real kubelet gives it, but a form of our own.
const checkpointFile = "kubelet_internal_checkpoint"

// checkpoint is what survives the kubelet: without it, a restart would hand out devices that pods are using.
type checkpoint struct {
	BootID     string                    `json:"bootID"`
	Registered []string                  `json:"registered"` // resources that are known, though none of their devices
	Pods       map[types.UID]*podDevices `json:"pods"`
}

// podDevices are the devices of one pod.
type podDevices struct {
	Namespace  string                              `json:"namespace"`
	Name       string                              `json:"name"`
	Containers map[string]map[string]*containerIDs `json:"containers"` // by container, then by resource
}

// containerIDs are one container's devices of one resource, and what the plugin gave with them.
type containerIDs struct {
	IDs    []string           `json:"ids"`
	NUMA   map[string][]int64 `json:"numa,omitempty"` // by id; a device whose plugin reported no topology is absent
	Envs   map[string]string  `json:"envs,omitempty"`
	Mounts []hostMount        `json:"mounts,omitempty"`
}

type hostMount struct {
	Host      string `json:"host"`
	Container string `json:"container"`
}

// all lists the ids of every container.
func (p *podDevices) all() []string {
	ids := sets.New[string]()
	for _, resources := range p.Containers {
		for _, c := range resources {
			ids.Insert(c.IDs...)
		}
	}
	return sets.List(ids)
}

// stub is the pod as far as the checkpoint knows it.
func (p *podDevices) stub(uid types.UID) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: uid}}
}

// restore starts from the checkpoint: each resource is known and has no device until its plugin registers again.
func (t *deviceTable) restore() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.saved = nil // a test may have removed the file while no kubelet ran
	path := filepath.Join(t.dir, checkpointFile)
	text, err := os.ReadFile(path)
	var c checkpoint
	switch {
	case errors.Is(err, fs.ErrNotExist):
		t.rebooted = true
		return t.save()
	case err != nil:
		return fmt.Errorf("reading the record of devices: %w", err)
	}
	if err := json.Unmarshal(text, &c); err != nil {
		return fmt.Errorf("reading the record of devices %s (remove it to forget which pod has which device): %w", path, err)
	}
	t.rebooted = c.BootID != t.bootID
	t.resources, t.pods = map[string]*pluginResource{}, c.Pods
	if t.pods == nil {
		t.pods = map[types.UID]*podDevices{}
	}
	for _, name := range c.Registered {
		t.resources[name] = &pluginResource{devices: map[string]*v1beta1.Device{}, healthy: sets.New[string](), stopped: t.clock.Now()}
	}
	return t.save()
}

// save writes the checkpoint if it differs from the last one written: a plugin reports its devices over and over. The
// caller holds t.mu.
func (t *deviceTable) save() error {
	text, err := json.MarshalIndent(checkpoint{BootID: t.bootID, Registered: sets.List(sets.KeySet(t.resources)), Pods: t.pods}, "", "  ")
	if err != nil {
		return fmt.Errorf("writing the record of devices: %w", err)
	}
	if bytes.Equal(text, t.saved) {
		return nil
	}
	if err := renameio.WriteFile(filepath.Join(t.dir, checkpointFile), text, 0o600); err != nil {
		return fmt.Errorf("writing the record of devices: %w", err)
	}
	t.saved = text
	return nil
}
