package manifest

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Configs are those of files, by the names that labels request.
type Configs struct {
	MIG      map[string]catalog.MIGConfig
	Profiles map[string]catalog.Profile
	Plugin   map[string]catalog.PluginConfig // by the key of their ConfigMap, or by the file's name

	places map[string]string // of each, by its format and name
}

// ReadConfigs reads the MIG configs, profiles and configs of the device plugin in the files, as Reader finds them there, and ignores
// other texts. It refuses a name that is there twice, since on a node only one of the two would count.
func ReadConfigs(files []string, stdin io.Reader) (Configs, error) {
	out := Configs{
		MIG: map[string]catalog.MIGConfig{}, Profiles: map[string]catalog.Profile{}, Plugin: map[string]catalog.PluginConfig{},
		places: map[string]string{},
	}
	for _, given := range files {
		found, err := out.read(given, stdin)
		if err != nil {
			return Configs{}, err
		}
		if found == 0 {
			return Configs{}, fmt.Errorf("%s: there is nothing here that a plan goes by: MIG configs, profiles, configs of the device plugin, or a ConfigMap with any of them",
				sanitize.Text(given))
		}
	}
	return out, nil
}

// read adds the configs of a file, or of a folder's files, and counts the texts that have them.
func (c *Configs) read(given string, stdin io.Reader) (found int, err error) {
	files, err := Files(given)
	if err != nil {
		return 0, fmt.Errorf("reading configs: %w", err)
	}
	for _, file := range files {
		text, err := ReadFile(file, stdin)
		if err != nil {
			return 0, fmt.Errorf("reading configs: %w", err)
		}
		var wrong error // the first
		r := Reader{Found: func(p Piece) {
			if wrong != nil {
				return
			}
			used, err := c.add(p)
			if err != nil {
				wrong = fmt.Errorf("%s: %w", p.At, err)
			}
			found += used
		}}
		if r.Read(sanitize.Text(file), text); wrong != nil {
			return 0, wrong
		}
	}
	return found, nil
}

// add adds the configs of a piece. used is 1 if it is of a format that a plan uses.
func (c *Configs) add(p Piece) (used int, err error) {
	if p.Err != nil {
		return 0, p.Err
	}
	switch p.Format {
	case MIGConfigs:
		parsed, err := migparted.Parse(p.Text)
		return 1, cmp.Or(AddPlaces(p, err), merge(c, p, c.MIG, parsed))
	case Profiles:
		parsed, err := catalog.ParseProfiles(p.Text)
		return 1, cmp.Or(AddPlaces(p, err), merge(c, p, c.Profiles, parsed))
	case PluginConfig:
		parsed, err := deviceplugin.Parse(p.Text)
		return 1, cmp.Or(AddPlaces(p, err), merge(c, p, c.Plugin, map[string]catalog.PluginConfig{p.Key: parsed}))
	case Maintenance, Settings, Object:
	}
	return 0, nil
}

// merge adds the configs of a piece, and refuses a name that is there.
func merge[T any](c *Configs, p Piece, into, more map[string]T) error {
	for _, name := range slices.Sorted(maps.Keys(more)) {
		key := fmt.Sprint(p.Format, " ", name)
		if _, twice := into[name]; twice {
			return fmt.Errorf("%q is in %s too", name, c.places[key])
		}
		into[name], c.places[key] = more[name], p.At
	}
	return nil
}
