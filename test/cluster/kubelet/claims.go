package kubelet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/google/renameio/v2"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// claimsFile has the name that a real kubelet gives it, but a form of our own.
const claimsFile = "dra_manager_state"

// claimTable is kubelet's record of the claims that are, or are about to be, prepared on the node. It keeps a claim
// until the drivers have unprepared it, whether or not the API server still has it.
type claimTable struct {
	file string // what survives the kubelet

	mu     sync.Mutex
	claims map[string]*nodeClaim // by namespace/name
}

// nodeClaim is one claim on record.
type nodeClaim struct {
	Namespace string                   `json:"namespace"`
	Name      string                   `json:"name"`
	UID       types.UID                `json:"uid"`
	Pods      sets.Set[types.UID]      `json:"pods"`
	Drivers   map[string][]claimDevice `json:"drivers"` // of its allocation, with what each has prepared

	prepared bool // by all of them, under this kubelet
}

// claimDevice is what a driver has prepared of a claim.
type claimDevice struct {
	Pool    string   `json:"pool"`
	Name    string   `json:"name"`
	ShareID *string  `json:"shareID,omitempty"`
	CDI     []string `json:"cdi,omitempty"`
}

func newClaimTable(dir string) *claimTable {
	return &claimTable{file: filepath.Join(dir, claimsFile), claims: map[string]*nodeClaim{}}
}

// restore reads what the last kubelet has left.
func (t *claimTable) restore() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.claims = map[string]*nodeClaim{}
	text, err := os.ReadFile(t.file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(text, &t.claims)
	}
	if err != nil {
		return fmt.Errorf("reading the record of claims: %w", err)
	}
	return nil
}

// save writes the record. The caller holds t.mu.
func (t *claimTable) save() error {
	text, err := json.MarshalIndent(t.claims, "", "  ")
	if err == nil {
		err = renameio.WriteFile(t.file, text, 0o600)
	}
	if err != nil {
		return fmt.Errorf("writing the record of claims: %w", err)
	}
	return nil
}

// add puts the claim on record for the pod.
func (t *claimTable) add(claim *resourcev1.ResourceClaim, pod types.UID) (*nodeClaim, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := claim.Namespace + "/" + claim.Name
	c := t.claims[key]
	if c == nil {
		c = &nodeClaim{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID, Pods: sets.New[types.UID](), Drivers: map[string][]claimDevice{}}
		for _, driver := range driversOf(claim) {
			c.Drivers[driver] = nil
		}
		t.claims[key] = c
	}
	if c.UID != claim.UID {
		return nil, fmt.Errorf("old ResourceClaim with same name %s and different UID %s still exists (previous pod force-deleted?!)", claim.Name, c.UID)
	}
	c.Pods.Insert(pod)
	return c, t.save()
}

// isPrepared reports whether all drivers have prepared the claim.
func (t *claimTable) isPrepared(c *nodeClaim) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return c.prepared
}

// prepared takes over what the drivers have prepared.
func (t *claimTable) prepared(c *nodeClaim, by map[string][]claimDevice) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.Copy(c.Drivers, by)
	c.prepared = true
	return t.save()
}

// driversOf are the drivers that have given the claim a device.
func (t *claimTable) driversOf(c *nodeClaim) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Sorted(maps.Keys(c.Drivers))
}

// of are the claims of the pod, by name.
func (t *claimTable) of(pod types.UID) []*nodeClaim {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []*nodeClaim
	for _, key := range slices.Sorted(maps.Keys(t.claims)) {
		if t.claims[key].Pods.Has(pod) {
			all = append(all, t.claims[key])
		}
	}
	return all
}

// leave reports whether the pod is the last one of the claim. If it is not, it leaves the claim to the others.
func (t *claimTable) leave(c *nodeClaim, pod types.UID) (last bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.Pods.Len() == 1 {
		return c.Pods.Has(pod), nil
	}
	c.Pods.Delete(pod)
	return false, t.save()
}

func (t *claimTable) remove(c *nodeClaim) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.claims, c.Namespace+"/"+c.Name)
	return t.save()
}

// owners are the pods on record, as far as the record knows them.
func (t *claimTable) owners() []*corev1.Pod {
	t.mu.Lock()
	defer t.mu.Unlock()
	pods := map[types.UID]*corev1.Pod{}
	for _, c := range t.claims {
		for uid := range c.Pods {
			pods[uid] = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, UID: uid}}
		}
	}
	return slices.Collect(maps.Values(pods))
}

// idsOf are the devices that the pod has by claims, as driver/pool/device.
func (t *claimTable) idsOf(pod types.UID) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	ids := sets.New[string]()
	for _, c := range t.claims {
		if !c.Pods.Has(pod) {
			continue
		}
		for driver, devices := range c.Drivers {
			for _, d := range devices {
				ids.Insert(driver + "/" + d.Pool + "/" + d.Name)
			}
		}
	}
	return sets.List(ids)
}

// dynamic reports what a container has by claims: all of a claim that the container asks anything of. It is nothing while one of them is not on record.
func (t *claimTable) dynamic(pod *corev1.Pod, c *corev1.Container) []*podresourcesv1.DynamicResource {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []*podresourcesv1.DynamicResource
	for _, name := range claimsOfContainer(pod, c) {
		claim := t.claims[pod.Namespace+"/"+name]
		if claim == nil {
			return nil
		}
		of := &podresourcesv1.DynamicResource{ClaimName: name, ClaimNamespace: pod.Namespace}
		for _, driver := range slices.Sorted(maps.Keys(claim.Drivers)) {
			var cdi []*podresourcesv1.CDIDevice // those of a device, and of the ones before it: so does a real kubelet
			for _, d := range claim.Drivers[driver] {
				for _, id := range d.CDI {
					cdi = append(cdi, &podresourcesv1.CDIDevice{Name: id})
				}
				of.ClaimResources = append(of.ClaimResources, &podresourcesv1.ClaimResource{
					CdiDevices: slices.Clone(cdi), DriverName: driver, PoolName: d.Pool, DeviceName: d.Name, ShareId: d.ShareID,
				})
			}
		}
		all = append(all, of)
	}
	return all
}

// claimsOfPod are the names of the pod's claims: its own, those that were made of templates, and the one for extended resources.
func claimsOfPod(pod *corev1.Pod) []string {
	var names []string
	for _, c := range pod.Spec.ResourceClaims {
		if name, needed := claimName(pod, c); needed {
			names = append(names, name)
		}
	}
	if s := pod.Status.ExtendedResourceClaimStatus; s != nil {
		names = append(names, s.ResourceClaimName)
	}
	return names
}

// claimsOfContainer are the claims that the container uses.
func claimsOfContainer(pod *corev1.Pod, of *corev1.Container) []string {
	var names []string
	for _, c := range pod.Spec.ResourceClaims {
		uses := slices.ContainsFunc(of.Resources.Claims, func(use corev1.ResourceClaim) bool { return use.Name == c.Name })
		if name, needed := claimName(pod, c); uses && needed {
			names = append(names, name)
		}
	}
	s := pod.Status.ExtendedResourceClaimStatus
	if s != nil && slices.ContainsFunc(s.RequestMappings, func(m corev1.ContainerExtendedResourceRequest) bool { return m.ContainerName == of.Name }) {
		names = append(names, s.ResourceClaimName)
	}
	return names
}

// claimName is the name of the claim that the pod knows by another; false if there is none to be had.
func claimName(pod *corev1.Pod, of corev1.PodResourceClaim) (name string, needed bool) {
	if of.ResourceClaimName != nil {
		return *of.ResourceClaimName, true
	}
	for _, s := range pod.Status.ResourceClaimStatuses { // it was made from a template
		if s.Name == of.Name && s.ResourceClaimName != nil {
			return *s.ResourceClaimName, true
		}
	}
	return "", false
}

// isMade reports whether the claim is there, or the pod's status says that none is needed.
func isMade(pod *corev1.Pod, of corev1.PodResourceClaim) bool {
	return of.ResourceClaimName != nil ||
		slices.ContainsFunc(pod.Status.ResourceClaimStatuses, func(s corev1.PodResourceClaimStatus) bool { return s.Name == of.Name })
}

// byClaim reports whether the container has the extended resource by a claim, so that kubelet asks no device plugin for
// it.
func byClaim(pod *corev1.Pod, container, resource string) bool {
	s := pod.Status.ExtendedResourceClaimStatus
	return s != nil && slices.ContainsFunc(s.RequestMappings, func(m corev1.ContainerExtendedResourceRequest) bool {
		return m.ContainerName == container && m.ResourceName == resource
	})
}

func driversOf(c *resourcev1.ResourceClaim) []string {
	drivers := sets.New[string]()
	if c.Status.Allocation != nil {
		for _, d := range c.Status.Allocation.Devices.Results {
			drivers.Insert(d.Driver)
		}
	}
	return sets.List(drivers)
}

// claim makes the drivers prepare the pod's resource claims before its containers start. It returns when they are
// ready, or false if the pod is to end first or the kubelet stops. The claims of a pod that survived are already
// prepared.
func (w *worker) claim(ctx context.Context) bool {
	for ctx.Err() == nil {
		var err error
		if !w.survived {
			err = w.k.prepare(ctx, w.latest())
		}
		if err == nil || w.isDeleting() {
			return err == nil
		}
		w.log.Warn("resource claims not prepared", zap.Error(err))
		w.report(ctx)
		w.sleep(ctx, retryDelay)
	}
	return false
}

// unclaim makes the drivers unprepare the pod's claims. Until all have, the pod still counts as running: its phase
// stays, its devices are not free, and its object is not deleted. It returns false if the kubelet stops first.
func (w *worker) unclaim(ctx context.Context) bool {
	for {
		err := w.k.unprepare(ctx, w.uid)
		if err == nil {
			return true
		}
		w.log.Warn("resource claims not unprepared", zap.Error(err))
		w.report(ctx)
		if !w.sleep(ctx, retryDelay) {
			return false
		}
	}
}

// prepare makes the drivers of the pod's claims prepare their devices. Unless all drivers are there, it records none of
// the claims.
func (k *Kubelet) prepare(ctx context.Context, pod *corev1.Pod) error {
	if slices.ContainsFunc(pod.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool { return !isMade(pod, c) }) {
		return fmt.Errorf("pod %q: ResourceClaim not created yet", pod.Namespace+"/"+pod.Name)
	}
	var claims []*resourcev1.ResourceClaim
	for _, name := range claimsOfPod(pod) {
		claim, err := k.client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("fetch ResourceClaim %s: %w", name, err)
		}
		if !slices.ContainsFunc(claim.Status.ReservedFor, func(r resourcev1.ResourceClaimConsumerReference) bool { return r.UID == pod.UID }) {
			return fmt.Errorf("pod %s (%s) is not allowed to use ResourceClaim %s (%s)", pod.Name, pod.UID, name, claim.UID)
		}
		for _, driver := range driversOf(claim) {
			if _, err := k.drivers.registered(ctx, driver); err != nil {
				return err
			}
		}
		claims = append(claims, claim)
	}
	for _, claim := range claims {
		c, err := k.claims.add(claim, pod.UID)
		if err != nil {
			return err
		}
		if k.claims.isPrepared(c) {
			continue
		}
		by := map[string][]claimDevice{}
		for _, driver := range k.claims.driversOf(c) {
			if by[driver], err = k.prepareBy(ctx, driver, c); err != nil {
				return err
			}
		}
		if err := k.claims.prepared(c, by); err != nil {
			return err
		}
	}
	return nil
}

func (k *Kubelet) prepareBy(ctx context.Context, driver string, c *nodeClaim) (devices []claimDevice, err error) {
	return devices, k.drivers.ask(ctx, driver, func(ctx context.Context, d dra.DRAPluginClient) error {
		answer, err := d.NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{Claims: []*dra.Claim{c.request()}})
		if err != nil {
			return fmt.Errorf("NodePrepareResources: %w", err)
		}
		result, said := answer.GetClaims()[string(c.UID)]
		switch {
		case !said:
			return errors.New("NodePrepareResources skipped 1 ResourceClaims")
		case result.GetError() != "":
			return fmt.Errorf("NodePrepareResources failed for ResourceClaim %s: %s", c.Name, result.GetError())
		}
		for _, d := range result.GetDevices() {
			devices = append(devices, claimDevice{Pool: d.GetPoolName(), Name: d.GetDeviceName(), ShareID: d.ShareId, CDI: d.GetCdiDeviceIds()})
		}
		return nil
	})
}

// unprepare makes the drivers unprepare the claims that no other pod uses.
func (k *Kubelet) unprepare(ctx context.Context, pod types.UID) error {
	for _, c := range k.claims.of(pod) {
		last, err := k.claims.leave(c, pod)
		if err != nil {
			return err
		}
		if !last {
			continue
		}
		for _, driver := range k.claims.driversOf(c) {
			if err := k.unprepareBy(ctx, driver, c); err != nil {
				return err
			}
		}
		if err := k.claims.remove(c); err != nil {
			return err
		}
	}
	return nil
}

func (k *Kubelet) unprepareBy(ctx context.Context, driver string, c *nodeClaim) error {
	return k.drivers.ask(ctx, driver, func(ctx context.Context, d dra.DRAPluginClient) error {
		answer, err := d.NodeUnprepareResources(ctx, &dra.NodeUnprepareResourcesRequest{Claims: []*dra.Claim{c.request()}})
		if err != nil {
			return fmt.Errorf("NodeUnprepareResources: %w", err)
		}
		result, said := answer.GetClaims()[string(c.UID)]
		switch {
		case !said:
			return errors.New("NodeUnprepareResources skipped 1 ResourceClaims")
		case result.GetError() != "":
			return fmt.Errorf("NodeUnprepareResources failed for ResourceClaim %s: %s", c.Name, result.GetError())
		}
		return nil
	})
}

func (c *nodeClaim) request() *dra.Claim {
	return &dra.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}
}
