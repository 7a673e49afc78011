// Package cluster is how the commands reach a cluster: they select, write and watch its nodes, read the agents' reports and ask the agents. It
// decides nothing.
package cluster

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpuslice/gpuslice/config"
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

// Config is how the command reaches the API server.
func (o *Options) Config() (*rest.Config, error) {
	c, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(o.loading, &o.overrides).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("finding the API server: %w", cmp.Or(missingFiles(o.loading), err)) // a missing file is why the loader knows no cluster
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
	settings := config.Default()
	if a.file != "" {
		var err error
		if settings, err = config.Load(a.file); err != nil {
			return config.Settings{}, err
		}
	}
	return settings.Beside(cmp.Or(o.overrides.Context.Namespace, "gpuslice")), nil
}

// missingFiles names the files of the environment's KUBECONFIG, if none of them is there: the loader passes over them, and then knows no cluster.
func missingFiles(rules *clientcmd.ClientConfigLoadingRules) error {
	list := os.Getenv(clientcmd.RecommendedConfigPathEnvVar)
	if rules.ExplicitPath != "" || list == "" {
		return nil
	}
	for _, file := range filepath.SplitList(list) {
		if _, err := os.Stat(file); err == nil { //nolint:gosec // the user's own environment names it
			return nil
		}
	}
	return fmt.Errorf("%s names %s, which is not there", clientcmd.RecommendedConfigPathEnvVar, list)
}
