package validate

import (
	"context"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/devices"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// askedByLabels are the profiles and MIG configs of the cluster, which are read when a node of NVIDIA's DRA driver asks for one.
type askedByLabels struct {
	client   kube.Interface
	settings config.Settings
	read     bool
	profiles map[string]catalog.Profile
	mig      map[string]catalog.MIGConfig
}

// refused says why a node of the driver cannot be as its labels ask; empty if it can, or if what they name is not there.
func (a *askedByLabels) refused(ctx context.Context, labels map[string]string) (string, error) {
	profile, mig := labels[config.LabelProfile], labels[config.LabelMIGConfig]
	if key := labels[config.LabelDevicePluginConfig]; key != "" && profile == "" && !strings.HasPrefix(key, config.OwnPluginKey) {
		return fmt.Sprintf("its label %s=%s asks for a config of the device plugin, which NVIDIA's DRA driver does not have: remove the label; "+
			"a claim's own config shares its device", config.LabelDevicePluginConfig, key), nil
	}
	if profile == "" && mig == "" {
		return "", nil
	}
	if !a.read {
		if err := a.readBoth(ctx); err != nil {
			return "", err
		}
	}
	if profile != "" {
		p := a.profiles[profile]
		return refusedFor("profile "+profile, devices.Refused(p.MIG, p.Sharing)), nil
	}
	rules, _ := catalog.Merge(nil, a.mig).Config(mig)
	return refusedFor("MIG config "+mig, devices.Refused(rules, nil)), nil
}

func refusedFor(what, why string) string {
	if why == "" {
		return ""
	}
	return fmt.Sprintf("its label names %s: %s", what, why)
}

// readBoth reads the catalogs that are there. Mistakes in them are reported by validate -f.
func (a *askedByLabels) readBoth(ctx context.Context) error {
	a.read = true
	text, err := a.text(ctx, a.settings.Profiles)
	if err != nil {
		return err
	}
	a.profiles, _ = catalog.ParseProfiles(text)
	if text, err = a.text(ctx, a.settings.MIGConfigMap); err != nil {
		return err
	}
	a.mig, _ = migparted.Parse(text)
	return nil
}

func (a *askedByLabels) text(ctx context.Context, at config.ConfigMapKey) ([]byte, error) {
	if at.Name == "" {
		return nil, nil
	}
	found, err := a.client.ConfigMaps(at.Namespace).Get(ctx, at.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading ConfigMap %s/%s, which labels of nodes name: %w", at.Namespace, at.Name, err)
	}
	return []byte(found.Data[at.Key]), nil
}
