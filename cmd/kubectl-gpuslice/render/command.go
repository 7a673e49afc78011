package render

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	forms "k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/taints"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// rendering has the flags that all kinds of objects share.
type rendering struct {
	of           cluster.AgentSettings
	files, pools []string
	nodes        string // selector
	strategy     string
	dra, byType  bool
}

// Command is render: it writes objects, and changes nothing.
func Command(o *cluster.Options) *cobra.Command {
	var r rendering
	c := &cobra.Command{
		Use:   "render (kueue|flavors|kueue-config|dra|hardwareprofiles|quota -f FILE (--pool PROFILE=NODESxGPUS:MODEL... | --nodes SELECTOR)) | prices -f FILE",
		Short: "Write the queues, quotas and hardware profiles that go with profiles and pools, or prices of GPUs; changes nothing",
		Long: "Write, as YAML, queues, quotas and hardware profiles for the devices that profiles make of GPUs. A quota is what a node of the profile\n" +
			"advertises, times the nodes of its pool. Give the nodes by --pool, or have --nodes read them from the cluster: there each counts by its labels.\n" +
			"Only plan, on a node, knows whether GPUs have room for a profile's instances.",
		Example: "kubectl gpuslice render kueue -f deploy/examples/configmap-pools.yaml \\\n" +
			"  --pool small-inference=4x8:NVIDIA-A100-SXM4-80GB --local-queue team/inference\n" +
			"kubectl -n gpuslice get configmap gpuslice-profiles -o yaml |\n" +
			"  kubectl gpuslice render quota -f - --nodes gpuslice.io/profile --to team",
		Args: cobra.ArbitraryArgs,
		// Without this the help would go where a pipe reads manifests, with exit code 0.
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("render does not write %s: say kueue, flavors, kueue-config, dra, hardwareprofiles, quota or prices",
					sanitize.Cut(strconv.Quote(args[0]), manifest.LongestName))
			}
			return errors.New("say what to render: kueue, flavors, kueue-config, dra, hardwareprofiles, quota or prices")
		},
	}
	flags := c.PersistentFlags()
	r.of.Bind(flags)
	flags.StringArrayVarP(&r.files, "file", "f", nil, "file or folder of profiles or MIG configs, bare or in manifests; several by several flags; - for standard input")
	flags.StringArrayVar(&r.pools, "pool", nil, "nodes that ask for a profile, PROFILE=NODESxGPUS:MODEL, with @TYPE behind it for those of an instance type; several by several flags")
	flags.StringVar(&r.nodes, "nodes", "", "selector of the nodes to count in the cluster, each for the profile or MIG config that its label asks for")
	flags.BoolVar(&r.byType, "by-instance-type", false, "with --nodes: a flavor for each instance type of a pool's nodes, with the taints that all of the type have")
	flags.StringVar(&r.strategy, "mig-strategy", "", "MIG strategy of the device plugin, single or mixed, for profiles that name none; without it one that fits")
	flags.BoolVar(&r.dra, "dra", false,
		"the nodes have NVIDIA's DRA driver in place of its device plugin: each MIG device counts by its profile, whatever strategy a profile names")
	cluster.CompleteFlag(c, "mig-strategy", string(config.MIGStrategySingle), string(config.MIGStrategyMixed))
	c.AddCommand(renderKueue(o, &r), renderFlavors(o, &r), renderKueueConfig(o, &r), renderDRA(o, &r), renderHardwareProfiles(o, &r), renderQuota(o, &r), renderPrices(&r))
	return c
}

func renderKueue(o *cluster.Options, r *rendering) *cobra.Command {
	var q Queues
	var locals, priorities []string
	c := renders(o, r, "kueue", "ResourceFlavors, a ClusterQueue of each pool, cohorts of each class of isolation, and LocalQueues", func() error {
		wrong := []error{checkName("cluster-queue", q.ClusterQueue, objectForm), orNone("cohort", q.Cohort, objectForm), orNone("topology", q.Topology, objectForm)}
		q.Local = nil
		for _, text := range locals {
			local, err := ParseLocalQueue(text)
			switch {
			case err != nil:
				wrong = append(wrong, err)
			case slices.ContainsFunc(q.Local, func(other LocalQueue) bool { return other.Namespace == local.Namespace && other.Name == local.Name }):
				wrong = append(wrong, fmt.Errorf("flag --local-queue is %q twice", sanitize.Cut(local.Namespace+"/"+local.Name, manifest.LongestName)))
			default:
				wrong = append(wrong, checkName("local-queue", local.Namespace, namespaceForm), checkName("local-queue", local.Name, queueForm))
			}
			q.Local = append(q.Local, local)
		}
		var err error
		q.Priorities, err = parsePriorities(priorities)
		return errors.Join(append(wrong, err)...)
	}, func(given []Given) ([]any, error) {
		q.DRA = r.dra
		return Kueue(given, q)
	})
	c.Flags().StringVar(&q.ClusterQueue, "cluster-queue", "gpus", "names of the ClusterQueues begin so: NAME-POOL")
	c.Flags().StringVar(&q.Cohort, "cohort", "", "names of the cohorts begin so: NAME-shared, NAME-whole, NAME-mig; without it they begin as those of the ClusterQueues")
	c.Flags().StringVar(&q.Topology, "topology", "", "Topology that Kueue places pods by: with one it counts what nodes can give out now")
	c.Flags().BoolVar(&q.OpenShift, "openshift", false, "with what Red Hat's build of Kueue needs: the Kueue of its operator, and the label of the LocalQueues' namespaces")
	c.Flags().StringArrayVar(&locals, "local-queue", nil, "LocalQueue to make, NAMESPACE/NAME, or of several ClusterQueues NAMESPACE/NAME=PROFILE; several by several flags")
	c.Flags().StringArrayVar(&priorities, "priority", nil, "WorkloadPriorityClass to make for workloads of a profile, PROFILE=VALUE; several by several flags")
	return c
}

func renderFlavors(o *cluster.Options, r *rendering) *cobra.Command {
	var topology string
	c := renders(o, r, "flavors", "ResourceFlavors", func() error { return orNone("topology", topology, objectForm) },
		func(given []Given) ([]any, error) { return Flavors(given, topology) })
	c.Flags().StringVar(&topology, "topology", "", "Topology that Kueue places pods by")
	return c
}

func renderHardwareProfiles(o *cluster.Options, r *rendering) *cobra.Command {
	var to Profiles
	var cpu, memory string
	c := renders(o, r, "hardwareprofiles", "HardwareProfiles of OpenShift AI", func() error {
		var wrong, also error
		to.CPU, wrong = amountOf("cpu", cpu)
		to.Memory, also = amountOf("memory", memory)
		return errors.Join(checkName("to", to.Namespace, namespaceForm), orNone("local-queue", to.LocalQueue, queueForm), wrong, also)
	}, func(given []Given) ([]any, error) { return HardwareProfiles(given, to) })
	c.Flags().StringVar(&to.Namespace, "to", "redhat-ods-applications", "namespace of the objects; the default is seen by all projects")
	c.Flags().StringVar(&to.LocalQueue, "local-queue", "", "LocalQueue that admits the workloads; without it labels select their nodes")
	c.Flags().StringVar(&cpu, "cpu", "", "CPUs of a workload, DEFAULT:MOST, like 2:8; without it the profile leaves them to the workload")
	c.Flags().StringVar(&memory, "memory", "", "memory of a workload, DEFAULT:MOST, like 8Gi:16Gi; without it the profile leaves it to the workload")
	return c
}

// amountOf reads a flag, and returns nil without it.
func amountOf(flag, text string) (*Amount, error) {
	if text == "" {
		return nil, nil
	}
	amount, err := ParseAmount(text)
	if err != nil {
		return nil, fmt.Errorf("flag --%s is %w", flag, err)
	}
	return amount, nil
}

func renderQuota(o *cluster.Options, r *rendering) *cobra.Command {
	var namespace, name string
	var priorities []string
	var read []Priority
	c := renders(o, r, "quota", "a ResourceQuota of all that the pools give, and PriorityClasses", func() error {
		if namespace == "" {
			return errors.New("name the namespace of the quota by --to")
		}
		var err error
		read, err = parsePriorities(priorities)
		return errors.Join(checkName("to", namespace, namespaceForm), checkName("name", name, objectForm), err)
	}, func(given []Given) ([]any, error) { return Quota(given, namespace, name, read) })
	c.Flags().StringVar(&namespace, "to", "", "namespace of the quota")
	c.Flags().StringVar(&name, "name", "gpus", "name of the quota")
	c.Flags().StringArrayVar(&priorities, "priority", nil, "priority of the pods of a profile, PROFILE=VALUE; several by several flags")
	return c
}

func parsePools(texts []string) (pools []Pool, err error) {
	for _, text := range texts {
		p, err := ParsePool(text)
		if err != nil {
			return nil, err
		}
		pools = append(pools, p)
	}
	return pools, nil
}

func parsePriorities(texts []string) (read []Priority, err error) {
	var wrong []error
	for _, text := range texts {
		p, err := ParsePriority(text)
		wrong, read = append(wrong, err), append(read, p)
	}
	return read, errors.Join(wrong...)
}

// nameForm is what the API server takes as a name: without this check the user would learn of another when he applies the output.
type nameForm struct {
	takes func(string) bool
	write string
}

var (
	objectForm = nameForm{
		func(name string) bool { return len(forms.IsDNS1123Subdomain(name)) == 0 },
		"write a name that Kubernetes takes: lower-case letters, digits, '-' and '.', at most 253, beginning and ending with a letter or digit",
	}
	namespaceForm = nameForm{
		func(name string) bool { return len(forms.IsDNS1123Label(name)) == 0 },
		"write the name of a namespace: lower-case letters, digits and '-', at most 63, beginning and ending with a letter or digit",
	}
	// queueForm is also the form of a label's value: workloads name their queue by a label.
	queueForm = nameForm{
		func(name string) bool {
			return len(forms.IsDNS1123Subdomain(name)) == 0 && len(forms.IsValidLabelValue(name)) == 0
		},
		"write the name of a queue, which is the value of a label too: lower-case letters, digits, '-' and '.', at most 63, beginning and ending with a letter or digit",
	}
)

// checkName refuses a value that cannot be the name that the flag sets.
func checkName(flag, value string, form nameForm) error {
	if form.takes(value) {
		return nil
	}
	return fmt.Errorf("flag --%s is %s: %s", flag, sanitize.Cut(strconv.Quote(value), manifest.LongestName), form.write)
}

// orNone takes a flag that is left out too.
func orNone(flag, value string, form nameForm) error {
	if value == "" {
		return nil
	}
	return checkName(flag, value, form)
}

// renders is the subcommand that writes the objects of one kind. Check reads its flags, before anything else is done.
func renders(o *cluster.Options, r *rendering, name, what string, check func() error, objects func([]Given) ([]any, error)) *cobra.Command {
	return &cobra.Command{
		Use: name, Short: "Write " + what, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := check(); err != nil {
				return err
			}
			given, left, err := r.given(cmd.Context(), o, cmd.InOrStdin())
			if err != nil {
				return err
			}
			made, err := objects(given)
			if err != nil {
				return err
			}
			text, err := Text(given, made)
			if err != nil {
				return err
			}
			if _, err := cmd.OutOrStdout().Write(text); err != nil {
				return err
			}
			for _, g := range given {
				left = append(left, g.Doubts...)
			}
			for _, line := range left {
				if _, err := fmt.Fprintln(cmd.ErrOrStderr(), sanitize.Lines(line)); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

// given is what the pools give, and which nodes are left out.
func (r rendering) given(ctx context.Context, o *cluster.Options, stdin io.Reader) (given []Given, left []string, err error) {
	switch {
	case len(r.files) == 0:
		return nil, nil, errors.New("name files of profiles or MIG configs with -f")
	case (len(r.pools) == 0) == (r.nodes == ""):
		return nil, nil, errors.New("give the nodes by --pool, or have them read from the cluster by --nodes")
	case r.byType && r.nodes == "":
		return nil, nil, errors.New("--by-instance-type is about the cluster's nodes: say it with --nodes, or write the type after a pool, as @g6.4xlarge")
	case r.strategy != "" && r.strategy != string(config.MIGStrategySingle) && r.strategy != string(config.MIGStrategyMixed):
		return nil, nil, fmt.Errorf("flag --mig-strategy is %q: write single or mixed", sanitize.Cut(r.strategy, manifest.LongestName))
	}
	if _, err := labels.Parse(r.nodes); err != nil {
		return nil, nil, fmt.Errorf("flag --nodes is %q: %s", sanitize.Cut(r.nodes, manifest.LongestName), sanitize.Cut(err.Error(), longestMessage))
	}
	known, err := manifest.ReadConfigs(r.files, stdin)
	if err != nil {
		return nil, nil, err
	}
	from := Sources{MIG: known.MIG, Profiles: known.Profiles, Plugin: known.Plugin, Strategy: config.MIGStrategy(r.strategy), DRA: r.dra}
	if r.nodes != "" {
		client, err := o.Client()
		if err != nil {
			return nil, nil, err
		}
		settings, err := r.of.Load(o)
		if err != nil {
			return nil, nil, err
		}
		return givenByNodes(ctx, client, r.nodes, r.byType, from, settings.StartupTaints())
	}
	pools, err := parsePools(r.pools)
	if err != nil {
		return nil, nil, err
	}
	given, unknown := Resolve(from, pools)
	if len(unknown) > 0 {
		return nil, nil, unknown[0].Err
	}
	return given, from.notes(given), nil
}

// givenByNodes is what the nodes of the cluster give. It leaves out nodes with a config or profile that cannot be computed, and writes the objects
// for the others.
func givenByNodes(ctx context.Context, client kube.Interface, selector string, byType bool, from Sources, startup config.StartupTaints) (given []Given, left []string, err error) {
	pools, nodes, left, err := from.poolsOf(ctx, client, selector, byType)
	if err != nil {
		return nil, nil, err
	}
	given, unknown := Resolve(from, pools)
	given, impure := from.apart(given, nodes)
	unknown = append(unknown, impure...)
	if len(given) == 0 {
		return nil, nil, unknown[0].Err
	}
	for _, of := range unknown {
		left = append(left, fmt.Sprintf("left out: %s (%s), since their devices cannot be computed: %v",
			sanitize.Counted(of.Pool.Nodes, "node"), sanitize.Listed(namesOf(nodes[kindOf(of.Pool)])), of.Err))
	}
	for i := range given {
		var all [][]corev1.Taint
		var of []pooled
		for _, p := range given[i].Pools {
			of = append(of, nodes[kindOf(p)]...)
		}
		for _, n := range of {
			all = append(all, n.taints)
		}
		given[i].Host = hostOf(of)
		if closed := given[i].Tolerate(all, startup); len(closed) > 0 {
			var lacks []string
			for _, t := range closed {
				lacks = append(lacks, taints.Text(t))
			}
			slices.Sort(lacks)
			left = append(left, fmt.Sprintf("%s: each of its %s has a taint that not all of them have, so pods do not tolerate it: %s; remove such taints or add tolerations, or pods run on none of the nodes",
				given[i].Profile, sanitize.Counted(len(all), "node"), sanitize.Listed(slices.Compact(lacks))))
		}
	}
	return given, left, nil
}

// pooled is what counts of a node.
type pooled struct {
	name   string
	pool   Pool // that its labels request, though it may not count for it
	shares bool // or may, although the profile or config does not
	labels map[string]string
	taints []corev1.Taint
	offers corev1.ResourceList // allocatable
}

// hostOf sums up what nodes have besides GPUs. It leaves out what one of them does not report.
func hostOf(nodes []pooled) corev1.ResourceList {
	out := corev1.ResourceList{}
	for name := range besides {
		var total resource.Quantity
		known := len(nodes) > 0
		for _, n := range nodes {
			offers, reported := n.offers[name]
			known = known && reported
			total.Add(offers)
		}
		if known {
			out[name] = total
		}
	}
	return out
}

func namesOf(nodes []pooled) (names []string) {
	for _, n := range nodes {
		names = append(names, n.name)
	}
	return names
}

// kindOf is a pool without its size.
func kindOf(p Pool) Pool {
	p.Nodes = 0
	return p
}

// longestMessage bounds what is said of nodes that are left out, in characters.
const longestMessage = 2000

// pageOfNodes bounds a page of a list; all pages together may have mostListed.
const (
	pageOfNodes = 500
	mostListed  = 50_000
)

// poolsOf counts the nodes of the cluster by what they ask for and by their GPUs, and lists them by the kind of pool. It names the nodes that it leaves out,
// and lists them by leftOut with those that are not selected: labels of a pool may select them.
func (from Sources) poolsOf(ctx context.Context, client kube.Interface, selector string, byType bool) (pools []Pool, of map[Pool][]pooled, left []string, err error) {
	selected, err := labels.Parse(selector)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("reading the selector of the nodes: %w", err)
	}
	of = map[Pool][]pooled{}
	options := metav1.ListOptions{Limit: pageOfNodes}
	for seen := 0; ; {
		nodes, err := client.Nodes().List(ctx, options)
		if err != nil {
			return nil, nil, nil, fmt.Errorf("reading the nodes: %w", err)
		}
		for i := range nodes.Items {
			n, why := from.pooled(&nodes.Items[i], byType)
			isSelected := selected.Matches(labels.Set(n.labels))
			if isSelected && why != "" {
				left = append(left, fmt.Sprintf("node %s is left out: %s", n.name, why))
			}
			if !isSelected || why != "" {
				of[leftOut] = append(of[leftOut], n)
				continue
			}
			of[kindOf(n.pool)] = append(of[kindOf(n.pool)], n)
			if at := slices.IndexFunc(pools, func(o Pool) bool { return kindOf(o) == kindOf(n.pool) }); at >= 0 {
				pools[at].Nodes++
				continue
			}
			pools = append(pools, n.pool)
		}
		if seen += len(nodes.Items); seen > mostListed {
			return nil, nil, nil, fmt.Errorf("there are more than %d nodes", mostListed)
		}
		if options.Continue = nodes.Continue; options.Continue == "" {
			break
		}
	}
	if len(pools) == 0 {
		return nil, nil, nil, fmt.Errorf("no node that is selected by %s asks for a profile or MIG config: %s",
			selector, sanitize.Message(strings.Join(left, "\n"), longestMessage))
	}
	slices.SortFunc(pools, func(a, b Pool) int {
		return strings.Compare(a.Name+" "+a.Type+" "+a.Model, b.Name+" "+b.Type+" "+b.Model)
	})
	return pools, of, left, nil
}

// pooled is what counts of a node, and why the node does not count for its pool.
func (from Sources) pooled(n *corev1.Node, byType bool) (out pooled, why string) {
	p, why := poolOf(n)
	shares := from.shares(n, p)
	why = cmp.Or(from.driven(n), why, shares)
	if config.State(n.Labels[config.LabelMIGConfigState]) == config.StateFailed && why == "" {
		why = fmt.Sprintf("its agent has not carried out its labels (%s=%s), so flavors and hardware profiles do not select it", config.LabelMIGConfigState, config.StateFailed)
	}
	if byType {
		p.Type = n.Labels[corev1.LabelInstanceTypeStable]
	}
	if byType && p.Type == "" && why == "" {
		why = "it has no label " + corev1.LabelInstanceTypeStable
	}
	return pooled{n.Name, p, shares != "", n.Labels, n.Spec.Taints, n.Status.Allocatable}, why
}

// reportedBy is what the node's agent says; the zero value if it says nothing that can be read.
func reportedBy(n *corev1.Node) (s api.Status) {
	if json.Unmarshal([]byte(n.Annotations[config.AnnotationStatus]), &s) != nil {
		return api.Status{}
	}
	return s
}

// poolOf is the pool of one node, or why it cannot be counted. The agent reports the number of GPUs; under the MIG strategy single, the label of GPU
// feature discovery counts MIG devices.
func poolOf(n *corev1.Node) (p Pool, why string) {
	if p.Name = n.Labels[config.LabelProfile]; p.Name == "" {
		p.Name = n.Labels[config.LabelMIGConfig]
	}
	if p.Name == "" {
		return p, fmt.Sprintf("it has neither the label %s nor %s", config.LabelProfile, config.LabelMIGConfig)
	}
	gpus := features.Of(n.Labels)
	p.Model, p.GPUs = gpus.Model, gpus.Count
	if reported := reportedBy(n); len(reported.GPUs) > 0 {
		p.GPUs = len(reported.GPUs)
	}
	if count := n.Labels[features.LabelCount]; p.GPUs == 0 && count != "" {
		what := fmt.Sprintf("is impossible: a machine has 1 to %d", features.MostGPUs)
		if strings.Contains(n.Labels[features.LabelProduct], "-MIG-") {
			what = "counts MIG devices, under the device plugin's MIG strategy single"
		}
		return p, fmt.Sprintf("no agent says how many GPUs it has, and its label %s=%s %s; count it by --pool", features.LabelCount, count, what)
	}
	if p.GPUs < 1 || p.GPUs > features.MostGPUs {
		return p, fmt.Sprintf("neither its agent nor the label %s says how many GPUs it has; count it by --pool", features.LabelCount)
	}
	p.Nodes = 1
	return p, ""
}
