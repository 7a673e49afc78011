// Package schema makes JSON schemas of the files that people write for the agent, settings, profiles and
// maintenance, for editors and for checks before a file reaches a cluster.
//
// A schema is less than the agent's own check, which alone knows what belongs together, and which kubectl gpuslice validate
// does anywhere. It lets no file pass that has a field too many or a value of the wrong form.
package schema

//go:generate go run ./cmd/schema . ../../deploy/schema

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"

	"github.com/invopop/jsonschema"
)

// The names of the schemas.
const (
	ProfilesFile    = "profiles.schema.json"
	SettingsFile    = "settings.schema.json"
	MaintenanceFile = "maintenance.schema.json"
)

// packagePath is the import path of this package.
const packagePath = "github.com/gpuslice/gpuslice/config/schema"

// Files are the schemas by the names of their files. What fields mean is taken from the comments of this package, whose
// source is in that directory.
func Files(source string) (map[string][]byte, error) {
	files := map[string][]byte{}
	for name, format := range map[string]any{ProfilesFile: Profiles{}, SettingsFile: Settings{}, MaintenanceFile: Maintenance{}} {
		r := jsonschema.Reflector{Namer: nameOf}
		if err := r.AddGoComments(packagePath, source); err != nil {
			return nil, fmt.Errorf("reading comments of the schemas' source: %w", err)
		}
		s := r.Reflect(format)
		s.ID = "" // a schema is used from where it lies
		text, err := json.MarshalIndent(s, "", "  ")
		if err != nil {
			return nil, fmt.Errorf("writing %s: %w", name, err)
		}
		files[name] = append(text, '\n')
	}
	return files, nil
}

// nameOf is a type's name within its schema: OneOrMoreUUID for OneOrMore[UUID], since names are parts of paths there.
func nameOf(t reflect.Type) string {
	generic, of, ok := strings.Cut(t.Name(), "[")
	if !ok {
		return generic
	}
	return generic + strings.TrimSuffix(of[strings.LastIndex(of, ".")+1:], "]")
}
