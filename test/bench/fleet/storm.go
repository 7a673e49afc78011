package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/test/cluster"
)

// weather is how long the API server took for the requests of others, while the agents rested and while they did not.
type weather struct {
	share  bool
	rest   map[string]answered
	storm  map[string]answered
	agents int // requests that it answered to the agents in the storm
}

// answered are the answers to one client.
type answered struct {
	took    []time.Duration // in ascending order
	refused int             // with 429
}

func (a answered) quantile(q float64) time.Duration {
	if len(a.took) == 0 {
		return 0
	}
	return a.took[min(len(a.took)-1, int(q*float64(len(a.took))))]
}

// The others: a person, a controller, and the kubelet of a node without an agent. They ask from different priority levels of the API server.
const (
	person     = "a person"
	controller = "a controller"
	kubelet    = "a kubelet"

	prober  = "prober" // the controller's account, the ConfigMap that is written, and the kubelet's node
	askEach = 100 * time.Millisecond
)

// accounts maps the API server's names for the others to the others.
var accounts = map[string]string{
	"someone": person, "system:serviceaccount:default:" + prober: controller, "system:node:" + prober: kubelet,
}

// storm measures what others notice when all agents restart at once and all nodes are changed, for as long as its caller says.
func (o options) storm(ctx context.Context, n int, lasts time.Duration) (w weather, err error) {
	fmt.Fprintf(o.log, "%d nodes, with a share of the API server: %t\n", n, o.share)
	f, err := start(ctx, o, n)
	if err != nil {
		return weather{}, err
	}
	defer func() { err = errors.Join(err, f.stop()) }()
	if err := f.begin(ctx); err != nil {
		return weather{}, err
	}
	clients, err := f.others(ctx)
	if err != nil {
		return weather{}, err
	}
	if err := f.settle(ctx); err != nil {
		return weather{}, err
	}
	w.share = o.share
	began := time.Now()
	if err := ask(ctx, clients, o.idle); err != nil {
		return weather{}, err
	}
	if w.rest, err = f.answered(began, time.Now()); err != nil { //nolint:contextcheck // it reads a file, and bounds the one request that it makes
		return weather{}, err
	}
	f.stopAgents()
	if err := f.request(ctx); err != nil {
		return weather{}, err
	}
	before := f.tally.now()
	began = time.Now()
	if err := f.startAgents(ctx); err != nil {
		return weather{}, err
	}
	if err := ask(ctx, clients, lasts); err != nil {
		return weather{}, err
	}
	sent := f.tally.now().since(before)
	w.agents = sent.sum(func(request) bool { return true })
	fmt.Fprint(o.log, sent)
	w.storm, err = f.answered(began, time.Now()) //nolint:contextcheck // as above
	return w, err
}

// others makes the clients of the others, with what they are allowed to read and write.
func (f *fleet) others(ctx context.Context) (map[string]kubernetes.Interface, error) {
	const namespace = metav1.NamespaceDefault
	core := f.client.CoreV1()
	if _, err := core.ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: prober}}, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	if _, err := core.ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: prober}}, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	if _, err := core.Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: prober}}, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	_, err := f.client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: prober},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{
			{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: prober}, {Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "someone"},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	clients := map[string]kubernetes.Interface{}
	for who, config := range map[string]func() (*rest.Config, error){
		person:     func() (*rest.Config, error) { return f.cluster.ConfigFor("someone") },
		controller: func() (*rest.Config, error) { return f.cluster.ServiceAccountConfig(ctx, namespace, prober) },
		kubelet:    func() (*rest.Config, error) { return f.cluster.ConfigFor("system:node:"+prober, "system:nodes") },
	} {
		c, err := config()
		if err != nil {
			return nil, err
		}
		c.QPS = -1
		if clients[who], err = kubernetes.NewForConfig(c); err != nil {
			return nil, err
		}
	}
	return clients, nil
}

// ask has each of the others read and write by turns for a while. The API server's own log has what came of it.
func ask(ctx context.Context, clients map[string]kubernetes.Interface, lasts time.Duration) error {
	until, cancel := context.WithTimeout(ctx, lasts)
	defer cancel()
	var all sync.WaitGroup
	for who, client := range clients {
		all.Go(func() {
			ticks := time.NewTicker(askEach)
			defer ticks.Stop()
			for i := 0; until.Err() == nil; i++ {
				one := readAndWrite(client)[i%2]
				if who == kubelet {
					one = asKubelet(client)[i%2]
				}
				all.Go(func() { one(context.WithoutCancel(until)) })
				select {
				case <-until.Done():
				case <-ticks.C:
				}
			}
		})
	}
	all.Wait()
	return ctx.Err()
}

func readAndWrite(client kubernetes.Interface) [2]func(context.Context) {
	maps := client.CoreV1().ConfigMaps(metav1.NamespaceDefault)
	return [2]func(context.Context){
		func(ctx context.Context) { _, _ = maps.Get(ctx, prober, metav1.GetOptions{}) },
		func(ctx context.Context) {
			_, _ = maps.Patch(ctx, prober, types.MergePatchType, stamp(), metav1.PatchOptions{})
		},
	}
}

// asKubelet lists the node's pods, and writes the node's status.
func asKubelet(client kubernetes.Interface) [2]func(context.Context) {
	return [2]func(context.Context){
		func(ctx context.Context) {
			_, _ = client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + prober})
		},
		func(ctx context.Context) {
			_, _ = client.CoreV1().Nodes().Patch(ctx, prober, types.MergePatchType, stamp(), metav1.PatchOptions{}, "status")
		},
	}
}

func stamp() []byte {
	return fmt.Appendf(nil, `{"metadata":{"annotations":{"example.com/at":%q}}}`, time.Now().Format(time.RFC3339Nano))
}

// answered reads from the API server's log how long its answers to the others took.
func (f *fleet) answered(from, to time.Time) (map[string]answered, error) {
	events, err := f.cluster.Requests(func(e cluster.AuditEvent) bool {
		return accounts[e.User] != "" && e.Resource != "" && !e.Time.Before(from) && !e.Time.After(to)
	})
	if err != nil {
		return nil, err
	}
	out := map[string]answered{}
	for _, e := range events {
		a := out[accounts[e.User]]
		if e.Code == http.StatusTooManyRequests {
			a.refused++
		}
		a.took = append(a.took, e.Took)
		out[accounts[e.User]] = a
	}
	for _, a := range out {
		slices.Sort(a.took)
	}
	return out, nil
}

// forecast is the table of what others notice.
func forecast(all []weather) string {
	var out strings.Builder
	out.WriteString("| client | agents | requests | half of them | p99 | longest | refused | requests of the agents |\n")
	out.WriteString("| --- | --- | ---:| ---:| ---:| ---:| ---:| ---:|\n")
	for _, who := range []string{person, controller, kubelet} {
		row := func(when string, a answered, agents string) {
			fmt.Fprintf(&out, "| %s | %s | %d | %s | %s | %s | %d | %s |\n", who, when, len(a.took), millis(a.quantile(0.5)), millis(a.quantile(0.99)), millis(a.quantile(1)), a.refused, agents)
		}
		for _, w := range all {
			with := "without a share"
			if w.share {
				with = "with a share"
			}
			row("at rest, "+with, w.rest[who], "0")
			row("in a storm, "+with, w.storm[who], fmt.Sprint(w.agents))
		}
	}
	return out.String()
}

func millis(d time.Duration) time.Duration { return d.Round(100 * time.Microsecond) }
