package rollout

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
	"github.com/gpuslice/gpuslice/cmd/internal/show"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/models"
)

// mostGPUs bounds the GPUs of --gpus. No machine has as many.
const mostGPUs = 64

// offline plans for GPUs that are not there: it asks no cluster and no hardware.
type offline struct {
	gpus  string // "8xH100-80GB"
	files []string
}

// plan writes what a node with these GPUs would make of the request.
func (o *offline) plan(cmd *cobra.Command, a *application, format string) error {
	w, err := a.target()
	if err != nil {
		return err
	}
	gpus, err := parseGPUs(o.gpus)
	if err != nil {
		return err
	}
	known, err := manifest.ReadConfigs(o.files, cmd.InOrStdin())
	if err != nil {
		return err
	}
	out := forecast{Node: sanitize.Cut(o.gpus, cluster.LongestWord), Request: w.String(), Ruling: "Possible", Verdict: "possible by NVIDIA's tables; no node was asked"}
	answer, refused := planFor(gpus, known, w)
	if out.Answer = answer; refused != nil {
		out.ruling = show.Refused
		out.Ruling, out.Verdict = out.ruling.String(), sanitize.Message("cannot be: "+refused.Error(), sanitize.Longest)
	}
	text, err := out.text(format, output.PaperOf(cmd.OutOrStdout()))
	if err != nil {
		return err
	}
	if _, err := io.WriteString(cmd.OutOrStdout(), text); err != nil || refused == nil {
		return err
	}
	return &cli.ExitError{Code: cli.ExitHeldUp, Err: fmt.Errorf("%s cannot be on %s", w.Kind(), out.Node)}
}

// text returns the forecast in the format.
func (f *forecast) text(format string, p output.Paper) (string, error) {
	if format != "" {
		return (&forecasts{Nodes: []forecast{*f}}).text(format, p)
	}
	var lines []string
	for _, line := range p.Hanging(f.Node + ": " + f.Verdict) {
		lines = append(lines, printed(line, p, colourOf(f.ruling)))
	}
	if f.Answer != nil {
		lines = append(lines, printed(strings.Join(describe(f.Answer, false, p), "\n"), p))
	}
	return strings.Join(lines, "\n") + "\n", nil
}

var gpusForm = regexp.MustCompile(`^(?:([0-9]+)[xX])?(.+)$`)

// parseGPUs reads "4xA100-40GB,4xA100-80GB".
func parseGPUs(text string) (out []nvml.GPU, err error) {
	for part := range strings.SplitSeq(text, ",") {
		m := gpusForm.FindStringSubmatch(strings.TrimSpace(part))
		if m == nil {
			return nil, errors.New("flag --gpus has an empty part: write COUNTxMODEL, like 8xH100-80GB or 4xA100-40GB,4xA100-80GB")
		}
		gpu, known := models.GPU(m[2])
		if !known {
			return nil, fmt.Errorf("flag --gpus: %q is no model of NVIDIA's tables that can be cut%s", sanitize.Cut(m[2], cluster.LongestWord), meant(m[2]))
		}
		n, _ := strconv.Atoi(cmp.Or(m[1], "1")) // the form has digits; the largest number stands for one beyond it
		if n < 1 || n > mostGPUs-len(out) {
			return nil, fmt.Errorf("flag --gpus: %s: a node has 1 to %d GPUs", sanitize.Cut(part, cluster.LongestWord), mostGPUs)
		}
		for range n {
			gpu.Index, gpu.UUID = len(out), nvml.UUID("GPU-"+strconv.Itoa(len(out)))
			out = append(out, gpu)
		}
	}
	return out, nil
}

// meant says which models a name that is none may stand for.
func meant(name string) string {
	if begin := models.Beginning(name); len(begin) > 0 {
		return ": did you mean " + strings.Join(begin, " or ") + "?"
	}
	return "; known are " + strings.Join(models.Names(), ", ") + "; a GPU without MIG is shared as a whole, which needs no drawing: kubectl gpuslice plan NODE says what it offers then"
}

// planFor cuts the GPUs by the agent's own rules. The error is the refusal.
func planFor(gpus []nvml.GPU, known manifest.Configs, w cluster.Target) (*api.Answer, error) {
	configs := catalog.Merge(catalog.Generate(gpus), known.MIG).WithProfiles(known.Profiles)
	var requests map[nvml.UUID]nvml.Request
	sharing, strategy := catalog.Sharing{Strategy: catalog.SharingNone}, config.MIGStrategy("")
	var err error
	switch w.Label {
	case config.LabelProfile:
		requests, err = configs.ProfileRequests(w.Name, gpus)
		profile := known.Profiles[w.Name]
		if strategy = profile.MIGStrategy; profile.Sharing != nil {
			sharing = *profile.Sharing
		}
	case config.LabelDevicePluginConfig:
		named, there := known.Plugin[w.Name]
		if sharing, strategy = named.Sharing, named.MIGStrategy; !there {
			err = fmt.Errorf("no config of the device plugin is named %q: the files have %s", w.Name, cmp.Or(strings.Join(slices.Sorted(maps.Keys(known.Plugin)), ", "), "none"))
		}
	default:
		requests, err = configs.Requests(w.Name, gpus)
	}
	if err != nil {
		return nil, err
	}
	after, err := cutFor(gpus, requests)
	if err != nil {
		return nil, err
	}
	var notes []string
	if strategy == "" {
		strategy = catalog.FittingStrategy(after, config.MIGStrategyMixed, sharing.Strategy == catalog.SharingMPS)
		notes = append(notes, fmt.Sprintf("the MIG strategy of the device plugin is taken to be %s", strategy))
	}
	expected := capacity.Expected(after, strategy)
	if err := errors.Join(catalog.CheckStrategy(after, strategy), catalog.CheckSharing(after, strategy, sharing, slices.Collect(maps.Keys(expected)))); err != nil {
		return nil, err
	}
	return &api.Answer{
		For: w.String(), GPUs: api.Recuts(gpus, after, nil), Offers: capacity.Shared(expected, sharing).Summary(&sharing),
		Notes: notes,
	}, nil
}

// cutFor places the instances of the requests. GPUs without a request stay as they are.
func cutFor(gpus []nvml.GPU, requests map[nvml.UUID]nvml.Request) ([]nvml.GPU, error) {
	out := slices.Clone(gpus)
	var wrong []string
	for i := range out {
		g := &out[i]
		r, asked := requests[g.UUID]
		if !asked {
			continue
		}
		if g.Enabled != r.MIG { // the change of the mode takes all instances away
			g.Instances = nil
		}
		if g.Enabled = r.MIG; !r.MIG {
			continue
		}
		solved, err := nvml.Solve(*g, r.Devices)
		if err != nil {
			if text := g.Model + ": " + err.Error(); !slices.Contains(wrong, text) {
				wrong = append(wrong, text)
			}
			continue
		}
		g.Instances = nil
		for _, p := range solved.Target {
			instance := nvml.Instance{Placed: p}
			for _, name := range p.Devices() {
				instance.Devices = append(instance.Devices, nvml.Device{Profile: name})
			}
			g.Instances = append(g.Instances, instance)
		}
	}
	if len(wrong) > 0 {
		return nil, errors.New(strings.Join(wrong, "; "))
	}
	return out, nil
}
