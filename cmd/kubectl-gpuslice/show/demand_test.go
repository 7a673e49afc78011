package show

import (
	"cmp"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/jedib0t/go-pretty/v6/text"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// queued is a pod that asks for so many of a resource, and has waited for so long.
func queued(name, asks string, n int, waited time.Duration, labels ...string) *corev1.Pod {
	namespace, short, _ := strings.Cut(name, "/")
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: short, CreationTimestamp: metav1.NewTime(screenTime.Add(-waited)), Labels: map[string]string{}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceName(asks): *resource.NewQuantity(int64(n), resource.DecimalSI)}},
		}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
	for _, l := range labels {
		p.Labels[l] = "training"
	}
	return p
}

// inGroup is a pod that asks for two devices and names its Workload.
func inGroup(name, asks, key, workload string) *corev1.Pod {
	p := queued(name, asks, 2, time.Minute, labelQueue)
	p.Labels[key] = workload
	return p
}

// workloadOf is a Workload of so many pods, in JSON.
func workloadOf(namespace, name, owner, asks string, pods, n int, waited time.Duration, conditions ...string) string {
	var is []string
	for _, c := range conditions {
		is = append(is, fmt.Sprintf(`{"type":%q,"status":"True"}`, c))
	}
	return fmt.Sprintf(`{"metadata":{"namespace":%q,"name":%q,"creationTimestamp":%q,"ownerReferences":[%s]},
		"spec":{"queueName":"training","podSets":[{"count":%d,"template":{"spec":{"containers":[{"resources":{"requests":{%q:"%d"}}}]}}}]},"status":{"conditions":[%s]}}`,
		namespace, name, screenTime.Add(-waited).Format(time.RFC3339), owner, pods, asks, n, strings.Join(is, ","))
}

// replacing has a Workload replace another of a Job that has grown.
func replacing(other, workload string) string {
	return strings.Replace(workload, `"metadata":{`, `"metadata":{"annotations":{"kueue.x-k8s.io/workload-slice-replacement-for":"`+other+`"},`, 1)
}

const (
	ofJob      = `{"apiVersion":"batch/v1","kind":"Job","name":"j","uid":"j"}`
	ofPod      = `{"apiVersion":"v1","kind":"Pod","name":"p","uid":"p"}`
	ofSet      = `{"apiVersion":"apps/v1","kind":"StatefulSet","name":"s","uid":"s"}`
	aLocal     = `{"metadata":{"namespace":"team-a","name":"training"},"spec":{"clusterQueue":"gpus-training"}}`
	aFullQueue = `{"metadata":{"name":"gpus-training"},"spec":{"resourceGroups":[{"flavors":[
		{"name":"a","resources":[{"name":"nvidia.com/gpu","nominalQuota":"16"},{"name":"nvidia.com/mig-3g.40gb","nominalQuota":"4"}]},
		{"name":"b","resources":[{"name":"nvidia.com/gpu","nominalQuota":"0"}]}]}]},
		"status":{"flavorsReservation":[{"name":"a","resources":[{"name":"nvidia.com/gpu","total":"16"},{"name":"nvidia.com/mig-3g.40gb","total":"1"}]},{"name":"b","resources":[{"name":"nvidia.com/gpu","total":"2"}]}]}}`
)

// aKueue answers for Kueue's group: what is not in it is forbidden.
type aKueue map[string][]string // objects by path below the group

func (k aKueue) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimPrefix(r.URL.Path, "/apis/"+kueueGroup)
	objects, is := k[path]
	switch {
	case len(k) == 0:
		http.NotFound(w, r)
	case path == "":
		fmt.Fprintf(w, `{"kind":"APIGroup","versions":[{"version":%q}]}`, objects[0])
	case !is:
		http.Error(w, "no", http.StatusForbidden)
	case r.URL.Query().Get("continue") == "" && len(objects) > 1: // one object a page
		fmt.Fprintf(w, `{"metadata":{"continue":"rest"},"items":[%s]}`, objects[0])
	case len(objects) > 1:
		fmt.Fprintf(w, `{"items":[%s]}`, strings.Join(objects[1:], ","))
	default:
		fmt.Fprintf(w, `{"items":[%s]}`, strings.Join(objects, ","))
	}
}

// withKueue answers for pods and for Kueue.
type withKueue struct {
	kube.Interface
	raw kube.Interface
}

func (b withKueue) RawCore() cache.Getter { return b.raw.RawCore() }

// demands is what the command finds.
func demands(t *testing.T, k aKueue, a *advice, tenant bool, pods ...*corev1.Pod) *demanded {
	t.Helper()
	server := httptest.NewServer(k)
	t.Cleanup(server.Close)
	raw, err := kube.New(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	objects := []runtime.Object{}
	for _, p := range pods {
		objects = append(objects, p)
	}
	client := fake.NewClientset(objects...)
	if tenant {
		client.PrependReactor("list", "pods", func(a k8stesting.Action) (bool, runtime.Object, error) {
			return a.GetNamespace() == "", nil, apierrors.NewForbidden(corev1.Resource("pods"), "", nil)
		})
	}
	a.namespace, a.counts = cmp.Or(a.namespace, "team-a"), true
	said, err := a.answer(t.Context(), withKueue{clientset.Of(client), raw})
	out, is := said.(*demanded)
	if err != nil || !is {
		t.Fatalf("%T: %v", said, err)
	}
	return out
}

// some are pods and workloads of two teams.
func some() (aKueue, []*corev1.Pod) {
	placed, gone := queued("team-a/placed", "nvidia.com/gpu", 8, time.Hour), queued("team-a/gone", "nvidia.com/gpu", 8, time.Hour)
	placed.Spec.NodeName, gone.Status.Phase = "gpu-1", corev1.PodSucceeded
	kueue := aKueue{
		"": {"v1beta2"}, "/v1beta2/localqueues": {aLocal}, "/v1beta2/clusterqueues": {aFullQueue},
		"/v1beta2/workloads": {
			workloadOf("team-a", "job", ofJob, "nvidia.com/gpu", 4, 2, 5*time.Hour, "QuotaReserved"),
			workloadOf("team-a", "gated", ofPod, "nvidia.com/mig-3g.40gb", 1, 1, 2*time.Hour),
			workloadOf("team-a", "runs", ofJob, "nvidia.com/gpu", 2, 8, 9*time.Hour, "QuotaReserved", "Admitted"),
			workloadOf("team-a", "was", ofJob, "nvidia.com/gpu", 2, 8, 9*time.Hour, "Admitted", "Finished"),
			workloadOf("team-a", "cpu", ofJob, "cpu", 2, 8, 9*time.Hour),
			workloadOf("team-b", "runs", ofJob, "nvidia.com/gpu", 2, 8, 9*time.Hour, "Admitted"),
		},
	}
	pods := []*corev1.Pod{
		queued("team-a/gated", "nvidia.com/mig-3g.40gb", 1, 2*time.Hour, labelQueue), queued("team-a/of-a-job", "nvidia.com/gpu", 8, time.Minute, labelLocalQueue),
		queued("team-b/notebook-0", "nvidia.com/mig-3g.40gb", 1, 40*time.Minute), queued("team-b/notebook-1", "nvidia.com/mig-3g.40gb", 2, 50*time.Minute),
		queued("team-b/web", "cpu", 4, time.Hour), placed, gone,
	}
	return kueue, pods
}

func TestDemand(t *testing.T) {
	const ofMIG = "nvidia.com/mig-3g.40gb"
	row := func(w waiting) string {
		out := fmt.Sprintf("%s %s %d pods %d devices %s", w.Namespace, strings.TrimPrefix(w.Resource, "nvidia.com/"), w.Pods, w.Devices, age(w.Oldest, screenTime))
		if q := w.Queue; q != nil {
			out += fmt.Sprintf(", %s %d pending %d admitted", q.Name, q.Pending, q.Admitted)
			if q.Quota != nil {
				out += fmt.Sprintf(" %s %d/%d full %t", q.Quota.ClusterQueue, q.Quota.Reserved, q.Quota.Nominal, q.Quota.Full)
			}
		}
		return out
	}
	huge := queued("team-a/huge", ofMIG, 1, time.Minute)
	huge.Spec.Containers[0].Resources.Requests["nvidia.com/mig-3g.40gb"] = resource.MustParse("9E")
	claims := queued("team-a/claims", "cpu", 1, time.Minute)
	claims.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new(string)}}
	kueue, pods := some()
	without := func(path string) aKueue {
		out, _ := some()
		delete(out, path)
		return out
	}
	mig := []string{"team-b mig-3g.40gb 2 pods 3 devices 50m", "team-a mig-3g.40gb 1 pods 1 devices 120m, training 1 pending 0 admitted"}
	for name, c := range map[string]struct {
		kueue   aKueue
		pods    []*corev1.Pod
		asks    advice
		tenant  bool
		want    []string
		notes   string // a part of them; empty for none
		none    string
		columns string // the last ones
	}{
		"with Kueue, a row for each queue": {kueue: kueue, pods: pods, columns: "workloads quota", want: []string{
			"team-a gpu 5 pods 16 devices 5h, training 1 pending 1 admitted gpus-training 18/16 full true", mig[0], mig[1] + " gpus-training 1/4 full false",
		}},
		"without Kueue": {pods: pods, columns: "devices oldest", want: []string{
			mig[0], "team-a gpu 1 pods 8 devices 60s", "team-a mig-3g.40gb 1 pods 1 devices 120m",
		}},
		"in a version that is not known": {kueue: aKueue{"": {"v3"}}, pods: pods[2:3], columns: "devices oldest", notes: "in v3 alone", want: []string{
			"team-b mig-3g.40gb 1 pods 1 devices 40m",
		}},
		"workloads of an older Kueue": {
			kueue:   aKueue{"": {"v1beta1"}, "/v1beta1/workloads": {workloadOf("team-a", "job", ofJob, ofMIG, 1, 1, time.Hour)}, "/v1beta1/localqueues": {}, "/v1beta1/clusterqueues": {}},
			columns: "workloads quota", want: []string{"team-a mig-3g.40gb 1 pods 1 devices 60m, training 1 pending 0 admitted"},
		},
		"without the right to workloads": {kueue: without("/v1beta2/workloads"), pods: pods[:1], columns: "devices oldest", notes: "listing workloads needs rights that you lack", want: []string{
			"team-a mig-3g.40gb 1 pods 1 devices 120m",
		}},
		"without the right to ClusterQueues": {kueue: without("/v1beta2/clusterqueues"), pods: pods[:1], columns: "queue workloads", notes: "listing clusterqueues needs rights that you lack", want: []string{
			"team-a gpu 4 pods 8 devices 5h, training 1 pending 1 admitted", mig[1],
		}},
		"a tenant sees the own namespace": {
			kueue: aKueue{"": {"v1beta2"}, "/v1beta2/namespaces/team-b/workloads": {}, "/v1beta2/namespaces/team-b/localqueues": {}}, pods: pods, tenant: true,
			asks: advice{namespace: "team-b"}, columns: "queue workloads", notes: "of namespace team-b alone", want: mig[:1],
		},
		"a namespace that the user names": {pods: pods, asks: advice{only: "team-b"}, columns: "devices oldest", want: mig[:1]},
		"a request of any size":           {pods: []*corev1.Pod{huge}, columns: "devices oldest", want: []string{"team-a mig-3g.40gb 1 pods 1048576 devices 60s"}},
		"a claim does not say how many":   {pods: []*corev1.Pod{claims}, columns: "devices oldest", notes: "may wait for other devices than GPUs", want: []string{"team-a by claim 1 pods 0 devices 60s"}},
		"groups of pods that are made one by one": {
			pods: []*corev1.Pod{inGroup("team-a/set-0", ofMIG, keyGroup, "set"), inGroup("team-a/lws-0", "nvidia.com/gpu", keyWorkload, "lws"), inGroup("team-b/other-0", ofMIG, keyGroup, "set")},
			kueue: aKueue{
				"": {"v1beta2"}, "/v1beta2/localqueues": {}, "/v1beta2/clusterqueues": {},
				"/v1beta2/workloads": {
					workloadOf("team-a", "set", ofPod+","+ofSet, ofMIG, 3, 2, time.Hour), workloadOf("team-a", "lws", ofSet, "nvidia.com/gpu", 1, 2, time.Hour),
					workloadOf("team-a", "later", ofSet, ofMIG, 2, 1, time.Hour),
				},
			},
			columns: "workloads quota", want: []string{
				"team-a mig-3g.40gb 5 pods 8 devices 60m, training 2 pending 0 admitted", "team-a gpu 1 pods 2 devices 60m, training 1 pending 0 admitted",
				"team-b mig-3g.40gb 1 pods 2 devices 60s, training 0 pending 0 admitted",
			},
		},
		"a Job that grows, and one that has grown and was evicted": {
			pods: []*corev1.Pod{queued("team-a/grows-3", "nvidia.com/gpu", 2, time.Minute, labelQueue)},
			kueue: aKueue{
				"": {"v1beta2"}, "/v1beta2/localqueues": {}, "/v1beta2/clusterqueues": {},
				"/v1beta2/workloads": {
					workloadOf("team-a", "grows", ofJob, "nvidia.com/gpu", 3, 2, time.Hour, "Admitted"),
					replacing("team-a/grows", workloadOf("team-a", "grows-2", ofJob, "nvidia.com/gpu", 4, 2, time.Minute)),
					workloadOf("team-a", "was", ofJob, ofMIG, 3, 2, time.Hour, "Admitted", "Finished"), replacing("team-a/was", workloadOf("team-a", "was-2", ofJob, ofMIG, 4, 2, time.Minute)),
				},
			},
			columns: "workloads quota", want: []string{
				"team-a mig-3g.40gb 4 pods 8 devices 60s, training 1 pending 0 admitted", "team-a gpu 1 pods 2 devices 60s, training 1 pending 1 admitted",
			},
		},
		"a template that limits alone, of which some pods are done, and one of a name for a terminal": {
			kueue: aKueue{
				"": {"v1beta2"}, "/v1beta2/localqueues": {}, "/v1beta2/clusterqueues": {},
				"/v1beta2/workloads": {
					strings.NewReplacer(`"requests"`, `"limits"`, `"count":5`, `"name":"main","count":5`, `"conditions"`, `"reclaimablePods":[{"name":"main","count":2},{"name":"other","count":1}],"conditions"`).
						Replace(workloadOf("team-a", "job", ofJob, "nvidia.com/gpu", 5, 2, time.Hour)),
					strings.Replace(workloadOf("team-a", "red", ofJob, ofMIG, 1, 1, time.Hour), ofMIG, `nvidia.com/mig-\u001b[31m`, 1),
				},
			},
			columns: "workloads quota", want: []string{
				"team-a gpu 3 pods 6 devices 60m, training 1 pending 0 admitted",
				`team-a mig-\x1b[31m 1 pods 1 devices 60m, training 1 pending 0 admitted`,
			},
		},
		"what is no GPU does not count": {
			pods: []*corev1.Pod{
				queued("team-a/none", "nvidia.com/gpu", 0, time.Minute), queued("team-a/nic", "nvidia.com/nic", 1, time.Minute), queued("team-a/host", "nvidia.com/hostdev", 1, time.Minute),
			},
			kueue: aKueue{
				"": {"v1beta2"}, "/v1beta2/workloads": {workloadOf("team-a", "nics", ofJob, "nvidia.com/nic", 4, 2, time.Hour), workloadOf("team-a", "none", ofJob, "nvidia.com/gpu", 4, 0, time.Hour), workloadOf("team-a", "scaled", ofJob, "nvidia.com/gpu", 0, 1, time.Hour)},
				"/v1beta2/localqueues": {}, "/v1beta2/clusterqueues": {},
			},
			columns: "workloads quota", none: "no pod that requests a GPU is pending, and no workload of Kueue",
		},
		"nothing waits": {
			kueue: aKueue{"": {"v1beta2"}, "/v1beta2/workloads": {}, "/v1beta2/localqueues": {}, "/v1beta2/clusterqueues": {}}, columns: "workloads quota",
			none: "no pod that requests a GPU is pending, and no workload of Kueue",
		},
		"a list that is none": {kueue: aKueue{"": {"v1beta2"}, "/v1beta2/workloads": {`"none"`}}, columns: "devices oldest", notes: "reading workloads: json", none: "no pod that requests a GPU is pending"},
	} {
		t.Run(name, func(t *testing.T) {
			out := demands(t, c.kueue, &c.asks, c.tenant, c.pods...)
			var got, columns []string
			for _, w := range out.Waiting {
				got = append(got, row(w))
			}
			for _, one := range out.columns {
				columns = append(columns, one.name)
			}
			if diff := gocmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if notes := strings.Join(out.Notes, "; "); !strings.Contains(notes, c.notes) || c.notes == "" && notes != "" {
				t.Errorf("notes %q, want %q", notes, c.notes)
			}
			if out.none != c.none || !strings.HasSuffix(strings.Join(columns, " "), c.columns) || out.verdict() != nil {
				t.Errorf("none %q, columns %q", out.none, columns)
			}
		})
	}
}

func TestScreensOfDemand(t *testing.T) {
	kueue, pods := some()
	out := demands(t, kueue, &advice{}, false, pods...)
	out.note("quotas of Kueue are left out: listing clusterqueues needs rights that you lack")
	for _, width := range []int{160, 80} {
		said, err := out.text("", output.Paper{Width: width, Now: screenTime})
		if err != nil {
			t.Fatal(err)
		}
		golden(t, fmt.Sprintf("testdata/demand-%d.txt", width), said)
		for line := range strings.SplitSeq(said, "\n") {
			if n := text.StringWidthWithoutEscSequences(line); n > width {
				t.Errorf("%d columns: %s", n, line)
			}
		}
	}
	for _, format := range []string{output.JSON, output.YAML, output.HTML} {
		said, err := out.text(format, output.Paper{Now: screenTime})
		if err != nil {
			t.Fatal(err)
		}
		golden(t, "testdata/demand."+format, said)
	}
}
