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
		switch {
		case seen.journal != nil && seen.journal.Target == "":
			return want, errors.New("nothing is asked for, and what an agent has left on the node is given back")
		case seen.journal != nil:
			return want, fmt.Errorf("the label that asked for %s was removed in the middle of the change", seen.journal.Target)
		}
		return want, nil
	}
	wishes, err := a.wishes(seen, want.label, want.name)
	if err != nil {
		return want, err
	}
	want.targets = targets(wishes)
	want.fingerprint = fingerprint(want.name, wishes)
	if failed := seen.failed(want); failed != nil && seen.journal == nil {
		return want, &Stalled{Reason: failed.Reason, Message: failed.Message}
	}
	return want, nil
}

func targets(wishes map[nvml.UUID]nvml.Wish) plan.Desired {
	out := plan.Desired{}
	for gpu, w := range wishes {
		out[gpu] = plan.Target{Wish: w}
	}
	return out
}

// wishes is what a label asks of each GPU. A name may mean something else once a file can be read that cannot be now, so
// nothing is done by a catalog of which a part is missing.
func (a *Agent) wishes(seen observed, label, name string) (map[nvml.UUID]nvml.Wish, error) {
	catalog, err := a.catalog(seen, label)
	if err != nil {
		return nil, &Stalled{Reason: config.ReasonInvalidCatalog, Message: err.Error()}
	}
	wishes, err := wishesOf(catalog, label, name, seen.gpus)
	if err != nil {
		return nil, &Stalled{Reason: reasonOf(err), Message: fmt.Sprintf("label %s=%s: %v", label, name, err)}
	}
	return wishes, nil
}

func wishesOf(catalog config.Catalog, label, name string, gpus []nvml.GPU) (map[nvml.UUID]nvml.Wish, error) {
	if label == config.LabelProfile {
		return catalog.ProfileWishes(name, gpus)
	}
	return catalog.Wishes(name, gpus)
}

// catalog joins what the hardware offers with the administrator's files. The error says what is wrong with a file.
func (a *Agent) catalog(seen observed, label string) (config.Catalog, error) {
	var custom map[string]config.MIGConfig
	from, err := seen.configs.read(func(data []byte) (err error) {
		custom, err = a.parse(data)
		return err
	})
	if err != nil {
		return config.Catalog{}, err
	}
	catalog := config.Merge(config.Generate(seen.gpus), custom)
	if custom != nil {
		catalog.Custom = from
	}
	if label != config.LabelProfile {
		return catalog, nil
	}
	var profiles map[string]config.Profile
	from, err = seen.profiles.read(func(data []byte) (err error) {
		profiles, err = config.ParseProfiles(data)
		return err
	})
	return catalog.WithProfiles(from, profiles), err
}

// read parses the file, if there is one, and says where it comes from.
func (f *configMapFile) read(parse func(data []byte) error) (from string, err error) {
	switch {
	case f == nil || f.absent:
		return "", nil
	case f.err != nil:
		return f.name, f.err
	}
	if err := parse(f.data); err != nil {
		return f.name, fmt.Errorf("%s: %w", f.name, err)
	}
	return f.name, nil
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
