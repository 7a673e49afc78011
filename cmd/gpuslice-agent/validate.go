package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/config/migparted"
)

func (o *options) validate() *cobra.Command {
	var files []string
	c := &cobra.Command{
		Use:   "validate -f FILE...",
		Short: "Check files before they reach a cluster: profiles, settings, MIG configs, configs of the device plugin",
		Long: "Check files before they reach a cluster. Which kind a file is shows by what is in it: profiles, settings, MIG configs in mig-parted's\n" +
			"format, configs of NVIDIA's device plugin, or manifests with ConfigMaps of any of them. Everything wrong is said at once.",
		Example: "gpuslice-agent validate -f deploy/examples/configmap-pools.yaml\nkubectl get configmap time-slicing-config -o yaml | gpuslice-agent validate -f -",
		RunE: func(cmd *cobra.Command, args []string) error {
			files = append(files, args...) // what a shell makes of -f *.yaml
			if len(files) == 0 {
				return errors.New("name files to check with -f")
			}
			v := validation{out: &printer{w: cmd.OutOrStdout()}}
			for _, file := range files {
				text, err := contents(file, cmd.InOrStdin())
				if err != nil {
					return err
				}
				v.file(file, text)
			}
			return v.result()
		},
	}
	c.Flags().StringArrayVarP(&files, "file", "f", nil, "file to check, several by several flags; - for standard input")
	return c
}

func contents(file string, stdin io.Reader) ([]byte, error) {
	if file == "-" {
		return io.ReadAll(stdin)
	}
	return os.ReadFile(path.Clean(file))
}

// format is a kind of file that the agent or the plugin reads.
type format struct {
	name  string
	is    func(top map[string]any) bool
	check func(text []byte) (found string, err error)
}

// formats, of which the first that fits counts. A file is told by any field that only its kind has, so that one with a
// mistake is told too.
var formats = []format{
	{"profiles", func(top map[string]any) bool {
		return top["kind"] == config.ProfilesKind || top["kind"] != config.SettingsKind && has(top, "profiles")
	}, counted(config.ParseProfiles, "profile")},
	{"settings", func(top map[string]any) bool { return top["kind"] == config.SettingsKind || isOurs(top) }, func(text []byte) (string, error) {
		_, err := config.Parse(text)
		return "settings", err
	}},
	{"MIG configs", func(top map[string]any) bool { return has(top, "mig-configs") }, counted(migparted.Parse, "MIG config")},
	{"a device plugin config", func(top map[string]any) bool {
		return has(top, "version", "flags", "sharing", "resources", "imex") && !has(top, "apiVersion", "kind")
	}, func(text []byte) (string, error) {
		read, err := deviceplugin.Parse(text)
		return describeSharing(read.Sharing), err
	}},
}

// isOurs reports whether a document says that it is in a format of gpuslice.
func isOurs(top map[string]any) bool {
	version, _ := top["apiVersion"].(string)
	return strings.HasPrefix(version, "gpuslice.io/")
}

// has reports whether one of the fields is there, in whatever case.
func has(top map[string]any, fields ...string) bool {
	for name := range top {
		if slices.ContainsFunc(fields, func(f string) bool { return strings.EqualFold(f, name) }) {
			return true
		}
	}
	return false
}

func counted[T any](parse func([]byte) (map[string]T, error), noun string) func([]byte) (string, error) {
	return func(text []byte) (string, error) {
		all, err := parse(text)
		if len(all) == 1 {
			return "1 " + noun, err
		}
		return fmt.Sprintf("%d %ss", len(all), noun), err
	}
}

func describeSharing(s config.Sharing) string {
	if s.Strategy == config.SharingNone {
		return "device plugin config without sharing"
	}
	var parts []string
	for _, resource := range s.Resources() {
		name, replicas := s.Offered(resource)
		part := fmt.Sprintf("%s x %d", resource, replicas)
		if name != resource {
			part += " as " + name
		}
		parts = append(parts, part)
	}
	return fmt.Sprintf("device plugin config: %s, %s", s.Strategy, strings.Join(parts, ", "))
}

// validation prints what is found, and counts.
type validation struct {
	out          *printer
	right, wrong int
	passedOver   int // manifests of something else
}

// file checks all that is in a file.
func (v *validation) file(name string, text []byte) {
	before := *v
	documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			v.report(name, "", err)
			return
		}
		v.document(name, document)
	}
	if *v == before {
		v.report(name, "", errNothingToCheck)
	}
}

var errNothingToCheck = errors.New("there is nothing here that gpuslice reads: profiles (kind: Profiles), settings (kind: Settings), MIG configs (mig-configs:)," +
	" configs of NVIDIA's device plugin (sharing:, flags:), or a ConfigMap with any of them")

// document checks one document of a file: a manifest, or what the agent reads.
func (v *validation) document(name string, text []byte) {
	top, err := mappingOf(text)
	switch {
	case err != nil:
		v.report(name, "", err)
	case top["kind"] == "ConfigMap":
		v.configMap(name, text)
	case top["kind"] == "List", top["kind"] == "ConfigMapList":
		v.list(name, top["items"])
	case top["apiVersion"] != nil && top["kind"] != nil && !isOurs(top):
		v.passedOver++
		v.out.printf("%s: %v, passed over\n", name, top["kind"])
	default:
		v.content(name, text, top)
	}
}

func (v *validation) list(name string, items any) {
	list, ok := items.([]any)
	if !ok {
		v.report(name, "", errors.New("items: must be a list"))
	}
	for _, item := range list {
		text, err := yaml.Marshal(item)
		if err != nil {
			v.report(name, "", err)
			continue
		}
		v.document(name, text)
	}
}

func (v *validation) configMap(name string, text []byte) {
	var m corev1.ConfigMap
	if err := yaml.UnmarshalStrict(text, &m); err != nil {
		v.report(name, "", fmt.Errorf("reading a ConfigMap: %w", err))
		return
	}
	for _, key := range slices.Sorted(maps.Keys(m.Data)) {
		at := fmt.Sprintf("%s, ConfigMap %s, %s", name, path.Join(m.Namespace, m.Name), key)
		content := []byte(m.Data[key])
		top, err := mappingOf(content)
		switch {
		case err == nil:
			v.content(at, content, top)
		case strings.HasSuffix(key, ".yaml"), strings.HasSuffix(key, ".yml"):
			v.report(at, "", err)
		}
	}
}

// content checks what the agent reads; what is something else is passed over.
func (v *validation) content(at string, text []byte, top map[string]any) {
	for _, f := range formats {
		if f.is(top) {
			found, err := f.check(text)
			if err != nil {
				found = f.name
			}
			v.report(at, found, err)
			return
		}
	}
}

// mappingOf reads the fields of a document. One that is empty has none.
func mappingOf(text []byte) (map[string]any, error) {
	var top map[string]any
	if err := yaml.Unmarshal(text, &top); err != nil {
		return nil, fmt.Errorf("reading YAML: %w", err)
	}
	return top, nil
}

func (v *validation) report(at, found string, err error) {
	switch {
	case err == nil:
		v.right++
		v.out.printf("%s: %s\n", at, found)
		return
	case found == "":
		v.out.printf("%s: wrong\n", at)
	default:
		v.out.printf("%s: %s, wrong\n", at, found)
	}
	v.wrong++
	for _, line := range strings.Split(err.Error(), "\n") {
		v.out.printf("  %s\n", line)
	}
}

func (v *validation) result() error {
	switch {
	case v.out.err != nil:
		return v.out.err
	case v.right+v.wrong == 0:
		return errNothingToCheck
	case v.wrong == 0:
		return nil
	}
	return fmt.Errorf("%d of %d files and keys cannot be used", v.wrong, v.right+v.wrong)
}
