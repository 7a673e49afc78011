// Package observe reads the administrator's ConfigMaps, the host's processes that have GPUs open, and leftovers of an earlier agent or a mig-manager
// without a journal. Other packages read the rest.
package observe

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/maintenance"
)

// Files reads the administrators' ConfigMaps for one node.
type Files struct {
	Objects  *watch.Objects
	Settings config.Settings
}

// maintenance reads what the maintenance file says of the node. If it cannot read the file, the node begins no change.
func (f *Files) maintenance(ctx context.Context, seen *state.Observed) error {
	file, err := f.read(ctx, f.Settings.Maintenance)
	if err != nil {
		return err
	}
	seen.Pool.File = maintenance.Without()
	seen.Pool.Err = file.Read(func(data []byte) (err error) {
		seen.Pool.File, err = maintenance.Parse(data)
		return err
	})
	seen.Pool.File.Asked = f.asked
	seen.ChoosePool()
	return nil
}

// asked returns the label that counts on the node, and its request. If only the settings name a config, no node has that label.
func (f *Files) asked(node *corev1.Node) (label, name string) {
	want, _ := state.Asked(node, f.Settings.DevicePlugin.DefaultConfig)
	if want.Label == config.LabelMIGConfig { // its name may be joined with that of a config of the device plugin
		return want.Label, node.Labels[want.Label]
	}
	return want.Label, want.Name
}

// Observe reads the files of the administrator. If it cannot read one, it ends the observation only if the node's labels need that file.
func (f *Files) Observe(ctx context.Context, seen *state.Observed) (err error) {
	want, _ := state.Asked(seen.Node, f.Settings.DevicePlugin.DefaultConfig)
	geometry := want.Name != "" && want.Label != config.LabelDevicePluginConfig
	if seen.Files.Configs, err = f.read(ctx, f.Settings.MIGConfigMap); err != nil && geometry {
		return err
	}
	if seen.Files.Profiles, err = f.read(ctx, f.Settings.Profiles); err != nil && geometry && want.Label == config.LabelProfile {
		return err
	}
	if err = f.maintenance(ctx, seen); err != nil && (want.Name != "" || seen.Journal != nil) {
		return err
	}
	if err != nil {
		seen.Pool.Err = err
	}
	return nil
}

// read reads a file of the administrator. If the file is missing or broken, that is an observation, not an error: the generated
// configs still work.
func (f *Files) read(ctx context.Context, ref config.ConfigMapKey) (*state.ConfigMapFile, error) {
	if ref.Name == "" {
		return nil, nil
	}
	file := &state.ConfigMapFile{Name: fmt.Sprintf("ConfigMap %s/%s, key %s", ref.Namespace, ref.Name, ref.Key)}
	call, cancel := context.WithTimeout(ctx, f.Settings.Timeouts.APICall)
	defer cancel()
	object, err := f.Objects.ConfigMap(call, ref.Namespace, ref.Name)
	switch {
	case apierrors.IsNotFound(err):
		file.Absent = true
		return file, nil
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		file.Err = fmt.Errorf("reading %s: %w", file.Name, err)
		return file, nil
	case err != nil:
		file.Err = fmt.Errorf("reading %s: %w", file.Name, err)
		return file, file.Err
	}
	data, ok := object.Data[ref.Key]
	if !ok {
		file.Err = fmt.Errorf("%s: no such key; put the file there, or name its key in the settings", file.Name)
	}
	file.Data = []byte(data)
	return file, nil
}
