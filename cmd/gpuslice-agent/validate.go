package main

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/config/migparted"
)

func (o *options) validate() *cobra.Command {
	var files []string
	var at string
	c := &cobra.Command{
		Use:   "validate -f FILE...",
		Short: "Check files before they reach a cluster: profiles, settings, maintenance, MIG configs, configs of the device plugin",
		Long: "Check files before they reach a cluster. Which kind a file is shows by what is in it: profiles, settings, maintenance, MIG configs in\n" +
			"mig-parted's format, configs of NVIDIA's device plugin, or manifests with ConfigMaps of any of them. Everything wrong is said at once.\n" +
			"Of maintenance it says when each pool opens next for as long as a change is estimated to take.",
		Example: "gpuslice-agent validate -f deploy/examples/configmap-pools.yaml\nkubectl get configmap time-slicing-config -o yaml | gpuslice-agent validate -f -",
		RunE: func(cmd *cobra.Command, args []string) error {
			files = append(files, args...) // what a shell makes of -f *.yaml
			if len(files) == 0 {
				return errors.New("name files to check with -f")
			}
			now := time.Now()
			if at != "" {
				var err error
				if now, err = time.Parse(time.RFC3339, at); err != nil {
					return fmt.Errorf("flag --at is %q: write a date with its time and zone, like 2026-12-20T22:00:00Z", at)
				}
			}
			v := validation{out: &printer{w: cmd.OutOrStdout()}, now: now}
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
	c.Flags().StringVar(&at, "at", "", "time from which on the next openings of maintenance are told, like 2026-12-20T22:00:00Z; without it now")
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
	check func(text []byte, now time.Time) (found string, err error)
}

// formats, of which the first that fits counts. A file is told by any field that only its kind has, so that one with a
// mistake is told too.
var formats = []format{
	{"profiles", func(top map[string]any) bool {
		return top["kind"] == config.ProfilesKind || top["kind"] != config.SettingsKind && has(top, "profiles")
	}, counted(config.ParseProfiles, "profile")},
	{"maintenance", func(top map[string]any) bool {
		return top["kind"] == config.MaintenanceKind || top["kind"] != config.SettingsKind && has(top, "windows", "freezes", "pools")
	}, func(text []byte, now time.Time) (string, error) {
		m, err := config.ParseMaintenance(text)
		return describeMaintenance(m, now), err
	}},
	{"settings", func(top map[string]any) bool { return top["kind"] == config.SettingsKind || isOurs(top) }, func(text []byte, _ time.Time) (string, error) {
		_, err := config.Parse(text)
		return "settings", err
	}},
	{"MIG configs", func(top map[string]any) bool { return has(top, "mig-configs") }, counted(migparted.Parse, "MIG config")},
	{"a device plugin config", func(top map[string]any) bool {
		return has(top, "version", "flags", "sharing", "resources", "imex") && !has(top, "apiVersion", "kind")
	}, func(text []byte, _ time.Time) (string, error) {
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

func counted[T any](parse func([]byte) (map[string]T, error), noun string) func([]byte, time.Time) (string, error) {
	return func(text []byte, _ time.Time) (string, error) {
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

// describeMaintenance says of each pool when it opens next, so that people see what they wrote.
func describeMaintenance(m config.Maintenance, now time.Time) string {
	lines := []string{fmt.Sprintf("maintenance of %d pools", len(m.Pools))}
	if len(m.Pools) == 1 {
		lines[0] = "maintenance of 1 pool"
	}
	for _, p := range append(slices.Clone(m.Pools), m.Others) {
		lines = append(lines, fmt.Sprintf("%s: %s", cmp.Or(p.Name, "nodes of no pool"), describeOpening(p, now)))
	}
	return strings.Join(lines, "\n  ")
}

func describeOpening(p config.Pool, now time.Time) string {
	if p.Schedule.Always() {
		return "always open"
	}
	if o, open := p.Schedule.At(now); open && (o.End.IsZero() || o.End.Sub(now) >= p.Estimate) {
		if o.End.IsZero() {
			return "open, and not closed any more"
		}
		return "open until " + inBoth(o.End, o.Zone)
	}
	o, ok := p.Schedule.Next(now, p.Estimate)
	switch {
	case !ok:
		return fmt.Sprintf("never open any more for as long as a change takes, %s", duration.HumanDuration(p.Estimate))
	case o.End.IsZero():
		return "next open from " + inBoth(o.Start, o.Zone) + " on"
	}
	return fmt.Sprintf("next open from %s for %s", inBoth(o.Start, o.Zone), duration.HumanDuration(o.End.Sub(o.Start)))
}

// inBoth is an instant as clocks in a zone show it, and in UTC.
func inBoth(t time.Time, zone *time.Location) string {
	const form = "Mon 2006-01-02 15:04"
	if zone == time.UTC {
		return t.UTC().Format(form) + " UTC"
	}
	return fmt.Sprintf("%s %s (%s UTC)", t.In(zone).Format(form), zone, t.UTC().Format(form))
}

// validation prints what is found, and counts.
type validation struct {
	out          *printer
	now          time.Time
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

var errNothingToCheck = errors.New("there is nothing here that gpuslice reads: profiles (kind: Profiles), settings (kind: Settings), maintenance (kind: Maintenance), MIG configs (mig-configs:)," +
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
			found, err := f.check(text, v.now)
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
	if err := document.CheckManifest(text); err != nil {
		return nil, fmt.Errorf("reading YAML: %w", err)
	}
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
