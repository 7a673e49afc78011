package migrate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
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
			"and what you have to change, with commands. It reads mig-manager's ConfigMaps with MIG configs and clients, labels on nodes and the ClusterPolicy of\n" +
			"the GPU Operator; from the cluster, with the rights of the user, or from files.",
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
	c.Flags().StringArrayVarP(&files, "file", "f", nil, "file to read in place of the cluster, several by several flags; - for standard input")
	c.Flags().StringSliceVar(&namespaces, "operator-namespace", operatorsNamespaces, "where mig-manager's ConfigMaps are")
	return c
}

// migration collects the parts of an installation of mig-manager.
type migration struct {
	Sources
	used   bool     // a piece of the present file says something of an installation
	unused []string // files of which no piece does
}

// files reads manifests and bare files.
func (m *migration) files(cmd *cobra.Command, names []string) error {
	var bad error
	r := manifest.Reader{Found: func(p manifest.Piece) {
		if bad == nil {
			bad = m.piece(p)
		}
	}}
	for _, name := range names {
		text, err := manifest.ReadFile(name, cmd.InOrStdin())
		if err != nil {
			return err
		}
		m.used, name = false, sanitize.Text(name)
		if r.Read(name, text); bad != nil {
			return bad
		}
		if !m.used {
			m.unused = append(m.unused, name)
		}
	}
	return nil
}

func (m *migration) piece(p manifest.Piece) error {
	if p.Err != nil && p.Key == "" {
		return fmt.Errorf("%s: %w", p.At, p.Err)
	}
	if values, ok, err := helmValues(p); ok || err != nil {
		m.used = true
		if err == nil {
			err = m.values(p.At, values)
		}
		return err
	}
	if manifest.IsClusterPolicy(p) || isGPUCluster(p) || p.Top["apiVersion"] == "v1" && (p.Foreign == "Node" || p.Foreign == "Pod") {
		m.used = true
		return m.object(p)
	}
	if p.ConfigMap != "" {
		m.used = true
		m.keys(p.ConfigMap, p.Key)
		m.Namespaces = append(m.Namespaces, p.Namespace)
	}
	if p.Format == manifest.Profiles {
		m.used = true
		m.profiles(p.Text)
	}
	before := len(m.Catalogs) + len(m.Clients)
	m.text(p.At, p.ConfigMap, p.Text)
	m.used = m.used || len(m.Catalogs)+len(m.Clients) > before
	return nil
}

// object takes a ClusterPolicy, a GPUCluster, a Node or a Pod.
func (m *migration) object(p manifest.Piece) error {
	text, err := json.Marshal(p.Top)
	if err != nil {
		return fmt.Errorf("%s: %w", p.At, err)
	}
	switch p.Foreign {
	case "ClusterPolicy":
		return m.policy(text)
	case "GPUCluster":
		return m.gpuCluster(text)
	case "Pod":
		var pod corev1.Pod
		if err := json.Unmarshal(text, &pod); err != nil {
			return fmt.Errorf("%s: reading a Pod: %w", p.At, err)
		}
		m.Pods = append(m.Pods, pod)
	default:
		var n corev1.Node
		if err := json.Unmarshal(text, &n); err != nil {
			return fmt.Errorf("%s: reading a Node: %w", p.At, err)
		}
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

// text takes a file of MIG configs or of clients, and leaves any other.
func (m *migration) text(where, configMap string, text []byte) {
	top, err := manifest.Mapping(text)
	switch {
	case err != nil && bytes.Contains(text, []byte("mig-configs:")):
		m.Catalogs = append(m.Catalogs, Catalog{Where: where, ConfigMap: configMap, Err: err})
	case err != nil && bytes.Contains(text, []byte("systemd-services:")):
		m.Clients = append(m.Clients, Clients{Where: where, Err: err})
	case err != nil: // other keys of a ConfigMap may have any text, as a script
	case manifest.Has(top, "mig-configs"):
		configs, err := migparted.Parse(text)
		m.Catalogs = append(m.Catalogs, Catalog{Where: where, ConfigMap: configMap, Configs: configs, Err: err})
	default:
		if clients, ok := ReadClients(where, text); ok {
			m.Clients = append(m.Clients, clients)
		}
	}
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
		names = append(names, p.ConfigMaps()...)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	var plugins []string
	for _, p := range m.Policies {
		plugins = append(plugins, p.PluginConfigMap())
	}
	for _, namespace := range namespaces {
		for _, name := range names {
			if err := m.configMap(ctx, client, namespace, name, m.texts); err != nil {
				return err
			}
		}
		for _, name := range plugins {
			if name == "" || slices.Contains(names, name) {
				continue
			}
			if err := m.configMap(ctx, client, namespace, name, func(*corev1.ConfigMap) {}); err != nil {
				return err
			}
		}
	}
	if p := settings.Profiles; p.Name != "" {
		err := m.configMap(ctx, client, p.Namespace, p.Name, func(c *corev1.ConfigMap) { m.profiles([]byte(c.Data[p.Key])) })
		if err != nil {
			return err
		}
	}
	return m.nodes(ctx, client)
}

func (m *migration) configMap(ctx context.Context, client kube.Interface, namespace, name string, use func(*corev1.ConfigMap)) error {
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
	m.keys(name, slices.Sorted(maps.Keys(found.Data))...)
	m.Namespaces = append(m.Namespaces, namespace)
	use(found)
	return nil
}

// texts takes the files of a ConfigMap of mig-manager's.
func (m *migration) texts(c *corev1.ConfigMap) {
	for _, key := range slices.Sorted(maps.Keys(c.Data)) {
		m.text(fmt.Sprintf("ConfigMap %s, %s", path.Join(c.Namespace, c.Name), key), c.Name, []byte(c.Data[key]))
	}
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
	if Concerns(n) {
		m.Nodes = append(m.Nodes, corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: n.Labels},
			Spec:       corev1.NodeSpec{Taints: n.Spec.Taints}, Status: corev1.NodeStatus{Allocatable: n.Status.Allocatable},
		})
	}
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
	if err := m.printFindings(out, all); err != nil || len(m.unused) == 0 {
		return err
	}
	return fmt.Errorf("nothing of an installation was found in %s: give their contents as manifests, or leave them out; migrate reads ConfigMaps, ClusterPolicies, GPUClusters, "+
		"Nodes, Pods, values of the GPU Operator's chart, HelmCharts of k3s, and bare files of MIG configs and clients", sanitize.Listed(m.unused))
}

func (m *migration) printFindings(out *cli.Printer, all []Finding) error {
	if len(all) == 0 {
		out.Printf("Nothing of mig-manager's was found: no ClusterPolicy, no file of MIG configs or clients, no node with a GPU.\n")
		return out.Err
	}
	about, changes, unread := "", 0, 0
	for _, f := range all {
		if f.About != about {
			about = f.About
			out.Printf("%s\n", about)
		}
		out.Printf("  %-10s  %s\n", f.Verdict, f.Text)
		if f.Command != "" {
			out.Printf("  %-10s    $ %s\n", "", f.Command)
		}
		switch f.Verdict {
		case Change:
			changes++
		case Unread:
			unread++
		case Taken, Ignored:
		}
	}
	switch {
	case unread > 0: // it may have more to change
	case changes == 0:
		out.Printf("No change is needed: install gpuslice.\n")
	case changes == 1:
		out.Printf("1 change is needed before gpuslice is installed.\n")
	default:
		out.Printf("%d changes are needed before gpuslice is installed.\n", changes)
	}
	if unread > 0 && out.Err == nil {
		return fmt.Errorf("you may not read %s of the installation, and more changes may be needed than these %d: run it with the rights to read the parts named above",
			sanitize.Counted(unread, "part"), changes)
	}
	return out.Err
}
