package render

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	node "go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	forms "k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Prices are what an hour of a GPU costs, as a user's file has it.
type Prices struct {
	Currency currency `json:"currency"`
	// Default is the price of the models that are not listed; without it these have none.
	Default *price   `json:"default"`
	Models  []Priced `json:"models" list:"must be a list of \"model\" and \"perHour\""`
}

// Priced is the price of one model.
type Priced struct {
	Model   model `json:"model" missing:"is missing: write the model as NVIDIA's driver does, like NVIDIA H100 80GB HBM3"`
	PerHour price `json:"perHour" missing:"is missing: write the price of one GPU for an hour, like 2.49"`
}

// price is a decimal number as the file has it, so that no digit is lost.
type price string

// priceForm has no zeros before a number: YAML and Prometheus read such as octal.
var priceForm = regexp.MustCompile(`^(0|[1-9][0-9]{0,5})(\.[0-9]{1,6})?$`)

// ReadText implements what check reads a text by.
func (p *price) ReadText(text string) error {
	if !priceForm.MatchString(text) {
		return errors.New("must be a price, a number from 0 to 999999 in plain digits, with at most six decimals, like 2.49")
	}
	*p = price(text)
	return nil
}

// currency is written beside each price; empty for none.
type currency string

var currencyForm = regexp.MustCompile(`^[A-Z]{3}$`)

// ReadText implements what check reads a text by.
func (c *currency) ReadText(text string) error {
	if !currencyForm.MatchString(text) {
		return errors.New("must be a currency of three capital letters, like USD")
	}
	*c = currency(text)
	return nil
}

// model is a GPU's model by the driver.
type model string

// modelForm is the form of the driver's names: "NVIDIA A100-SXM4-80GB", "NVIDIA RTX PRO 6000 Blackwell Server Edition".
var modelForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9 ./()+_-]{0,126}[A-Za-z0-9)]$`)

// labelForm is the form of GPU feature discovery, with dashes for the spaces. The driver writes a space behind the brand.
var labelForm = regexp.MustCompile(`^(NVIDIA|Tesla|Quadro|GeForce|GRID)-\S*$`)

// ReadText implements what check reads a text by.
func (m *model) ReadText(text string) error {
	if !modelForm.MatchString(text) {
		return errors.New("must be a model as NVIDIA's driver writes it, of at most 128 letters, digits, spaces and ./()+_-, like NVIDIA H100 80GB HBM3")
	}
	if labelForm.MatchString(text) {
		return fmt.Errorf("is of the label %s: write the model as NVIDIA's driver does, with its spaces, as the label model of gpuslice_gpu_share has it",
			features.LabelProduct)
	}
	*m = model(text)
	return nil
}

// mostPrices bounds the models of a file. NVIDIA has some hundred for data centers.
const mostPrices = 500

// Check refuses two prices of one model, too many, and none at all.
func (p *Prices) Check(c *check.Mistakes, _ string, _ check.Written) {
	there := map[model]bool{}
	for i, m := range p.Models {
		if m.Model != "" && there[m.Model] {
			c.Refuse(fmt.Sprintf("models[%d].model", i), string(m.Model), "is there twice")
		}
		there[m.Model] = true
	}
	switch {
	case len(p.Models) > mostPrices:
		c.Add(&check.InvalidError{Field: "models", Want: fmt.Sprintf("may be at most %d", mostPrices)})
	case len(p.Models) == 0 && p.Default == nil && len(*c) == 0:
		c.Add(&check.InvalidError{Field: "models", Want: "must have the price of a model, unless \"default\" has one for all"})
	}
}

// ReadPrices reads the file of prices. The error names each mistake with its line.
func ReadPrices(file string, stdin io.Reader) (Prices, error) {
	text, err := manifest.ReadFile(file, stdin)
	if err != nil {
		return Prices{}, fmt.Errorf("reading prices: %w", err)
	}
	var pieces []manifest.Piece
	r := manifest.Reader{Found: func(p manifest.Piece) { pieces = append(pieces, p) }}
	r.Read(sanitize.Text(file), text)
	if len(pieces) != 1 {
		return Prices{}, fmt.Errorf("%s: write the prices as one document with \"currency\", \"default\" and \"models\"; it has %d", sanitize.Text(file), len(pieces))
	}
	p := pieces[0]
	if p.Err != nil {
		return Prices{}, fmt.Errorf("%s: %w", p.At, p.Err)
	}
	out, err := parsePrices(p.Text)
	if err != nil {
		return Prices{}, fmt.Errorf("%s: %w", p.At, manifest.AddPlaces(p, err))
	}
	return out, nil
}

func parsePrices(text []byte) (out Prices, err error) {
	if _, err := document.JSON(text); err != nil {
		return Prices{}, fmt.Errorf("reading YAML: %w", err)
	}
	text, err = quoteNumbers(text)
	if err != nil {
		return Prices{}, fmt.Errorf("reading YAML: %w", err)
	}
	doc, err := document.JSON(text)
	if err != nil {
		return Prices{}, fmt.Errorf("reading YAML: %w", err)
	}
	var c check.Mistakes
	c.Read("file", doc, &out)
	return out, errors.Join(c...)
}

// quoteNumbers quotes each number, so that it is read as a person writes it: for YAML 010 is 8, and 1_000 is 1000. The text must be safe to decode.
func quoteNumbers(text []byte) ([]byte, error) {
	var root node.Node
	if err := node.Unmarshal(text, &root); err != nil {
		return nil, err //nolint:wrapcheck // the caller does
	}
	nodes := []*node.Node{&root}
	for len(nodes) > 0 {
		n := nodes[0]
		nodes = append(nodes[1:], n.Content...)
		if n.Kind == node.ScalarNode && (n.ShortTag() == "!!int" || n.ShortTag() == "!!float") {
			n.Tag, n.Style = "", node.DoubleQuotedStyle
		}
	}
	return node.Marshal(&root) //nolint:wrapcheck // the caller does
}

func renderPrices(r *rendering) *cobra.Command {
	var namespace, name string
	var labels []string
	var openCost bool
	c := &cobra.Command{
		Use: "prices", Short: "Write a PrometheusRule of what an hour of each model of GPU costs", Args: cobra.NoArgs,
		Long: "Write, as YAML, a PrometheusRule of what an hour of each model of GPU costs. By it and the agents' metrics, the rules of\n" +
			"deploy/components/prometheus record what pods, namespaces and slices cost, and what is idle or lost.",
		Example: "kubectl gpuslice render prices -f prices.yaml | kubectl apply -f -",
		RunE: func(cmd *cobra.Command, _ []string) error {
			on, err := readLabels(labels)
			if err := errors.Join(checkName("to", namespace, namespaceForm), checkName("name", name, objectForm), err); err != nil {
				return err
			}
			if len(r.files) != 1 {
				return errors.New("name the one file of prices with -f")
			}
			if err := onlyFile(cmd.Parent().PersistentFlags()); err != nil {
				return err
			}
			prices, err := ReadPrices(r.files[0], cmd.InOrStdin())
			if err != nil {
				return err
			}
			on[labelName] = "gpuslice"
			text, err := Text(nil, []any{prices.rules(metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: on}, openCost)})
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
	c.Flags().StringVar(&namespace, "to", "gpuslice", "namespace of the PrometheusRule")
	c.Flags().StringVar(&name, "name", "gpuslice-prices", "name of the PrometheusRule")
	c.Flags().StringArrayVar(&labels, "label", nil, "label of the PrometheusRule, KEY=VALUE, as your Prometheus selects rules by; several by several flags")
	c.Flags().BoolVar(&openCost, "opencost", false, "record the metrics too that OpenCost reads what GPUs cost and pods have from")
	return c
}

// onlyFile refuses what render's other commands alone read.
func onlyFile(flags *pflag.FlagSet) (err error) {
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Changed && f.Name != "file" {
			err = errors.Join(err, fmt.Errorf("prices go by no flag --%s: leave it out", f.Name))
		}
	})
	return err
}

// labelName is the label that all objects of the project have.
const labelName = "app.kubernetes.io/name"

func readLabels(texts []string) (map[string]string, error) {
	out := map[string]string{}
	for _, text := range texts {
		key, value, is := strings.Cut(text, "=")
		if !is || len(forms.IsQualifiedName(key)) > 0 || len(forms.IsValidLabelValue(value)) > 0 {
			return out, fmt.Errorf("flag --label is %s: write KEY=VALUE, as release=prometheus", sanitize.Cut(strconv.Quote(text), manifest.LongestName))
		}
		wrong := ""
		if _, twice := out[key]; twice {
			wrong = "an earlier one has this key"
		}
		if key == labelName {
			wrong = "the label of this key is gpuslice"
		}
		if wrong != "" {
			return out, fmt.Errorf("flag --label is %s: %s", sanitize.Cut(strconv.Quote(text), manifest.LongestName), wrong)
		}
		out[key] = value
	}
	return out, nil
}

// MetricPrice is what an hour of a GPU costs, by its model, currency, and the object of the rules, NAMESPACE/NAME, in the label prices.
const MetricPrice = "gpuslice:gpu_price:per_hour"

func (p Prices) rules(meta metav1.ObjectMeta, openCost bool) *kinds.PrometheusRule {
	// With this label, prices of two objects are two series, and the rules of costs take neither. Without it, Prometheus would record one of them by chance.
	labels := map[string]string{"prices": meta.Namespace + "/" + meta.Name}
	if p.Currency != "" {
		labels["currency"] = string(p.Currency)
	}
	var rules []kinds.Rule
	listed := []string{}
	for _, m := range p.Models {
		of := maps.Clone(labels)
		of["model"] = string(m.Model)
		rules = append(rules, kinds.Rule{Record: MetricPrice, Expr: fmt.Sprintf("vector(%s)", m.PerHour), Labels: of})
		listed = append(listed, fmt.Sprintf("model!=%q", m.Model))
	}
	if p.Default != nil {
		slices.Sort(listed)
		rules = append(rules, kinds.Rule{
			Record: MetricPrice, Labels: labels, Expr: fmt.Sprintf("%s + 0 * count by (model) (gpuslice_gpu_share{%s})", *p.Default, strings.Join(listed, ",")),
		})
	}
	out := &kinds.PrometheusRule{
		TypeMeta: metav1.TypeMeta{APIVersion: kinds.MonitoringVersion, Kind: kinds.KindPrometheusRule}, ObjectMeta: meta,
		Spec: kinds.RuleGroups{Groups: []kinds.RuleGroup{{Name: "gpuslice-prices", Rules: rules}}},
	}
	if openCost {
		out.Spec.Groups = append(out.Spec.Groups, openCostRules)
	}
	return out
}

// podShares are the shares of pods with the labels namespace and pod, which Prometheus has renamed unless it honors an agent's labels. Each counts once, also
// while there are series of two agents of a node, or of two replicas of Prometheus.
const podShares = `max by (node, namespace, pod, gpu, device, resource, model) (
  label_replace(label_replace(
    max by (node, exported_namespace, exported_pod, gpu, device, resource, model) (gpuslice_pod_gpu_share{exported_pod!=""}),
    "namespace", "$1", "exported_namespace", "(.+)"), "pod", "$1", "exported_pod", "(.+)")
  or gpuslice_pod_gpu_share{exported_pod=""}
)`

// deviceRequests are what containers request; a container may list a resource and request none of it.
const deviceRequests = `(kube_pod_container_resource_requests{resource=~"nvidia_com_(gpu|mig_).*"} > 0)`

// nodeLabels gives a record by node the other labels that OpenCost's own metrics of nodes have.
const nodeLabels = `
* on (node) group_left (uid, instance, instance_type, region, provider_id, arch)
max by (node, uid, instance, instance_type, region, provider_id, arch) (0 * node_cpu_hourly_cost + 1)`

// nodeGPUs is the number of GPUs of each node.
const nodeGPUs = "count by (node) (group by (node, gpu) (gpuslice_gpu_share))"

// openCostRules record OpenCost's metrics of GPUs, with its labels, in place of its own. OpenCost itself counts requests of
// nvidia.com/gpu, and no MIG devices. The parts of a pod are divided among the containers that request devices, as far as kube-state-metrics knows of
// requests, and else among all of its containers. A pod of a StatefulSet has series of two nodes while it moves, and each node has its own part.
var openCostRules = kinds.RuleGroup{Name: "gpuslice-opencost", Rules: []kinds.Rule{
	{
		// OpenCost multiplies it by the number of all GPUs, also of those without a price.
		Record: "node_gpu_hourly_cost",
		Expr: "sum by (node) (group by (node, gpu, model) (gpuslice_gpu_share) * on (model) group_left () " + MetricPrice + ")\n/ on (node) " + nodeGPUs +
			nodeLabels,
	},
	{Record: "node_gpu_count", Expr: nodeGPUs + nodeLabels},
	{
		Record: "gpuslice:container_gpu_request:ratio",
		Expr: "sum by (node, namespace, pod, container) (" + deviceRequests + `)
/ on (node, namespace, pod) group_left ()
sum by (node, namespace, pod) (` + deviceRequests + ")",
	},
	{
		Record: "gpuslice:container_gpu_request:ratio",
		Expr: `(
  max by (node, namespace, pod, container) (0 * container_cpu_allocation{container!="",container!="POD"} + 1)
  / on (node, namespace, pod) group_left ()
  count by (node, namespace, pod) (max by (node, namespace, pod, container) (container_cpu_allocation{container!="",container!="POD"}))
)
unless on (node, namespace, pod) ` + deviceRequests,
	},
	{
		Record: "container_gpu_allocation",
		Expr: `max by (namespace, pod, container, node, instance, uid) (0 * container_cpu_allocation{container!="",container!="POD"} + 1)
* on (node, namespace, pod, container) group_left () gpuslice:container_gpu_request:ratio
* on (node, namespace, pod) group_left () sum by (node, namespace, pod) (` + podShares + ")",
	},
}}
