package kubelet

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	informers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// volumes are the directories of one pod's volumes: hostPath, emptyDir, configMap, and the projected one of the service account.
type volumes struct {
	w       *worker
	dir     string
	changed chan struct{} // a ConfigMap that a volume shows has changed
	token   string        // of the service account
	renew   time.Time     // when it is to be another, as kubelet does when a fifth of its time is left; zero if no volume shows one
	work    sync.WaitGroup
	cancel  context.CancelFunc
}

func newVolumes(w *worker) *volumes {
	return &volumes{w: w, dir: filepath.Join(w.k.Dir, "pods", string(w.uid), "volumes"), changed: make(chan struct{}, 1)}
}

// mount makes the files of all volumes, and keeps them up to date until stop. It may be called again after an error.
func (v *volumes) mount(ctx context.Context) error {
	if !v.w.hasProcesses() {
		return nil // no one looks
	}
	if err := v.write(ctx); err != nil {
		return err
	}
	follow, cancel := context.WithCancel(context.WithoutCancel(ctx))
	v.cancel = cancel
	v.watchConfigMaps(follow)
	v.work.Go(func() { v.follow(follow) })
	return nil
}

// stop keeps the files.
func (v *volumes) stop() {
	if v.cancel != nil {
		v.cancel()
		v.work.Wait()
	}
}

// remove deletes the files of the pod.
func (v *volumes) remove() error {
	return os.RemoveAll(filepath.Dir(v.dir))
}

// follow writes the files again when a ConfigMap has changed.
func (v *volumes) follow(ctx context.Context) {
	for {
		var renew <-chan time.Time
		if !v.renew.IsZero() {
			renew = v.w.k.Clock.After(v.renew.Sub(v.w.k.Clock.Now()))
		}
		select {
		case <-ctx.Done():
			return
		case <-v.changed:
		case <-renew:
		}
		if !v.w.sleep(ctx, volumeDelay) {
			return
		}
		if err := v.write(ctx); err != nil && ctx.Err() == nil {
			v.w.log.Warn("volumes not updated", zap.Error(err))
			v.poke()
		}
	}
}

func (v *volumes) poke() {
	select {
	case v.changed <- struct{}{}:
	default:
	}
}

// watchConfigMaps watches each ConfigMap that a volume shows, by name, as the node authorizer wants it.
func (v *volumes) watchConfigMaps(ctx context.Context) {
	pod := v.w.latest()
	for _, volume := range pod.Spec.Volumes {
		for _, s := range sourcesOf(volume) {
			if s.ConfigMap == nil {
				continue
			}
			informer := informers.NewFilteredConfigMapInformer(v.w.k.client, pod.Namespace, 0, nil, func(o *metav1.ListOptions) {
				o.FieldSelector = fields.OneTermEqualSelector("metadata.name", s.ConfigMap.Name).String()
			})
			_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
				AddFunc:    func(any) { v.poke() }, // also at the start: it may have changed since the files were made
				UpdateFunc: func(_, _ any) { v.poke() },
			})
			if err != nil { // only of an informer that has stopped
				v.w.log.Error("volumes are not followed", zap.Error(err))
				continue
			}
			v.work.Go(func() { informer.RunWithContext(ctx) })
		}
	}
}

// write makes or updates the files of all volumes.
func (v *volumes) write(ctx context.Context) error {
	pod := v.w.latest()
	for _, volume := range pod.Spec.Volumes {
		dir, err := v.path(volume)
		if err != nil {
			return err
		}
		switch {
		case volume.HostPath != nil:
			err = makeHostPath(dir, volume.HostPath)
		case volume.EmptyDir != nil:
			err = os.MkdirAll(dir, 0o777)
		case len(sourcesOf(volume)) > 0:
			var files map[string]string
			if files, err = v.filesOf(ctx, pod, volume); err == nil {
				err = writeAtomically(dir, files)
			}
		default:
			err = fmt.Errorf("this kubelet knows configMap, projected, emptyDir and hostPath, and the volume is of another kind")
		}
		if err != nil {
			return fmt.Errorf("making volume %s: %w", volume.Name, err)
		}
	}
	return nil
}

// path is where the files of a volume are on this machine.
func (v *volumes) path(volume corev1.Volume) (string, error) {
	if volume.HostPath == nil {
		return filepath.Join(v.dir, volume.Name), nil
	}
	if !path.IsAbs(volume.HostPath.Path) {
		return "", fmt.Errorf("making volume %s: hostPath %q is not absolute", volume.Name, volume.HostPath.Path)
	}
	return v.w.k.onHost(volume.HostPath.Path), nil
}

// source is what a volume mount of the pod shows.
func (v *volumes) source(m corev1.VolumeMount) (string, error) {
	if m.SubPath != "" || m.SubPathExpr != "" {
		return "", fmt.Errorf("mounting %s: this kubelet does not know subPath", m.Name)
	}
	for _, volume := range v.w.latest().Spec.Volumes {
		if volume.Name == m.Name {
			return v.path(volume)
		}
	}
	return "", fmt.Errorf("mounting %s on %s: the pod has no such volume", m.Name, m.MountPath)
}

// onHost maps a path of the simulated node to this machine.
func (k *Kubelet) onHost(p string) string {
	p = path.Clean(p)
	best := ""
	for prefix := range k.HostPaths {
		if (p == prefix || strings.HasPrefix(p, strings.TrimSuffix(prefix, "/")+"/")) && len(prefix) > len(best) {
			best = prefix
		}
	}
	if best == "" {
		return filepath.Join(k.Dir, "root", p)
	}
	return filepath.Join(k.HostPaths[best], strings.TrimPrefix(p, best))
}

// makeHostPath does what the volume's type demands. Without a type, the runtime makes a directory if there is nothing.
func makeHostPath(p string, volume *corev1.HostPathVolumeSource) error {
	kind := corev1.HostPathUnset
	if volume.Type != nil {
		kind = *volume.Type
	}
	_, err := os.Stat(p)
	switch {
	case err == nil:
		return nil
	case kind == corev1.HostPathUnset || kind == corev1.HostPathDirectoryOrCreate:
		return os.MkdirAll(p, 0o755)
	}
	return fmt.Errorf("hostPath %s is to be a %s that exists: %w", volume.Path, kind, err)
}

// sourcesOf brings the volumes that show objects of the API server into one form.
func sourcesOf(volume corev1.Volume) []corev1.VolumeProjection {
	switch {
	case volume.Projected != nil:
		return volume.Projected.Sources
	case volume.ConfigMap != nil:
		return []corev1.VolumeProjection{{ConfigMap: &corev1.ConfigMapProjection{
			LocalObjectReference: volume.ConfigMap.LocalObjectReference, Items: volume.ConfigMap.Items,
		}}}
	}
	return nil
}

// filesOf collects the texts of a volume's files by their path in it.
func (v *volumes) filesOf(ctx context.Context, pod *corev1.Pod, volume corev1.Volume) (map[string]string, error) {
	files := map[string]string{}
	for _, s := range sourcesOf(volume) {
		switch {
		case s.ConfigMap != nil:
			some, err := v.configMap(ctx, pod.Namespace, s.ConfigMap)
			if err != nil {
				return nil, err
			}
			maps.Copy(files, some)
		case s.DownwardAPI != nil:
			for _, item := range s.DownwardAPI.Items {
				text, err := field(pod, cmp.Or(item.FieldRef, &corev1.ObjectFieldSelector{}).FieldPath)
				if err != nil {
					return nil, err
				}
				files[item.Path] = text
			}
		case s.ServiceAccountToken != nil:
			text, err := v.accountToken(ctx, pod, s.ServiceAccountToken)
			if err != nil {
				return nil, err
			}
			files[s.ServiceAccountToken.Path] = text
		default:
			return nil, fmt.Errorf("this kubelet knows configMap, downwardAPI and serviceAccountToken, and the volume shows something else")
		}
	}
	return files, nil
}

// configMap picks the keys that the volume shows: all, or those it names.
func (v *volumes) configMap(ctx context.Context, namespace string, s *corev1.ConfigMapProjection) (map[string]string, error) {
	object, err := v.w.k.client.CoreV1().ConfigMaps(namespace).Get(ctx, s.Name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("reading ConfigMap %s/%s: %w", namespace, s.Name, err)
	}
	if len(s.Items) == 0 {
		return object.Data, nil
	}
	files := map[string]string{}
	for _, item := range s.Items {
		text, found := object.Data[item.Key]
		if !found {
			return nil, fmt.Errorf("references non-existent config key: %s", item.Key)
		}
		files[item.Path] = text
	}
	return files, nil
}

// accountToken is a token of the pod's service account, bound to the pod.
func (v *volumes) accountToken(ctx context.Context, pod *corev1.Pod, s *corev1.ServiceAccountTokenProjection) (string, error) {
	switch {
	case s.Audience != "":
		return "", fmt.Errorf("this kubelet asks for tokens for the API server alone, and the volume wants one for %s", s.Audience)
	case v.token != "" && v.w.k.Clock.Now().Before(v.renew):
		return v.token, nil
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: s.ExpirationSeconds,
		BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
	}}
	account := cmp.Or(pod.Spec.ServiceAccountName, "default")
	answer, err := v.w.k.client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, account, request, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("asking for a token of service account %s/%s: %w", pod.Namespace, account, err)
	}
	lives := time.Duration(ptr.Deref(answer.Spec.ExpirationSeconds, 3600)) * time.Second
	v.token, v.renew = answer.Status.Token, v.w.k.Clock.Now().Add(lives*4/5)
	return v.token, nil
}
