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
)

// tokenLife is the share of a token's life after which kubelet asks for the next one.
const tokenLife = 0.8

// volumes are the directories of one pod's volumes.
type volumes struct {
	w       *worker
	dir     string
	changed chan struct{} // an object that a volume shows has changed
	work    sync.WaitGroup
	cancel  context.CancelFunc

	mu     sync.Mutex
	tokens map[string]token // by volume and path
}

type token struct {
	text    string
	refresh time.Time
}

func newVolumes(w *worker) *volumes {
	return &volumes{
		w: w, dir: filepath.Join(w.k.Dir, "pods", string(w.uid), "volumes"),
		changed: make(chan struct{}, 1), tokens: map[string]token{},
	}
}

// mount makes the files of all volumes, and keeps them up to date until stop. It may be called again after an error.
func (v *volumes) mount(ctx context.Context) error {
	if !v.w.hasProcesses() {
		return nil // nobody looks
	}
	if err := v.write(ctx); err != nil {
		return err
	}
	follow, cancel := context.WithCancel(context.WithoutCancel(ctx))
	v.cancel = cancel
	v.watchObjects(follow)
	v.work.Go(func() { v.follow(follow) })
	return nil
}

// stop leaves the files as they are.
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

// follow writes the files anew when an object has changed or a token grows old.
func (v *volumes) follow(ctx context.Context) {
	for {
		if !v.awaitChange(ctx) {
			return
		}
		if err := v.write(ctx); err != nil && ctx.Err() == nil {
			v.w.log.Warn("volumes not updated", zap.Error(err))
			if !v.w.sleep(ctx, retryDelay) {
				return
			}
			v.poke()
		}
	}
}

// awaitChange returns when the files may have to change, and false when ctx has ended.
func (v *volumes) awaitChange(ctx context.Context) bool {
	var old <-chan time.Time
	if at, some := v.nextRefresh(); some {
		timer := v.w.k.Clock.NewTimer(at.Sub(v.w.k.Clock.Now()))
		defer timer.Stop()
		old = timer.C()
	}
	select {
	case <-ctx.Done():
		return false
	case <-old:
		return true
	case <-v.changed:
		return v.w.sleep(ctx, v.w.k.VolumeDelay)
	}
}

func (v *volumes) poke() {
	select {
	case v.changed <- struct{}{}:
	default:
	}
}

// watchObjects watches each ConfigMap and Secret that a volume shows, by name, as the node authorizer wants it.
func (v *volumes) watchObjects(ctx context.Context) {
	pod := v.w.latest()
	configMaps, secrets := shownObjects(pod)
	only := func(name string) func(*metav1.ListOptions) {
		return func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("metadata.name", name).String()
		}
	}
	var all []cache.SharedIndexInformer
	for name := range configMaps {
		all = append(all, informers.NewFilteredConfigMapInformer(v.w.k.client, pod.Namespace, 0, nil, only(name)))
	}
	for name := range secrets {
		all = append(all, informers.NewFilteredSecretInformer(v.w.k.client, pod.Namespace, 0, nil, only(name)))
	}
	for _, informer := range all {
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

func shownObjects(pod *corev1.Pod) (configMaps, secrets map[string]bool) {
	configMaps, secrets = map[string]bool{}, map[string]bool{}
	for _, volume := range pod.Spec.Volumes {
		for _, s := range sourcesOf(volume) {
			switch {
			case s.ConfigMap != nil:
				configMaps[s.ConfigMap.Name] = true
			case s.Secret != nil:
				secrets[s.Secret.Name] = true
			}
		}
	}
	return configMaps, secrets
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
			var files map[string]file
			if files, err = v.filesOf(ctx, pod, volume); err == nil {
				err = writeAtomically(dir, files)
			}
		default:
			err = fmt.Errorf("this kubelet knows configMap, secret, projected, downwardAPI, emptyDir and hostPath, and the volume is of another kind")
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
	if m.SubPathExpr != "" {
		return "", fmt.Errorf("mounting %s: subPathExpr %q is not known to this kubelet: use subPath", m.Name, m.SubPathExpr)
	}
	for _, volume := range v.w.latest().Spec.Volumes {
		if volume.Name != m.Name {
			continue
		}
		dir, err := v.path(volume)
		if err != nil || m.SubPath == "" {
			return dir, err
		}
		below := filepath.Join(dir, filepath.Join("/", m.SubPath))
		if volume.EmptyDir != nil {
			return below, os.MkdirAll(below, 0o777)
		}
		return filepath.EvalSymlinks(below)
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
	case kind == corev1.HostPathFileOrCreate:
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			return err
		}
		return os.WriteFile(p, nil, 0o644)
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
			LocalObjectReference: volume.ConfigMap.LocalObjectReference, Items: volume.ConfigMap.Items, Optional: volume.ConfigMap.Optional,
		}}}
	case volume.Secret != nil:
		return []corev1.VolumeProjection{{Secret: &corev1.SecretProjection{
			LocalObjectReference: corev1.LocalObjectReference{Name: volume.Secret.SecretName}, Items: volume.Secret.Items, Optional: volume.Secret.Optional,
		}}}
	case volume.DownwardAPI != nil:
		return []corev1.VolumeProjection{{DownwardAPI: &corev1.DownwardAPIProjection{Items: volume.DownwardAPI.Items}}}
	}
	return nil
}

func modeOf(volume corev1.Volume) os.FileMode {
	mode := corev1.ConfigMapVolumeSourceDefaultMode
	for _, m := range []*int32{
		cmp.Or(volume.Projected, &corev1.ProjectedVolumeSource{}).DefaultMode,
		cmp.Or(volume.ConfigMap, &corev1.ConfigMapVolumeSource{}).DefaultMode,
		cmp.Or(volume.Secret, &corev1.SecretVolumeSource{}).DefaultMode,
		cmp.Or(volume.DownwardAPI, &corev1.DownwardAPIVolumeSource{}).DefaultMode,
	} {
		if m != nil {
			mode = *m
		}
	}
	return os.FileMode(mode) & os.ModePerm
}

// filesOf collects the files of a volume by their path in it.
func (v *volumes) filesOf(ctx context.Context, pod *corev1.Pod, volume corev1.Volume) (map[string]file, error) {
	files, mode := map[string]file{}, modeOf(volume)
	for _, s := range sourcesOf(volume) {
		var some map[string]file
		var err error
		switch {
		case s.ConfigMap != nil:
			var values map[string]string
			if values, err = v.w.k.configMap(ctx, pod.Namespace, s.ConfigMap.Name, s.ConfigMap.Optional); err == nil {
				some, err = items(values, s.ConfigMap.Items, isSet(s.ConfigMap.Optional), mode)
			}
		case s.Secret != nil:
			var values map[string]string
			if values, err = v.w.k.secret(ctx, pod.Namespace, s.Secret.Name, s.Secret.Optional); err == nil {
				some, err = items(values, s.Secret.Items, isSet(s.Secret.Optional), mode)
			}
		case s.DownwardAPI != nil:
			some, err = v.downward(pod, s.DownwardAPI.Items, mode)
		case s.ServiceAccountToken != nil:
			var text string
			text, err = v.token(ctx, pod, volume.Name, s.ServiceAccountToken)
			some = map[string]file{s.ServiceAccountToken.Path: {text, mode}}
		default:
			err = fmt.Errorf("this kubelet knows configMap, secret, downwardAPI and serviceAccountToken, and the volume shows something else")
		}
		if err != nil {
			return nil, err
		}
		maps.Copy(files, some)
	}
	return files, nil
}

// items picks the keys that the volume shows: all, or those it names.
func items(values map[string]string, named []corev1.KeyToPath, optional bool, mode os.FileMode) (map[string]file, error) {
	files := map[string]file{}
	if len(named) == 0 {
		for key, text := range values {
			files[key] = file{text, mode}
		}
		return files, nil
	}
	for _, item := range named {
		text, found := values[item.Key]
		if !found && !optional {
			return nil, fmt.Errorf("references non-existent config key: %s", item.Key)
		}
		if found {
			files[item.Path] = file{text, modeOr(item.Mode, mode)}
		}
	}
	return files, nil
}

func (v *volumes) downward(pod *corev1.Pod, named []corev1.DownwardAPIVolumeFile, mode os.FileMode) (map[string]file, error) {
	files := map[string]file{}
	for _, item := range named {
		if item.FieldRef == nil {
			return nil, fmt.Errorf("file %s of the downward API is no fieldRef, the only one this kubelet knows", item.Path)
		}
		text, err := v.w.field(pod, item.FieldRef.FieldPath)
		if err != nil {
			return nil, err
		}
		files[item.Path] = file{text, modeOr(item.Mode, mode)}
	}
	return files, nil
}

func modeOr(own *int32, mode os.FileMode) os.FileMode {
	if own == nil {
		return mode
	}
	return os.FileMode(*own) & os.ModePerm
}

// token is a token of the pod's service account, bound to the pod and good for most of its life.
func (v *volumes) token(ctx context.Context, pod *corev1.Pod, volume string, s *corev1.ServiceAccountTokenProjection) (string, error) {
	key, now := volume+"/"+s.Path, v.w.k.Clock.Now()
	v.mu.Lock()
	known := v.tokens[key]
	v.mu.Unlock()
	if known.text != "" && now.Before(known.refresh) {
		return known.text, nil
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: s.ExpirationSeconds,
		BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
	}}
	if s.Audience != "" {
		request.Spec.Audiences = []string{s.Audience}
	}
	account := cmp.Or(pod.Spec.ServiceAccountName, "default")
	answer, err := v.w.k.client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, account, request, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("asking for a token of service account %s/%s: %w", pod.Namespace, account, err)
	}
	life := answer.Status.ExpirationTimestamp.Sub(now)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.tokens[key] = token{text: answer.Status.Token, refresh: now.Add(time.Duration(float64(life) * tokenLife))}
	return answer.Status.Token, nil
}

// nextRefresh is when the first token grows old; false if there is none.
func (v *volumes) nextRefresh() (at time.Time, some bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, t := range v.tokens {
		if !some || t.refresh.Before(at) {
			at, some = t.refresh, true
		}
	}
	return at, some
}
