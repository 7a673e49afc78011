package cut

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// Figures are what was measured, in its order.
type Figures struct{ rows []figure }

type figure struct {
	what     string
	function string // of the library, for the simulator; empty for what is no call
	took     []time.Duration
}

// Add adds a time that is not of a single call.
func (f *Figures) Add(what string, took time.Duration) { f.add(what, "", took) }

func (f *Figures) add(what, function string, took time.Duration) {
	at := slices.IndexFunc(f.rows, func(r figure) bool { return r.what == what && r.function == function })
	if at < 0 {
		f.rows = append(f.rows, figure{what: what, function: function})
		at = len(f.rows) - 1
	}
	f.rows[at].took = append(f.rows[at].took, took)
}

// refused is the row of calls that the driver refused for a moment, which are in no other row.
const refused = "refused calls, until the same call was done"

// addCalls adds those of the calls that have a function of these, under one name.
func (f *Figures) addCalls(what string, calls []Call, functions ...string) {
	for _, c := range calls {
		switch {
		case !slices.Contains(functions, c.Function):
		case c.Refused:
			f.add(refused, c.Function, c.Took)
		default:
			f.add(what, c.Function, c.Took)
		}
	}
}

func median(took []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(took))
	return sorted[len(sorted)/2]
}

// Markdown is the table for a pull request, under a title.
func (f *Figures) Markdown(title string) string {
	w := table.NewWriter()
	w.AppendHeader(table.Row{"what", "call", "median", "least", "most", "times"})
	for _, r := range f.rows {
		w.AppendRow(table.Row{r.what, r.function, short(median(r.took)), short(slices.Min(r.took)), short(slices.Max(r.took)), len(r.took)})
	}
	return "### " + title + "\n\n" + w.RenderMarkdown()
}

// short is a duration with three digits.
func short(d time.Duration) string {
	unit := time.Nanosecond
	for d >= 1000*unit {
		unit *= 10
	}
	return d.Round(unit).String()
}

// Profile is a spec of test/gpusim: a GPU like this one, with the median of each call that was measured.
func (f *Figures) Profile(title string, g nvml.GPU) (string, error) {
	took := map[string][]time.Duration{}
	for _, r := range f.rows {
		if r.function != "" && r.what != refused {
			took[r.function] = append(took[r.function], r.took...)
		}
	}
	model, known := gpusim.Like(g)
	spec := gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: model}}, Delays: map[string]string{}}
	for function, all := range took {
		spec.Delays[function] = short(median(all))
	}
	for function, as := range sameCall {
		if d, measured := spec.Delays[as]; measured && spec.Delays[function] == "" {
			spec.Delays[function] = d
		}
	}
	text, err := yaml.Marshal(spec)
	if err != nil {
		return "", fmt.Errorf("writing the profile: %w", err)
	}
	head := "# " + title + "\n# A spec of test/gpusim: gpusim create FILE. Calls that were not measured take no time.\n"
	if !known {
		head += "# test/gpusim does not have this model: its profiles are those of " + model + ".\n"
	}
	return head + string(text), nil
}

// sameCall are functions that the agent does not call, by those that do the same.
var sameCall = map[string]string{
	gpusim.CreateGpuInstance:                  gpusim.CreateGpuInstanceWithPlacement,
	gpusim.CreateComputeInstanceWithPlacement: gpusim.CreateComputeInstance,
}

// Title says what was measured, and where.
func (c *Calls) Title(ctx context.Context, g nvml.GPU, simulated bool) string {
	words := []string{g.Model, c.version(ctx), "virtualization " + string(g.Virtualization)}
	if simulated {
		words[0] = "SIMULATED " + words[0]
	}
	return strings.Join(words, ", ")
}
