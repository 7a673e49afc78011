package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/cli"
	"github.com/gpuslice/gpuslice/cmd/migrate"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// operatorsNamespaces are those in which migrate looks for mig-manager's ConfigMaps: NVIDIA's documentation, OpenShift's catalog and
// operators up to 1.6 put the GPU Operator there, and mig-parted's own manifest mig-manager.
var operatorsNamespaces = []string{"gpu-operator", "nvidia-gpu-operator", "gpu-operator-resources", "default"}

// The ConfigMaps of mig-manager that the operator makes (v26.7) and that mig-parted's manifest names (v0.14.4), beside those that a
// ClusterPolicy names.
var migManagersConfigMaps = []string{"default-mig-parted-config", "default-gpu-clients", "mig-parted-config", "gpu-clients"}

func (o *options) migrate() *cobra.Command {
	var files, namespaces []string
	var dryRun bool
	c := &cobra.Command{
		Use:   "migrate --dry-run",
		Short: "Say what becomes of an installation of NVIDIA's mig-manager when gpuslice takes its place; changes nothing",
		Long: "Say what becomes of an installation of NVIDIA's mig-manager when gpuslice takes its place: what is taken over, what is ignored and why,\n" +
			"and what is to do, with commands. It reads mig-manager's ConfigMaps with MIG configs and clients, labels on nodes and the ClusterPolicy of\n" +
			"the GPU Operator; from the cluster, with the rights of the user, or from files.",
		Example: "gpuslice-agent migrate --dry-run --kubeconfig ~/.kube/config\ngpuslice-agent migrate --dry-run -f config.yaml -f clients.yaml",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !dryRun {
				return errors.New("say --dry-run: this command changes nothing; it says what there is to do")
			}
			settings, err := o.load()
			if err != nil {
				return err
			}
			m := migration{}
			if len(files) > 0 {
				err = m.files(cmd, files)
			} else {
				err = m.cluster(cmd.Context(), o, namespaces)
			}
			if err != nil {
				return err
			}
			return m.print(&cli.Printer{W: cmd.OutOrStdout()}, migrate.Judge(m.Sources, settings))
		},
	}
	c.Flags().BoolVar(&dryRun, "dry-run", false, "say it; there is nothing else that this command does")
	c.Flags().StringArrayVarP(&files, "file", "f", nil, "file to read in place of the cluster, several by several flags; - for standard input")
	c.Flags().StringSliceVar(&namespaces, "operator-namespace", operatorsNamespaces, "where mig-manager's ConfigMaps are")
	return c
}

// migration collects the parts of an installation of mig-manager.
type migration struct{ migrate.Sources }

// files reads manifests and bare files.
func (m *migration) files(cmd *cobra.Command, names []string) error {
	var bad error
	r := reader{found: func(p piece) {
		if bad == nil {
			bad = m.piece(p)
		}
	}}
	for _, name := range names {
		text, err := readFile(name, cmd.InOrStdin())
		if err != nil {
			return err
		}
		if r.read(name, text); bad != nil {
			return bad
		}
	}
	return nil
}

func (m *migration) piece(p piece) error {
	if p.err != nil {
		return fmt.Errorf("%s: %w", p.at, p.err)
	}
	switch p.foreign {
	case "ClusterPolicy", "Node":
		text, err := json.Marshal(p.top)
		if err != nil {
			return fmt.Errorf("%s: %w", p.at, err)
		}
		if p.foreign == "ClusterPolicy" {
			return m.policy(text)
		}
		var n corev1.Node
		if err := json.Unmarshal(text, &n); err != nil {
			return fmt.Errorf("%s: reading a Node: %w", p.at, err)
		}
		m.node(n)
		return nil
	}
	return m.text(p.at, p.text)
}

func (m *migration) policy(text []byte) error {
	p, err := migrate.ReadPolicy(text)
	m.Policies = append(m.Policies, p)
	return err
}

// text takes a file of MIG configs or of clients, and leaves any other.
func (m *migration) text(where string, text []byte) error {
	top, err := mappingOf(text)
	if err != nil {
		return nil //nolint:nilerr // other keys of a ConfigMap may have any text, as a script
	}
	if has(top, "mig-configs") {
		configs, err := migparted.Parse(text)
		m.Catalogs = append(m.Catalogs, migrate.Catalog{Where: where, Configs: configs, Err: err})
		return nil
	}
	clients, ok, err := migrate.ReadClients(where, text)
	if ok && err == nil {
		m.Clients = append(m.Clients, clients)
	}
	return err
}

// cluster reads the installation from the API server.
func (m *migration) cluster(ctx context.Context, o *options, namespaces []string) error {
	client, err := o.client()
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
	for _, namespace := range namespaces {
		for _, name := range names {
			configMap, err := client.ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				continue
			}
			if err != nil {
				return fmt.Errorf("reading ConfigMap %s of namespace %s: %w", name, namespace, err)
			}
			for key, text := range configMap.Data {
				if err := m.text(fmt.Sprintf("ConfigMap %s, %s", path.Join(namespace, name), key), []byte(text)); err != nil {
					return err
				}
			}
		}
	}
	nodes, err := client.Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("reading the nodes: %w", err)
	}
	for _, n := range nodes.Items {
		m.node(n)
	}
	return nil
}

func (m *migration) node(n corev1.Node) {
	if migrate.Concerns(n) {
		m.Nodes = append(m.Nodes, n)
	}
}

// policies reads those of the GPU Operator. A cluster without the operator has none, and does not know the kind.
func (m *migration) policies(ctx context.Context, client kube.Interface) error {
	text, err := client.RawCore().Get().AbsPath("/apis/nvidia.com/v1/clusterpolicies").DoRaw(ctx)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the ClusterPolicies: %w", err)
	}
	var list struct {
		Items []json.RawMessage `json:"items"`
	}
	if err := yaml.Unmarshal(text, &list); err != nil {
		return fmt.Errorf("reading the ClusterPolicies: %w", err)
	}
	for _, item := range list.Items {
		if err := m.policy(item); err != nil {
			return err
		}
	}
	return nil
}

// print writes the findings, those of one thing under its name.
func (m *migration) print(out *cli.Printer, all []migrate.Finding) error {
	if len(all) == 0 {
		out.Printf("Nothing of mig-manager's was found: no ClusterPolicy, no file of MIG configs or clients, no node with a GPU.\n")
		return out.Err
	}
	about, changes := "", 0
	for _, f := range all {
		if f.About != about {
			about = f.About
			out.Printf("%s\n", about)
		}
		out.Printf("  %-10s  %s\n", f.Verdict, f.Text)
		if f.Command != "" {
			out.Printf("  %-10s    $ %s\n", "", f.Command)
		}
		if f.Verdict == migrate.Change {
			changes++
		}
	}
	switch changes {
	case 0:
		out.Printf("No change is needed: install gpuslice.\n")
	case 1:
		out.Printf("1 change is needed before gpuslice is installed.\n")
	default:
		out.Printf("%d changes are needed before gpuslice is installed.\n", changes)
	}
	return out.Err
}
