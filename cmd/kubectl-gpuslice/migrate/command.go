package migrate

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// nodesAtATime bounds a page of a list; all pages together may have mostNodes.
const (
	nodesAtATime = 500
	mostNodes    = 50_000
)

// operatorsNamespaces are where migrate searches mig-manager's ConfigMaps: NVIDIA's documentation, OpenShift's catalog and
// operators up to 1.6 put the GPU Operator there, and mig-parted's own manifest mig-manager.
var operatorsNamespaces = []string{"gpu-operator", "nvidia-gpu-operator", "gpu-operator-resources", "default"}

// The ConfigMaps of mig-manager that the operator makes (v26.7) and that mig-parted's manifest names (v0.14.4), beside those that a
// ClusterPolicy names.
var migManagersConfigMaps = []string{"default-mig-parted-config", "default-gpu-clients", "mig-parted-config", "gpu-clients"}

// Command is migrate: it reads an installation, and changes nothing.
func Command(o *cluster.Options) *cobra.Command {
	var files, namespaces []string
	var dryRun bool
	var of cluster.AgentSettings
	c := &cobra.Command{
		Use:   "migrate --dry-run",
		Short: "Say what becomes of an installation of NVIDIA's mig-manager when gpuslice takes its place; changes nothing",
		Long: "Say what becomes of an installation of NVIDIA's mig-manager when gpuslice takes its place: what it takes over, what it ignores and why,\n" +
			"and what you have to change, with commands. It reads mig-manager's ConfigMaps with MIG configs and clients, those with configs of the device plugin,\n" +
			"labels on nodes and the ClusterPolicy of the GPU Operator; from the cluster, with the rights of the user, or from files.",
		Example: "kubectl gpuslice migrate --dry-run\nkubectl gpuslice migrate --dry-run -f config.yaml -f clients.yaml",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !dryRun {
				return errors.New("say --dry-run: this command changes nothing; it says what there is to do")
			}
			settings, err := of.Load(o)
			if err != nil {
				return err
			}
			m := migration{}
			if len(files) > 0 {
				err = m.files(cmd, files)
			} else {
				err = m.cluster(cmd.Context(), o, settings, namespaces)
			}
			if err != nil {
				return err
			}
			return m.print(&cli.Printer{W: cmd.OutOrStdout()}, Judge(m.Sources, settings))
		},
	}
	of.Bind(c.Flags())
	c.Flags().BoolVar(&dryRun, "dry-run", false, "say it; there is nothing else that this command does")
	c.Flags().StringArrayVarP(&files, "file", "f", nil, "file or folder of files to read in place of the cluster, several by several flags; - for standard input")
	c.Flags().StringSliceVar(&namespaces, "operator-namespace", operatorsNamespaces, "where mig-manager's ConfigMaps are")
	c.Flags().Lookup("operator-namespace").DefValue = "[" + strings.Join(operatorsNamespaces, ", ") + "]" // with spaces, it fits a page
	return c
}

// migration collects the parts of an installation of mig-manager.
type migration struct {
	Sources
	present given   // what -f names, while it is read
	unused  []given // of what -f names, those without anything of an installation
}

// given is a file or folder that -f names.
type given struct {
	name       string
	used       bool     // a piece of it says something of an installation
	configMaps []string // those of no known content: they are used if a ClusterPolicy names them
	pods       bool     // it has pods, which say something of nodes that are read too
	err        error    // by which a piece of it cannot be read; the first
}

func (g given) String() string {
	if g.err != nil {
		return fmt.Sprintf("%s (%s)", g.name, sanitize.Message(g.err.Error(), sanitize.Longest/2))
	}
	return g.name
}

// files reads manifests and bare files.
func (m *migration) files(cmd *cobra.Command, names []string) error {
	var bad error
	r := manifest.Reader{Found: func(p manifest.Piece) {
		if bad == nil {
			bad = m.piece(p)
		}
	}}
	var all []given
	for _, name := range names {
		files, err := manifest.Files(name)
		if err != nil {
			return err
		}
		m.present = given{name: sanitize.Text(name)}
		for _, file := range files {
			text, err := manifest.ReadFile(file, cmd.InOrStdin())
			if err != nil {
				return err
			}
			if r.Read(sanitize.Text(file), text); bad != nil {
				return bad
			}
		}
		all = append(all, m.present)
	}
	named := map[string]bool{}
	for _, p := range m.Policies {
		for _, name := range append(p.ConfigMaps(), p.PluginConfigMap()) {
			named[name] = true
		}
	}
	for _, g := range all {
		used := g.used || g.pods && len(m.Nodes) > 0 || slices.ContainsFunc(g.configMaps, func(name string) bool { return named[name] })
		if !used {
			m.unused = append(m.unused, g)
		}
	}
	return nil
}

func (m *migration) piece(p manifest.Piece) error {
	switch {
	case p.Err != nil && p.Key == "":
		return fmt.Errorf("%s: %w", p.At, p.Err)
	case p.Values != nil:
		m.present.used = true
		return m.values(p)
	case manifest.IsClusterPolicy(p) || isGPUCluster(p) || p.Top["apiVersion"] == "v1" && (p.Foreign == "Node" || p.Foreign == "Pod"):
		return m.object(p)
	}
	if p.ConfigMap != "" {
		m.keys(p.ConfigMap, p.Key)
		m.Namespaces = append(m.Namespaces, p.Namespace)
		m.present.configMaps = append(m.present.configMaps, p.ConfigMap)
	}
	before := m.texts()
	switch places := func(err error) error { return manifest.AddPlaces(p, err) }; {
	case p.Format == manifest.Profiles:
		m.present.used = true
		m.profiles(p.Text)
	case p.Format == manifest.PluginConfig && manifest.IsOnlyPluginConfig(p.Top): // dashboards have a version too
		m.plugin(p, places)
	default:
		m.present.err = cmp.Or(m.present.err, p.Err)
		m.text(p.At, p.ConfigMap, p.Text, p.Err, places)
	}
	m.present.used = m.present.used || m.texts() > before
	return nil
}

// texts counts the texts that say something of an installation.
func (m *migration) texts() int {
	return len(m.Catalogs) + len(m.Clients) + len(m.Plugins) + len(slices.DeleteFunc(slices.Clone(m.Broken), func(b Broken) bool { return !b.Ours }))
}

// object takes a ClusterPolicy, a GPUCluster, a Node or a Pod.
func (m *migration) object(p manifest.Piece) error {
	text, err := json.Marshal(p.Top)
	if err != nil {
		return fmt.Errorf("%s: %w", p.At, err)
	}
	switch p.Foreign {
	case "ClusterPolicy":
		m.present.used = true
		return m.policy(text)
	case "GPUCluster":
		m.present.used = true
		return m.gpuCluster(text)
	case "Pod":
		m.present.pods = true
		var pod corev1.Pod
		if err := json.Unmarshal(text, &pod); err != nil {
			return fmt.Errorf("%s: reading a Pod: %w", p.At, manifest.InWords(err))
		}
		m.Pods = append(m.Pods, pod)
	default:
		var n corev1.Node
		if err := json.Unmarshal(text, &n); err != nil {
			return fmt.Errorf("%s: reading a Node: %w", p.At, manifest.InWords(err))
		}
		m.present.used = m.present.used || Concerns(n)
		m.node(n)
	}
	return nil
}

// keys notes a ConfigMap, and one of its keys if it has any.
func (m *migration) keys(configMap string, keys ...string) {
	if m.ConfigMaps == nil {
		m.ConfigMaps = map[string][]string{}
	}
	m.ConfigMaps[configMap] = append(m.ConfigMaps[configMap], slices.DeleteFunc(keys, func(key string) bool { return key == "" })...)
}

// profiles takes gpuslice's own profiles. Only valid ones count here; validate reports the mistakes of others.
func (m *migration) profiles(text []byte) {
	read, err := catalog.ParseProfiles(text)
	if err != nil {
		return
	}
	if m.Profiles == nil {
		m.Profiles = map[string]catalog.Profile{}
	}
	maps.Copy(m.Profiles, read)
}

// isGPUCluster reports whether a piece is one of the GPU Operator.
func isGPUCluster(p manifest.Piece) bool {
	version, _ := p.Top["apiVersion"].(string)
	return p.Foreign == "GPUCluster" && strings.HasPrefix(version, "nvidia.com/")
}

func (m *migration) gpuCluster(text []byte) error {
	c, err := ReadCluster(text)
	m.Clusters = append(m.Clusters, c)
	return err
}

func (m *migration) policy(text []byte) error {
	p, err := ReadPolicy(text)
	m.Policies = append(m.Policies, p)
	return err
}

// values takes values of the GPU Operator's chart, which have the fields of the ClusterPolicy that it makes of them.
func (m *migration) values(p manifest.Piece) error {
	text, err := json.Marshal(map[string]any{"metadata": map[string]any{"name": "by the values in " + p.At}, "spec": p.Values})
	if err == nil {
		err = m.policy(text)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", p.At, err)
	}
	m.Policies[len(m.Policies)-1].lineOf = func(field string) int { return manifest.LineOf(p, field) }
	return nil
}

// ofOurs are words of texts that mig-manager or the device plugin reads, whatever else of the text can be read.
var ofOurs = regexp.MustCompile(`(?m)^[ \t"'-]*(mig-configs|mig-enabled|mig-devices|systemd-services|sharing)["']?[ \t]*:`)

// text takes a file of MIG configs or of clients, and leaves any other. unread is why it cannot be read as YAML; places adds the lines of mistakes.
func (m *migration) text(where, configMap string, text []byte, unread error, places func(error) error) {
	top, err := manifest.Mapping(text)
	switch {
	case err != nil && (unread != nil || ofOurs.Match(text)): // other keys of a ConfigMap may have any text, as a script
		m.Broken = append(m.Broken, Broken{Where: where, ConfigMap: configMap, Err: cmp.Or(unread, err), Ours: ofOurs.Match(text)})
	case err != nil:
	case manifest.IsMIGConfigs(top):
		configs, err := migparted.Parse(text)
		m.Catalogs = append(m.Catalogs, Catalog{Where: where, ConfigMap: configMap, Configs: configs, Err: places(err)})
	default:
		if clients, ok := ReadClients(where, text); ok {
			m.Clients = append(m.Clients, clients)
		}
	}
}

// plugin takes a config of the device plugin.
func (m *migration) plugin(p manifest.Piece, places func(error) error) {
	read, err := deviceplugin.Parse(p.Text)
	m.Plugins = append(m.Plugins, PluginConfig{Where: p.At, ConfigMap: p.ConfigMap, Namespace: p.Namespace, Key: p.Key, Read: read, Err: places(err)})
}

// cluster reads the installation from the API server.
func (m *migration) cluster(ctx context.Context, o *cluster.Options, settings config.Settings, namespaces []string) error {
	client, err := o.Client()
	if err != nil {
		return err
	}
	if err := m.policies(ctx, client); err != nil {
		return err
	}
	names := slices.Clone(migManagersConfigMaps)
	for _, p := range m.Policies {
		names = append(names, append(p.ConfigMaps(), p.PluginConfigMap())...)
	}
	slices.Sort(names)
	names = slices.DeleteFunc(slices.Compact(names), func(name string) bool { return name == "" })
	for _, namespace := range namespaces {
		for _, name := range names {
			if err := m.configMap(ctx, client, namespace, name, m.live); err != nil {
				return err
			}
		}
	}
	if p := settings.Profiles; p.Name != "" {
		err := m.configMap(ctx, client, p.Namespace, p.Name, func(c *corev1.ConfigMap) error {
			m.profiles([]byte(c.Data[p.Key]))
			return nil
		})
		if err != nil {
			return err
		}
	}
	return m.nodes(ctx, client)
}

func (m *migration) configMap(ctx context.Context, client kube.Interface, namespace, name string, use func(*corev1.ConfigMap) error) error {
	found, err := client.ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		if apierrors.IsForbidden(err) {
			m.Closed = append(m.Closed, name)
		}
		return m.unread(fmt.Errorf("reading ConfigMap %s of namespace %s: %w", name, namespace, err))
	}
	return use(found)
}

// live takes a ConfigMap of the cluster as it takes one of a file, but for the lines of mistakes, which no user sees.
func (m *migration) live(c *corev1.ConfigMap) error {
	text, err := yaml.Marshal(map[string]any{"kind": "ConfigMap", "metadata": map[string]any{"name": c.Name, "namespace": c.Namespace}, "data": c.Data})
	if err != nil {
		return err
	}
	var bad error
	r := manifest.Reader{Found: func(p manifest.Piece) {
		p.At = strings.TrimPrefix(p.At, ", ")
		if p.Err != nil {
			_, p.Err = manifest.Mapping(p.Text)
		}
		bad = cmp.Or(bad, m.piece(p.Unplaced()))
	}}
	r.Read("", text)
	return bad
}

// unread keeps an error that the user's rights do not allow to read something. The rest is reported anyway.
func (m *migration) unread(err error) error {
	if !apierrors.IsForbidden(err) {
		return err
	}
	m.Unread = append(m.Unread, err)
	return nil
}

func (m *migration) nodes(ctx context.Context, client kube.Interface) error {
	options := metav1.ListOptions{Limit: nodesAtATime}
	for seen := 0; ; {
		page, err := client.Nodes().List(ctx, options)
		if err != nil {
			return m.unread(fmt.Errorf("reading the nodes: %w", err))
		}
		for _, n := range page.Items {
			m.node(n)
		}
		if seen += len(page.Items); seen > mostNodes {
			return fmt.Errorf("there are more than %d nodes", mostNodes)
		}
		if options.Continue = page.Continue; options.Continue == "" {
			return nil
		}
	}
}

// node keeps of a node what counts here.
func (m *migration) node(n corev1.Node) {
	if !Concerns(n) {
		return
	}
	kept := corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: n.Labels, Annotations: annotationsOfRivals(n.Annotations)},
		Spec:       corev1.NodeSpec{Taints: n.Spec.Taints}, Status: corev1.NodeStatus{Allocatable: n.Status.Allocatable},
	}
	if status, there := n.Annotations[config.AnnotationStatus]; there {
		kept.Annotations[config.AnnotationStatus] = status
		kept.Status.Conditions = []corev1.NodeCondition{cluster.ReportOf(&n).Condition}
	}
	m.Nodes = append(m.Nodes, kept)
}

// policies reads the ClusterPolicies and GPUClusters of the GPU Operator. A cluster without the operator has none, and does not know the kinds.
func (m *migration) policies(ctx context.Context, client kube.Interface) error {
	for _, of := range []struct {
		path, kind string
		take       func([]byte) error
	}{
		{"/apis/nvidia.com/v1/clusterpolicies", "ClusterPolicies", m.policy},
		{"/apis/nvidia.com/v1alpha1/gpuclusters", "GPUClusters", m.gpuCluster},
	} {
		text, err := client.RawCore().Get().AbsPath(of.path).SetHeader("Accept", runtime.ContentTypeJSON).DoRaw(ctx)
		if err := m.operators(of.kind, text, err, of.take); err != nil {
			return err
		}
	}
	return nil
}

// operators takes each object of the answer to a list of one of the operator's kinds.
func (m *migration) operators(kind string, text []byte, err error, take func([]byte) error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		var said metav1.Status // a raw request leaves it in the body
		if json.Unmarshal(text, &said) == nil && said.Message != "" {
			err = &apierrors.StatusError{ErrStatus: said}
		}
		return m.unread(fmt.Errorf("reading the %s: %w", kind, err))
	}
	var list struct {
		Items []json.RawMessage `json:"items"`
	}
	if err := yaml.Unmarshal(text, &list); err != nil {
		return fmt.Errorf("reading the %s: %w", kind, err)
	}
	for _, item := range list.Items {
		if err := take(item); err != nil {
			return err
		}
	}
	return nil
}

// print writes the findings, those of one thing under its name.
func (m *migration) print(out *cli.Printer, all []Finding) error {
	err := m.printFindings(out, all)
	if len(m.unused) == 0 {
		return err
	}
	var names []string
	for _, g := range m.unused {
		names = append(names, g.String())
	}
	return errors.Join(err, fmt.Errorf("nothing of an installation was found in %s: give their contents as manifests, or leave them out; migrate reads ConfigMaps, ClusterPolicies, GPUClusters, "+
		"Nodes with GPUs, Pods on them, values of the GPU Operator's chart, HelmCharts of k3s, and bare files of MIG configs, clients and configs of the device plugin", sanitize.Listed(names)))
}

func (m *migration) printFindings(out *cli.Printer, all []Finding) error {
	if len(all) == 0 {
		out.Printf("Nothing of mig-manager's was found: no ClusterPolicy, no file of MIG configs or clients, no config of the device plugin, no node with a GPU.\n")
		return out.Err
	}
	about, of := "", map[Verdict]int{}
	for _, f := range all {
		if f.About != about {
			about = f.About
			out.Printf("%s\n", about)
		}
		out.Printf("  %-10s  %s\n", f.Verdict, f.Text)
		if f.Command != "" {
			out.Printf("  %-10s    $ %s\n", "", f.Command)
		}
		of[f.Verdict]++
	}
	changes := of[Change]
	switch {
	case of[Unread]+of[Unreadable] > 0: // it may have more to change
	case changes == 0:
		out.Printf("No change is needed: install gpuslice.\n")
	case changes == 1:
		out.Printf("1 change is needed before gpuslice is installed.\n")
	default:
		out.Printf("%d changes are needed before gpuslice is installed.\n", changes)
	}
	switch {
	case out.Err != nil:
		return out.Err
	case of[Unread] > 0:
		return fmt.Errorf("you may not read %s of the installation, and more changes may be needed than these %d: run it with the rights to read the parts named above",
			sanitize.Counted(of[Unread], "part"), changes)
	case of[Unreadable] > 0:
		return fmt.Errorf("%s of the installation cannot be read, and more changes may be needed than these %d: mend what is named above, and run this again",
			sanitize.Counted(of[Unreadable], "text"), changes)
	}
	return nil
}
