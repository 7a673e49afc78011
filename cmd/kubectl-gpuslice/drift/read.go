package drift

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// Groups lists the versions of an API group that a cluster serves; none if it does not serve the group.
type Groups func(ctx context.Context, group string) (versions []string, err error)

// GroupsOf asks the API server.
func GroupsOf(client kube.Interface) Groups {
	return func(ctx context.Context, group string) ([]string, error) {
		text, err := client.RawCore().Get().AbsPath("/apis/"+group).SetHeader("Accept", runtime.ContentTypeJSON).DoRaw(ctx)
		if apierrors.IsNotFound(err) {
			return nil, nil
		}
		var served metav1.APIGroup
		if err == nil {
			err = json.Unmarshal(text, &served)
		}
		if err != nil {
			return nil, fmt.Errorf("reading the versions of the API group %s: %w", group, err)
		}
		var out []string
		for _, v := range served.Versions {
			out = append(out, v.Version)
		}
		return out, nil
	}
}

// Versions that are read where the cluster serves no newer one.
const (
	formerKueue    = "kueue.x-k8s.io/v1beta1"
	formerInfra    = "infrastructure.opendatahub.io/v1alpha1"
	formerProfiles = "dashboard.opendatahub.io/v1alpha1"
)

// family are the versions of one group that are read, the best first.
type family struct {
	versions []string
	newest   string // that render writes, of this group or of the one that replaces it
}

var (
	kueue = family{[]string{kinds.KueueVersion, formerKueue}, kinds.KueueVersion}
	infra = family{[]string{kinds.HardwareProfileVersion, formerInfra}, kinds.HardwareProfileVersion}
	board = family{[]string{formerProfiles}, kinds.HardwareProfileVersion}
)

// needs says what a cluster has to have for the newest version.
func (f family) needs() string { return f.newest + " needs " + kinds.Needs[f.newest] }

func (c *comparison) readObjects(ctx context.Context) error {
	var served [3][]schema.GroupVersion
	for i, f := range []family{kueue, infra, board} {
		var err error
		if served[i], err = c.served(ctx, f); err != nil {
			return err
		}
	}
	queues, profiles, former := served[0], served[1], served[2]
	var flat []flatProfile
	var made []anyQueue
	err := errors.Join(
		read(ctx, c, kinds.KindResourceFlavor, queues, "resourceflavors", &c.flavors),
		read(ctx, c, kinds.KindClusterQueue, queues, "clusterqueues", &made),
		read(ctx, c, kinds.KindLocalQueue, queues, "localqueues", &c.locals),
		read(ctx, c, kinds.KindResourceQuota, []schema.GroupVersion{corev1.SchemeGroupVersion}, "resourcequotas", &c.quotas),
	)
	for _, q := range made {
		c.queues = append(c.queues, q.queue())
	}
	switch current := len(profiles) > 0 && profiles[0].String() == kinds.HardwareProfileVersion; {
	case err != nil:
		return err
	case current:
		return errors.Join(
			read(ctx, c, kinds.KindHardwareProfile, profiles, "hardwareprofiles", &c.profiles),
			read(ctx, c, kinds.KindHardwareProfile, former, "hardwareprofiles", &c.outdated),
		)
	default:
		err = errors.Join(
			read(ctx, c, kinds.KindHardwareProfile, profiles, "hardwareprofiles", &flat),
			read(ctx, c, kinds.KindHardwareProfile, former, "hardwareprofiles", &flat),
		)
	}
	for _, p := range flat {
		c.profiles = append(c.profiles, p.profile())
	}
	return err
}

// served are those versions of the family that the cluster serves. If it serves the group in none of them, that is an error: its objects promise
// what this program cannot compare.
func (c *comparison) served(ctx context.Context, f family) ([]schema.GroupVersion, error) {
	var read []schema.GroupVersion
	var names []string
	for _, version := range f.versions {
		v, err := schema.ParseGroupVersion(version)
		if err != nil {
			return nil, err
		}
		read, names = append(read, v), append(names, v.Version)
	}
	served, err := c.known.Groups(ctx, read[0].Group)
	if err != nil || len(served) == 0 {
		return nil, err
	}
	read = slices.DeleteFunc(read, func(v schema.GroupVersion) bool { return !slices.Contains(served, v.Version) })
	if len(read) == 0 {
		return nil, fmt.Errorf("the cluster serves the API group %s in %s alone, and gpuslice-agent reads it in %s: cannot compare what its objects promise; %s; a newer gpuslice-agent may read newer versions",
			strings.SplitN(f.versions[0], "/", 2)[0], sanitize.Listed(served), sanitize.Listed(names), f.needs())
	}
	if read[0].Version != names[0] {
		c.Older = append(c.Older, fmt.Sprintf("%s (%s)", read[0], f.needs()))
	}
	return read, nil
}

// flatProfile is a HardwareProfile of versions that had some of the fields in other places.
type flatProfile struct {
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              struct {
		kinds.HardwareProfileSpec `json:",inline"`

		Enabled      *bool             `json:"enabled"`
		NodeSelector map[string]string `json:"nodeSelector"`
	} `json:"spec"`
}

func (p flatProfile) profile() kinds.HardwareProfile {
	out := kinds.HardwareProfile{ObjectMeta: p.ObjectMeta, Spec: p.Spec.HardwareProfileSpec}
	if p.Spec.Enabled != nil && !*p.Spec.Enabled {
		out.Annotations = map[string]string{kinds.AnnotationDisabled: "true"}
	}
	if out.Spec.Scheduling == nil && len(p.Spec.NodeSelector) > 0 {
		out.Spec.Scheduling = &kinds.Scheduling{Type: kinds.SchedulingNode, Node: &kinds.NodeScheduling{NodeSelector: p.Spec.NodeSelector}}
	}
	return out
}

// anyQueue is a ClusterQueue of each version.
type anyQueue struct {
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              struct {
		kinds.ClusterQueueSpec `json:",inline"`

		Cohort string `json:"cohort"` // of v1beta1
	} `json:"spec"`
}

func (q anyQueue) queue() kinds.ClusterQueue {
	out := kinds.ClusterQueue{ObjectMeta: q.ObjectMeta, Spec: q.Spec.ClusterQueueSpec}
	out.Spec.CohortName = cmp.Or(out.Spec.CohortName, q.Spec.Cohort)
	return out
}

// read lists all objects of a kind, in the first version that the cluster serves, if it serves any.
func read[T any](ctx context.Context, c *comparison, kind string, versions []schema.GroupVersion, plural string, into *[]T) error {
	for _, version := range versions {
		there, err := readVersion(ctx, c, kind, version, plural, into)
		if there || err != nil {
			return err
		}
	}
	return nil
}

func readVersion[T any](ctx context.Context, c *comparison, kind string, version schema.GroupVersion, plural string, into *[]T) (there bool, err error) {
	options := metav1.ListOptions{Limit: atATime}
	for {
		page, err := c.objects.Resource(version.WithResource(plural)).List(ctx, options)
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("reading objects of kind %s, %s: %w", kind, version, err)
		}
		for _, item := range page.Items {
			text, err := item.MarshalJSON()
			if err != nil {
				return false, err
			}
			var object T
			if err := json.Unmarshal(text, &object); err != nil {
				return false, fmt.Errorf("reading %s %s: %w", kind, item.GetName(), err)
			}
			*into = append(*into, object)
		}
		c.Read[kind] += len(page.Items)
		if len(*into) > most {
			return false, fmt.Errorf("there are more than %d objects of kind %s", most, kind)
		}
		if options.Continue = page.GetContinue(); options.Continue == "" {
			return true, nil
		}
	}
}
