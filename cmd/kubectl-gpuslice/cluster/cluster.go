// Package cluster is how the commands reach a cluster: they select, write and watch its nodes, read the agents' reports and ask the agents. It
// decides nothing.
package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// fieldManager names the command in the managedFields of what it writes.
const fieldManager = "kubectl-gpuslice"

// Options are what the subcommands share: kubectl's own flags for reaching a cluster.
type Options struct {
	Invoked   []string // the arguments of this process, for the user to come back
	Version   string   // of the program, which the API server is told
	loading   *clientcmd.ClientConfigLoadingRules
	overrides clientcmd.ConfigOverrides
	Connect   func() (kube.Interface, error) // set by tests; otherwise the flags name the cluster
}

// Command makes one of the plugin's commands.
type Command func(*Options) *cobra.Command

// Root is the command that has the others below it.
func (o *Options) Root(commands ...Command) *cobra.Command {
	root := &cobra.Command{
		Use:           "kubectl-gpuslice",
		Short:         "Rolls a config of GPUs out to many nodes, and says how far they are",
		SilenceUsage:  true,
		SilenceErrors: true,
		// Help shows the command as users call it.
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl gpuslice"},
	}
	o.bind(root.PersistentFlags())
	for _, c := range commands {
		root.AddCommand(c(o))
	}
	return root
}

func (o *Options) bind(flags *pflag.FlagSet) {
	o.loading = clientcmd.NewDefaultClientConfigLoadingRules()
	flags.StringVar(&o.loading.ExplicitPath, clientcmd.RecommendedConfigPathFlag, "", "Path to the kubeconfig file to use")
	clientcmd.BindOverrideFlags(&o.overrides, flags, clientcmd.RecommendedConfigOverrideFlags(""))
}

// Client reaches the API server.
func (o *Options) Client() (kube.Interface, error) {
	if o.Connect != nil {
		return o.Connect()
	}
	c, err := o.Config()
	if err != nil {
		return nil, err
	}
	return kube.New(c)
}

// Namespace returns the namespace for pods that the user names without one. Asked says that it comes from the flag --namespace.
func (o *Options) Namespace() (name string, asked bool, err error) {
	if asked = o.overrides.Context.Namespace != ""; asked || o.Connect != nil {
		return cmp.Or(o.overrides.Context.Namespace, metav1.NamespaceDefault), asked, nil
	}
	name, _, err = clientcmd.NewNonInteractiveDeferredLoadingClientConfig(o.loading, &o.overrides).Namespace()
	return name, false, err
}

// Config is how the command reaches the API server.
func (o *Options) Config() (*rest.Config, error) {
	c, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(o.loading, &o.overrides).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("finding the API server: %w", cmp.Or(wrongFiles(o.loading), err))
	}
	return kube.Config(c, fieldManager, o.Version), nil
}

// AgentSettings are the agents' settings, in a file: a command needs them to foresee what the agents do.
type AgentSettings struct{ file string }

// Bind adds the flag.
func (a *AgentSettings) Bind(flags *pflag.FlagSet) {
	flags.StringVar(&a.file, "settings", "", "file of the agents' settings; without it their defaults hold")
}

// Load reads the agents' settings. The agents are in the namespace of the flag --namespace.
func (a *AgentSettings) Load(o *Options) (config.Settings, error) {
	return a.LoadBeside(cmp.Or(o.overrides.Context.Namespace, AgentNamespace))
}

// AgentNamespace is where the agents are by the manifests.
const AgentNamespace = "gpuslice"

// LoadBeside reads the settings of agents in that namespace.
func (a *AgentSettings) LoadBeside(namespace string) (config.Settings, error) {
	settings := config.Default()
	if a.file != "" {
		var err error
		if settings, err = config.Load(a.file); err != nil {
			return config.Settings{}, err
		}
	}
	return settings.Beside(namespace), nil
}

// wrongFiles says what is wrong with the user's kubeconfigs, if none of them names a cluster. The loader passes over missing files, and of others it has a
// decoder's words.
func wrongFiles(rules *clientcmd.ClientConfigLoadingRules) error {
	by, files := clientcmd.RecommendedConfigPathEnvVar, filepath.SplitList(os.Getenv(clientcmd.RecommendedConfigPathEnvVar))
	switch {
	case rules.ExplicitPath != "":
		by, files = "--"+clientcmd.RecommendedConfigPathFlag, []string{rules.ExplicitPath}
	case len(files) == 0:
		if _, err := os.Stat(clientcmd.RecommendedHomeFile); err != nil {
			return fmt.Errorf("there is no kubeconfig: name one by --%s or %s", clientcmd.RecommendedConfigPathFlag, by)
		}
		by, files = "kubectl's default", []string{clientcmd.RecommendedHomeFile}
	}
	var wrong []string
	for _, file := range files {
		why := wrongFile(file)
		if why == "" {
			return nil
		}
		wrong = append(wrong, sanitize.Text(file)+", "+why)
	}
	return fmt.Errorf("%s names %s", by, sanitize.Listed(wrong))
}

// wrongFile says why a file is no kubeconfig that names a cluster; empty if it does.
func wrongFile(file string) string {
	info, err := os.Stat(file) //nolint:gosec // the user's own environment names it
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "which is not there"
	case err == nil && info.IsDir():
		return "which is a folder"
	}
	text, err := manifest.ReadFile(file, nil)
	if err != nil {
		return "which cannot be read: " + err.Error()
	}
	top, err := manifest.Mapping(text)
	if err != nil {
		return "which is no kubeconfig: " + sanitize.Message(err.Error(), sanitize.Longest/2)
	}
	if all, _ := top["clusters"].([]any); len(all) == 0 {
		return "which names no cluster"
	}
	return ""
}
