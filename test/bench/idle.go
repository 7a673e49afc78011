package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/incumbent"
)

// idleScenario is a full node without a request. It shows what a program keeps in memory there. It is the row of the third table.
var idleScenario = scenario{
	name:  "idle: eight H100s in 56 slices, 110 pods on the node",
	gpus:  []gpusim.GPUSpec{{Model: "H100-80GB", Count: 8, MIG: true}},
	start: repeat(8, map[string]int{"1g.10gb": 7}),
	users: map[string]int{"1g.10gb": 56},
	rules: `[{devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}]`,
}

const (
	podsOfNode = 110 // kubelet's default limit
	// settling is how long a program runs undisturbed before its memory counts: by then an agent has looked thoroughly at the GPUs.
	// watching is how long the bench looks at the memory.
	settling, watching = 75 * time.Second, 30 * time.Second
	// replacing is how many of the pods without a GPU are replaced at once, and rounds how often that happens.
	replacing, rounds = 25, 20
)

// idleRow is one program on the idle node.
type idleRow struct {
	program measured
	runs    []kept
}

// kept is the most anonymous memory of a program in KiB, for each time. reported is how long after its start it reported on the node; 0 if it
// did not.
type kept struct {
	idle, churn, after int
	reported           time.Duration
}

// runIdle looks at a program on a fresh node.
func (st *stage) runIdle(ctx context.Context, dir string, r idleRow, nvidia incumbent.Programs) (k kept, err error) {
	sv, is := r.program.on(st, nvidia).(service)
	if !is {
		return k, fmt.Errorf("%s watches no label", r.program.name)
	}
	at, err := st.open(ctx, dir, idleScenario, sv.plugin)
	if err != nil {
		return k, err
	}
	defer func() { err = errors.Join(err, at.close(ctx)) }()
	if err := at.fill(ctx); err != nil {
		return k, err
	}
	seen, err := watchNode(ctx, at.client, at.Name, false)
	if err != nil {
		return k, err
	}
	defer seen.stop()
	began := time.Now()
	p, err := sv.start(ctx, at)
	if err != nil {
		return k, err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	if _, err := mostAnonymous(ctx, p.pid, settling); err != nil {
		return k, err
	}
	k.reported = seen.reported(began)
	if k.idle, err = mostAnonymous(ctx, p.pid, watching); err != nil {
		return k, err
	}
	for range rounds {
		if err := at.replace(ctx); err != nil {
			return k, err
		}
		one, err := mostAnonymous(ctx, p.pid, 0)
		if err != nil {
			return k, err
		}
		k.churn = max(k.churn, one)
	}
	if _, err := mostAnonymous(ctx, p.pid, settling); err != nil {
		return k, err
	}
	k.after, err = mostAnonymous(ctx, p.pid, watching)
	return k, err
}

// reported is how long after the moment the node had the condition that a first pass ends with.
func (w *watch) reported(began time.Time) time.Duration {
	for _, s := range w.since(began) {
		for _, c := range s.node.Status.Conditions {
			if c.Type == config.ConditionGPUPartitionReady {
				return s.at.Sub(began)
			}
		}
	}
	return 0
}

// fill makes pods without a GPU until the node has as many as kubelet takes.
func (at *site) fill(ctx context.Context) error {
	all, err := at.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + at.Name})
	if err != nil {
		return fmt.Errorf("listing the pods of node %s: %w", at.Name, err)
	}
	for i := range podsOfNode - len(all.Items) {
		if err := at.startOther(ctx, i); err != nil {
			return err
		}
	}
	return at.untilFull(ctx)
}

// untilFull waits until as many pods run on the node as kubelet takes.
func (at *site) untilFull(ctx context.Context) error {
	return at.until(ctx, fmt.Sprintf("%d pods to run on node %s", podsOfNode, at.Name), func(ctx context.Context) (bool, error) {
		running, err := at.running(ctx, metav1.NamespaceAll, "")
		return len(running) == podsOfNode, err
	})
}

// replace ends some of the pods without a GPU, and makes others of the same names.
func (at *site) replace(ctx context.Context) error {
	now := int64(0)
	for i := range replacing {
		err := at.client.CoreV1().Pods(usersNamespace).Delete(ctx, at.otherName(i), metav1.DeleteOptions{GracePeriodSeconds: &now})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("removing a pod: %w", err)
		}
	}
	for i := range replacing {
		if err := at.startOther(ctx, i); err != nil {
			return err
		}
	}
	return at.untilFull(ctx) // before that the agent has not seen them all
}

func (at *site) otherName(i int) string { return fmt.Sprintf("%s-web-%d", at.Name, i) }

// startOther makes a pod without a GPU, as long as those that Helm charts make.
func (at *site) startOther(ctx context.Context, i int) error {
	quantities := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("32Mi")}
	container := func(name string) corev1.Container {
		c := corev1.Container{
			Name: name, Image: "registry.example/team/" + name + ":1.2.3", Args: []string{"--config=/etc/" + name + "/config.yaml", "--port=8080"},
			Resources:      corev1.ResourceRequirements{Requests: quantities, Limits: quantities},
			VolumeMounts:   []corev1.VolumeMount{{Name: "config", MountPath: "/etc/" + name}, {Name: "tmp", MountPath: "/tmp"}},
			ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/bin/ready"}}}},
			LivenessProbe:  &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/bin/alive"}}}},
		}
		for j := range 20 {
			c.Env = append(c.Env, corev1.EnvVar{Name: fmt.Sprintf("SETTING_%d", j), Value: fmt.Sprintf("the value of setting %d of %s", j, name)})
		}
		return c
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: at.otherName(i),
			Labels: map[string]string{
				"app": "web", "app.kubernetes.io/name": "web", "app.kubernetes.io/instance": at.Name, "app.kubernetes.io/version": "1.2.3", "helm.sh/chart": "web-1.2.3",
			},
			Annotations: map[string]string{"checksum/config": strings.Repeat("5e", 32), "prometheus.io/scrape": "true", "prometheus.io/port": "8080"},
		},
		Spec: corev1.PodSpec{
			NodeSelector: map[string]string{corev1.LabelHostname: at.Name},
			Containers:   []corev1.Container{container("web"), container("proxy")},
			Volumes: []corev1.Volume{
				{Name: "config", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
				{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			},
		},
	}
	if _, err := at.client.CoreV1().Pods(usersNamespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("making a pod without a GPU: %w", err)
	}
	return nil
}

// mostAnonymous is the most anonymous memory that a process has within a time, in KiB, looked at each half second and at least once.
func mostAnonymous(ctx context.Context, pid int, within time.Duration) (most int, err error) {
	end := time.After(within)
	ticker := time.NewTicker(time.Second / 2)
	defer ticker.Stop()
	for {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return 0, fmt.Errorf("looking what memory process %d has: %w", pid, err)
		}
		now, err := anonymous(string(status))
		if err != nil {
			return 0, fmt.Errorf("looking what memory process %d has: %w", pid, err)
		}
		most = max(most, now)
		select {
		case <-ticker.C:
		case <-end:
			return most, nil
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// anonymous reads "RssAnon:     61234 kB", which a process that has ended no longer has.
func anonymous(status string) (int, error) {
	_, rest, found := strings.Cut(status, "\nRssAnon:")
	if !found {
		return 0, errors.New("it has ended")
	}
	value, _, _ := strings.Cut(strings.TrimSpace(rest), " kB\n")
	return strconv.Atoi(value)
}

// idleNotes say how the third table is to be read.
const idleNotes = `Figures are medians of the anonymous memory that a program has resident, the most of half a minute.

idle   75 seconds after its start, on a node of eight H100s in 56 slices with 110 pods, of which 56 have a slice
churn  while 25 of the other pods are replaced, 20 times
after  75 seconds after that

first pass  from the start of the process until the node has its condition; nothing is asked for, of which mig-manager says nothing`

// tabulateIdle renders the third table, for a terminal or as Markdown.
func tabulateIdle(rows []idleRow, markdown bool) string {
	w := newTable("by", "idle", "churn", "after", "first pass")
	for _, r := range rows {
		w.AppendRow(table.Row{
			r.program.name, mebibytes(r.median(func(k kept) int { return k.idle })), mebibytes(r.median(func(k kept) int { return k.churn })),
			mebibytes(r.median(func(k kept) int { return k.after })), r.firstPass(),
		})
	}
	return rendered(w, idleNotes, markdown)
}

func (r idleRow) median(of func(kept) int) int {
	var all []int
	for _, k := range r.runs {
		all = append(all, of(k))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

func mebibytes(kibibytes int) string { return fmt.Sprintf("%.1f MiB", float64(kibibytes)/1024) }

func (r idleRow) firstPass() string {
	reported := r.median(func(k kept) int { return int(k.reported.Milliseconds()) })
	if reported == 0 {
		return ""
	}
	return fmt.Sprintf("%.1f s", float64(reported)/1000)
}
