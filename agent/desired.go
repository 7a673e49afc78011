package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// wish is what the node's labels ask for.
type wish struct {
	name        string       // of the config; empty if nothing is asked for
	label       string       // that asks for it
	targets     plan.Desired // GPU by GPU
	fingerprint string       // tells this wish from any other, on these GPUs
	undo        bool         // the way back is taken instead
	why         error        // for another reason than a failure that the journal keeps
}

// desired turns labels into targets. A bad wish is a *Stalled error, which is told and disturbs nothing. Any error ends a
// change that is under way.
func (a *Agent) desired(seen observed) (wish, error) {
	want := wish{label: config.LabelProfile, name: seen.node.Labels[config.LabelProfile]}
	if want.name == "" {
		want.label, want.name = config.LabelMIGConfig, seen.node.Labels[config.LabelMIGConfig]
	}
	if want.name == "" {
		if seen.journal != nil {
			return want, fmt.Errorf("the label %s was removed in the middle of the change to %s", config.LabelMIGConfig, seen.journal.Target)
		}
		return want, nil
	}
	catalog, err := a.catalog(seen)
	if err != nil {
		// Even a generated name may mean something else once the file can be read: the file wins on equal names.
		return want, &Stalled{Reason: config.ReasonInvalidCatalog, Message: err.Error()}
	}
	wishes, err := catalog.Wishes(want.name, seen.gpus)
	if err != nil {
		return want, &Stalled{Reason: reasonOf(err), Message: fmt.Sprintf("label %s=%s: %v", want.label, want.name, err)}
	}
	want.targets = plan.Desired{}
	for gpu, w := range wishes {
		want.targets[gpu] = plan.Target{Wish: w}
	}
	want.fingerprint = fingerprint(want.name, wishes)
	if failed := seen.failed(want); failed != nil && seen.journal == nil {
		return want, &Stalled{Reason: failed.Reason, Message: failed.Message}
	}
	return want, nil
}

// catalog merges what the hardware offers with the administrator's file. The error says what is wrong with the file.
func (a *Agent) catalog(seen observed) (config.Catalog, error) {
	generated := config.Generate(seen.gpus)
	if seen.configs == nil || seen.configs.absent {
		return config.Merge(generated, nil), nil
	}
	if seen.configs.err != nil {
		return config.Catalog{}, seen.configs.err
	}
	custom, err := a.parse(seen.configs.data)
	if err != nil {
		return config.Catalog{}, fmt.Errorf("%s: %w", seen.configs.name, err)
	}
	catalog := config.Merge(generated, custom)
	catalog.Custom = seen.configs.name
	return catalog, nil
}

// reasonOf is the reason that an error of the catalog carries.
func reasonOf(err error) config.Reason {
	var reasoned interface{ Reason() config.Reason }
	if errors.As(err, &reasoned) {
		return reasoned.Reason()
	}
	return config.ReasonInvalidCatalog
}

func fingerprint(name string, wishes map[nvml.UUID]nvml.Wish) string {
	h := sha256.New()
	fmt.Fprint(h, name)
	for _, gpu := range slices.Sorted(maps.Keys(wishes)) {
		fmt.Fprintf(h, " %s %v", gpu, wishes[gpu]) // prints maps in the order of their keys
	}
	return hex.EncodeToString(h.Sum(nil)[:6])
}
