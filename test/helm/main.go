// Command helm does with a chart what Helm does, by Helm's own packages and without a cluster, for tests and for a release. It renders
// the chart, checks it, tries it without each of its values, or packs it. Its start takes longer than its work: a caller with many
// requests has one process answer, by "each".
//
// It is a separate module so that Helm's requirements never decide the versions that this project is built with.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	charts "helm.sh/helm/v4/pkg/chart"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	v2 "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"
	"helm.sh/helm/v4/pkg/engine"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"
)

// request is what is to be done with a chart.
type request struct {
	chart     string
	namespace string
	values    string // file of values over the chart's own; empty for none
	kube      string // version of the cluster
	there     string // namespaces that the cluster has, separated by commas; empty for helm template, which asks no cluster
	apis      string // that the cluster has beside Kubernetes' own, as "group/version/Kind", separated by commas
	version   string // of a packed chart and of what it installs
	image     string // that a packed chart installs, without a tag; empty for the chart's own
	digest    string // of that image
	out       string // folder of a packed chart

	said io.Writer // what is printed
}

// answer is to one line of what each reads.
type answer struct {
	Said  string
	Error string `json:",omitempty"`
}

// each does what each line of in says, a list of arguments as JSON, and answers by a line, until in ends.
func each(out io.Writer, in io.Reader) error {
	asked, answers := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var args []string
		if err := asked.Decode(&args); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("reading what to do: %w", err)
		}
		var said strings.Builder
		var a answer
		if err := run(&said, args); err != nil {
			a.Error = err.Error()
		}
		a.Said = said.String()
		if err := answers.Encode(a); err != nil {
			return fmt.Errorf("answering: %w", err)
		}
	}
}

func main() {
	if err := run(os.Stdout, os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(out io.Writer, args []string) error {
	if len(args) == 1 && args[0] == "each" {
		return each(out, os.Stdin)
	}
	r := request{said: out}
	flags := flag.NewFlagSet("helm", flag.ContinueOnError)
	flags.StringVar(&r.chart, "chart", "deploy/chart", "folder of the chart")
	flags.StringVar(&r.namespace, "namespace", "gpuslice", "namespace of the release")
	flags.StringVar(&r.values, "values", "", "file of values over the chart's own")
	flags.StringVar(&r.kube, "kube", "v1.37.1", "version of the cluster")
	flags.StringVar(&r.there, "there", "", "namespaces of the cluster, which the chart may look up, separated by commas; without any it asks no cluster")
	flags.StringVar(&r.apis, "apis", "", "what the cluster has beside Kubernetes' own, such as security.openshift.io/v1, separated by commas")
	flags.StringVar(&r.version, "version", "", "of package: version of the chart and of the agent")
	flags.StringVar(&r.image, "image", "", "of package: name of the agent's image with its registry, without a tag; empty for the chart's own")
	flags.StringVar(&r.digest, "digest", "", "of package: digest of that image")
	flags.StringVar(&r.out, "out", ".", "of package: folder of the result")
	if len(args) == 0 {
		return errors.New("say what to do: template, lint, nulls, package or each")
	}
	if err := flags.Parse(args[1:]); err != nil {
		return err //nolint:wrapcheck // it says which flag
	}
	do := map[string]func() error{"template": r.template, "lint": r.lint, "nulls": r.nulls, "package": r.pack}[args[0]]
	if do == nil {
		return fmt.Errorf("%q is none of template, lint, nulls, package, each", args[0])
	}
	return do()
}

// over are the values that go over the chart's own.
func (r request) over() (map[string]any, error) {
	if r.values == "" {
		return map[string]any{}, nil
	}
	values, err := common.ReadValuesFile(r.values)
	if err != nil {
		return nil, fmt.Errorf("reading the values: %w", err)
	}
	return values, nil
}

// template prints what Helm would send to the cluster.
func (r request) template() error {
	chart, err := loader.Load(r.chart)
	if err != nil {
		return fmt.Errorf("loading the chart: %w", err)
	}
	over, err := r.over()
	if err != nil {
		return err
	}
	rendered, err := r.render(chart, over)
	if err != nil {
		return err
	}
	for _, crd := range chart.CRDObjects() {
		fmt.Fprintf(r.said, "---\n%s\n", crd.File.Data)
	}
	for _, name := range slices.Sorted(maps.Keys(rendered)) {
		if text := rendered[name]; filepath.Ext(name) == ".yaml" && strings.TrimSpace(text) != "" {
			fmt.Fprintf(r.said, "---\n# %s\n%s\n", name, strings.Trim(text, "\n"))
		}
	}
	return nil
}

// render gives the files that the chart makes of values over its own.
func (r request) render(chart *v2.Chart, over map[string]any) (map[string]string, error) {
	kube, err := common.ParseKubeVersion(r.kube)
	if err != nil {
		return nil, fmt.Errorf("-kube %q: %w", r.kube, err)
	}
	if wants := chart.Metadata.KubeVersion; wants != "" && !chartutil.IsCompatibleRange(wants, kube.Version) {
		return nil, fmt.Errorf("the chart is for Kubernetes %s, and the cluster has %s", wants, kube)
	}
	// Beside what a program is compiled with: under "go test" that would be Kubernetes 1.20.
	capabilities := &common.Capabilities{KubeVersion: *kube, APIVersions: common.VersionSet{"v1", "apps/v1", "rbac.authorization.k8s.io/v1"}}
	if r.apis != "" {
		capabilities.APIVersions = append(capabilities.APIVersions, strings.Split(r.apis, ",")...)
	}
	release := common.ReleaseOptions{Name: "gpuslice", Namespace: r.namespace, Revision: 1, IsInstall: true}
	values, err := util.ToRenderValues(chart, over, release, capabilities)
	if err != nil {
		return nil, fmt.Errorf("checking the values: %w", err)
	}
	render := engine.Render
	if r.there != "" {
		render = func(of charts.Charter, values common.Values) (map[string]string, error) {
			return engine.RenderWithClientProvider(of, values, namespaces(strings.Split(r.there, ",")))
		}
	}
	rendered, err := render(chart, values)
	if err != nil {
		return nil, fmt.Errorf("rendering: %w", err)
	}
	return rendered, nil
}

// namespaces are those of a cluster that has nothing else.
type namespaces []string

// GetClientFor implements engine.ClientProvider.
func (n namespaces) GetClientFor(_, kind string) (dynamic.NamespaceableResourceInterface, bool, error) {
	if kind != "Namespace" {
		return nil, false, fmt.Errorf("the chart asks for a %s, and the stand-in has namespaces alone", kind)
	}
	return lookup{there: n}, false, nil
}

// lookup answers what the chart asks.
type lookup struct {
	dynamic.NamespaceableResourceInterface // nil: the chart asks for one namespace at a time

	there []string
}

// Get implements dynamic.ResourceInterface.
func (l lookup) Get(_ context.Context, name string, _ metav1.GetOptions, _ ...string) (*unstructured.Unstructured, error) {
	if !slices.Contains(l.there, name) {
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, name) //nolint:wrapcheck // Helm looks at its kind
	}
	object := &unstructured.Unstructured{}
	object.SetAPIVersion("v1")
	object.SetKind("Namespace")
	object.SetName(name)
	return object, nil
}

// nulls prints for each of the chart's own values, by its path, what Helm makes of null in its place: "works", or the error in one line.
func (r request) nulls() error {
	chart, err := loader.Load(r.chart)
	if err != nil {
		return fmt.Errorf("loading the chart: %w", err)
	}
	for _, path := range paths(nil, chart.Values) {
		// Helm removes values from the chart that it has loaded, and from those over them.
		chart, err := loader.Load(r.chart)
		if err != nil {
			return fmt.Errorf("loading the chart: %w", err)
		}
		over, err := r.over()
		if err != nil {
			return err
		}
		setNull(over, path)
		said := "works"
		rendered, err := r.render(chart, over)
		for name, text := range rendered {
			if filepath.Ext(name) == ".yaml" {
				err = errors.Join(err, strict(text))
			}
		}
		if err != nil {
			said = strings.Join(strings.Fields(err.Error()), " ")
		}
		fmt.Fprintf(r.said, "%s: %s\n", strings.Join(path, "."), said)
	}
	return nil
}

// paths are those of all values, of mappings and of what is in them.
func paths(within []string, values map[string]any) (all [][]string) {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		at := append(slices.Clone(within), key)
		all = append(all, at)
		if inner, ok := values[key].(map[string]any); ok {
			all = append(all, paths(at, inner)...)
		}
	}
	return all
}

func setNull(values map[string]any, path []string) {
	for _, key := range path[:len(path)-1] {
		inner, ok := values[key].(map[string]any)
		if !ok {
			inner = map[string]any{}
			values[key] = inner
		}
		values = inner
	}
	values[path[len(path)-1]] = nil
}

// strict finds a key that is there twice.
func strict(text string) error {
	for document := range strings.SplitSeq(text, "\n---\n") {
		var object any
		if err := yaml.UnmarshalStrict([]byte(document), &object); err != nil {
			return fmt.Errorf("reading what was rendered: %w", err)
		}
	}
	return nil
}

// lint prints what Helm finds wrong with the chart; an error or a warning fails.
func (r request) lint() error {
	over, err := r.over()
	if err != nil {
		return err
	}
	kube, err := common.ParseKubeVersion(r.kube)
	if err != nil {
		return fmt.Errorf("-kube %q: %w", r.kube, err)
	}
	found := lint.RunAll(r.chart, over, r.namespace, lint.WithKubeVersion(kube))
	for _, m := range found.Messages {
		fmt.Fprintln(r.said, m)
	}
	if found.HighestSeverity >= support.WarningSev {
		return errors.New("the chart has the faults above")
	}
	return nil
}

// pack writes the chart's archive.
func (r request) pack() error {
	chart, err := loader.Load(r.chart)
	if err != nil {
		return fmt.Errorf("loading the chart: %w", err)
	}
	if r.version != "" {
		chart.Metadata.Version, chart.Metadata.AppVersion = strings.TrimPrefix(r.version, "v"), r.version
	}
	if r.image != "" {
		if err := r.pin(chart); err != nil {
			return err
		}
	}
	file, err := chartutil.Save(chart, r.out)
	if err != nil {
		return fmt.Errorf("packing the chart: %w", err)
	}
	fmt.Fprintln(r.said, file)
	return nil
}

// pin has the chart install the image by its name and digest, and keeps the comments of its values.
func (r request) pin(chart *v2.Chart) error {
	for _, f := range chart.Raw {
		if f.Name != chartutil.ValuesfileName {
			continue
		}
		for key, value := range map[string]string{"repository": r.image, "digest": r.digest} {
			line := regexp.MustCompile(`(?m)^(  ` + key + `: ).*$`) // image is the first of the values
			at := line.FindSubmatchIndex(f.Data)
			if at == nil {
				return fmt.Errorf("pinning the image: values.yaml has no image.%s", key)
			}
			f.Data = slices.Concat(f.Data[:at[3]], []byte(strconv.Quote(value)), f.Data[at[1]:])
		}
	}
	return nil
}
