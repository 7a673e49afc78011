package main

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

func (o *options) validate() *cobra.Command {
	var files, autoscaled []string
	var at string
	var foreign, cluster bool
	c := &cobra.Command{
		Use:   "validate (-f FILE... | --against-cluster)",
		Short: "Check files before they reach a cluster, or what a cluster promises of its GPUs",
		Long: "Check files before they reach a cluster. Which kind a file is shows by what is in it: profiles, settings, maintenance, MIG configs in\n" +
			"mig-parted's format, configs of NVIDIA's device plugin, or manifests with ConfigMaps of any of them. Everything wrong is said at once.\n" +
			"Of Kueue's ResourceFlavor, ClusterQueue and LocalQueue, of HardwareProfile, ResourceQuota and PriorityClass it reads the manifests too.\n" +
			"With --against-cluster it reads these objects from the cluster, and says where they promise GPUs that no node offers.\n" +
			"Of maintenance it says when each pool opens next for as long as a change is estimated to take.",
		Example: "gpuslice-agent validate -f deploy/examples/configmap-pools.yaml\nkubectl get configmap time-slicing-config -o yaml | gpuslice-agent validate -f -",
		RunE: func(cmd *cobra.Command, args []string) error {
			files = append(files, args...) // a shell turns -f *.yaml into -f a.yaml b.yaml
			switch {
			case cluster && len(files) > 0:
				return errors.New("--against-cluster reads the cluster: check files without it")
			case cluster:
				return o.againstCluster(cmd.Context(), autoscaled, &cli.Printer{W: cmd.OutOrStdout()})
			case len(files) == 0:
				return errors.New("name files to check with -f, or say --against-cluster")
			case len(autoscaled) > 0:
				return errors.New("--autoscaled is about the cluster's nodes: say it with --against-cluster")
			}
			now := time.Now()
			if at != "" {
				var err error
				if now, err = time.Parse(time.RFC3339, at); err != nil {
					return fmt.Errorf("flag --at is %q: write a date with its time and zone, like 2026-12-20T22:00:00Z", at)
				}
			}
			v := validation{out: &cli.Printer{W: cmd.OutOrStdout()}, now: now, foreign: foreign}
			for _, file := range files {
				text, err := readFile(file, cmd.InOrStdin())
				if err != nil {
					return err
				}
				v.file(sanitize.Text(file), text)
			}
			return v.result()
		},
	}
	c.Flags().StringArrayVarP(&files, "file", "f", nil, "file to check, several by several flags; - for standard input")
	c.Flags().BoolVar(&cluster, "against-cluster", false, "compare the cluster's quotas, queues and hardware profiles with what its nodes offer")
	c.Flags().StringArrayVar(&autoscaled, "autoscaled", nil, "with --against-cluster: ResourceFlavor or HardwareProfile whose nodes an autoscaler makes when they are needed, so that fewer than are promised for, or none, are no drift; several by several flags")
	c.Flags().BoolVar(&foreign, "ignore-foreign", false, "pass over what others may read, and take it for no error that nothing here is for gpuslice, as in a folder of all kinds of manifests")
	c.Flags().StringVar(&at, "at", "", "time from which on the next openings of maintenance are told, like 2026-12-20T22:00:00Z; without it now")
	return c
}

// format is a kind of file that the agent or the plugin reads.
type format struct {
	name  string
	is    func(top map[string]any) bool
	only  func(top map[string]any) bool // reports of a text that may be of the format whether it is, where texts of other programs are among them
	check func(text []byte, now time.Time) (found string, err error)
}

// formats are tried in this order. A file is of a format if it has any field that only that format has, so that one with mistakes
// is recognised too.
var formats = []format{
	{
		profilesFormat, func(top map[string]any) bool {
			return top["kind"] == config.ProfilesKind || top["kind"] != config.SettingsKind && has(top, "profiles")
		}, func(top map[string]any) bool {
			return isOurs(top) || top["apiVersion"] == nil && top["kind"] == config.ProfilesKind && isMapping(top, "profiles")
		},
		counted(config.ParseProfiles, "profile"),
	},
	{"maintenance", func(top map[string]any) bool {
		return top["kind"] == config.MaintenanceKind || top["kind"] != config.SettingsKind && has(top, "windows", "freezes", "pools")
	}, func(top map[string]any) bool {
		return isOurs(top) || top["apiVersion"] == nil && top["kind"] == config.MaintenanceKind && has(top, "windows", "freezes", "pools")
	}, func(text []byte, now time.Time) (string, error) {
		m, err := config.ParseMaintenance(text)
		return describeMaintenance(m, now), err
	}},
	{"settings", func(top map[string]any) bool { return top["kind"] == config.SettingsKind || isOurs(top) }, isOurs, func(text []byte, _ time.Time) (string, error) {
		_, err := config.Parse(text)
		return "settings", err
	}},
	{migFormat, func(top map[string]any) bool { return has(top, "mig-configs", "mig_configs", "migConfigs") }, func(map[string]any) bool { return true }, counted(migparted.Parse, "MIG config")},
	{pluginFormat, isPluginConfig, isOnlyPluginConfig, func(text []byte, _ time.Time) (string, error) {
		read, err := deviceplugin.Parse(text)
		if err == nil {
			err = hiddenSlices(read)
		}
		return describeSharing(read.Sharing), err
	}},
}

// manifestFormat is that of an object by which a cluster hands out slices.
func manifestFormat(top map[string]any) *format {
	return &format{name: kinds.Name(top), check: func(text []byte, _ time.Time) (string, error) {
		return kinds.Name(top), kinds.Check(top, text)
	}}
}

// Names of the formats that a plan uses.
const (
	profilesFormat = "profiles"
	migFormat      = "MIG configs"
	pluginFormat   = "a device plugin config"
)

// isPluginConfig recognises such a config by its fields. Other files of NVIDIA have a version too, and pods have resources.
func isPluginConfig(top map[string]any) bool {
	switch {
	case has(top, "apiVersion", "kind", "systemd-services", "hooks", "mig_configs", "migConfigs"):
		return false
	case has(top, "sharing", "flags", "imex"):
		return true
	default:
		resources, _ := top["resources"].(map[string]any)
		return has(top, "version") && !has(resources, "limits", "requests")
	}
}

// isOnlyPluginConfig reports whether most fields of a config are the plugin's and have its forms. Dashboards, lists of packages and files of
// containers have a version too, but another, or much beside it; and sharing that names a strategy is in no other program's files.
func isOnlyPluginConfig(top map[string]any) bool {
	if sharing, _ := top["sharing"].(map[string]any); isMapping(sharing, "timeSlicing") || isMapping(sharing, "mps") {
		return true
	}
	theirs := 0
	for name, value := range top {
		_, mapping := value.(map[string]any)
		switch plugins := has(map[string]any{name: nil}, "flags", "resources", "sharing", "imex"); {
		case plugins && value != nil && !mapping:
			return false
		case plugins || strings.EqualFold(name, "version"):
			theirs++
		}
	}
	return top["version"] == "v1" && 2*theirs > len(top)
}

// isMapping reports whether a field is there, and is a mapping.
func isMapping(top map[string]any, field string) bool {
	_, ok := top[field].(map[string]any)
	return ok
}

// isOurs reports whether a document says that it is in a format of gpuslice.
func isOurs(top map[string]any) bool {
	version, _ := top["apiVersion"].(string)
	return strings.HasPrefix(version, "gpuslice.io/")
}

// has reports whether one of the fields is there, in upper or lower case.
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

// hiddenSlices refuses sharing of MIG devices by names that the plugin gives out under the strategy mixed alone: it passes over them without a word.
func hiddenSlices(read config.PluginConfig) error {
	if read.MIGStrategy == "" || read.MIGStrategy == config.MIGStrategyMixed {
		return nil // without a strategy here the plugin's environment has it
	}
	for _, name := range read.Sharing.Resources() {
		if strings.HasPrefix(name, nvml.ResourceMIGPrefix) {
			return &config.InvalidError{
				Field: "flags.migStrategy", Value: string(read.MIGStrategy),
				Want: "does not go with sharing of " + name + ", which the device plugin offers by the strategy mixed alone; by single share " + nvml.ResourceGPU,
			}
		}
	}
	return nil
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
	return fmt.Sprintf("device plugin config: %s, %s", s.Strategy, joinFirst(parts))
}

// describeMaintenance says when each pool's window opens next, so that users can check what they wrote.
func describeMaintenance(m config.Maintenance, now time.Time) string {
	lines := []string{fmt.Sprintf("maintenance of %d pools", len(m.Pools))}
	if len(m.Pools) == 1 {
		lines[0] = "maintenance of 1 pool"
	}
	pools := append(slices.Clone(m.Pools), m.Others)
	for _, p := range pools[:min(len(pools), maxPieces)] {
		lines = append(lines, fmt.Sprintf("%s: %s", cmp.Or(p.Name, "nodes of no pool"), describeOpening(p, now)))
	}
	if more := len(pools) - maxPieces; more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", more))
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
		return "open until " + inZoneAndUTC(o.End, o.Zone)
	}
	o, ok := p.Schedule.Next(now, p.Estimate)
	switch {
	case !ok:
		return fmt.Sprintf("never open any more for as long as a change takes, %s", duration.HumanDuration(p.Estimate))
	case o.End.IsZero():
		return "next open from " + inZoneAndUTC(o.Start, o.Zone) + " on"
	}
	return fmt.Sprintf("next open from %s for %s", inZoneAndUTC(o.Start, o.Zone), duration.HumanDuration(o.End.Sub(o.Start)))
}

// inZoneAndUTC writes an instant in the time of a zone, and in UTC.
func inZoneAndUTC(t time.Time, zone *time.Location) string {
	const form = "Mon 2006-01-02 15:04"
	if zone == time.UTC {
		return t.UTC().Format(form) + " UTC"
	}
	return fmt.Sprintf("%s %s (%s UTC)", t.In(zone).Format(form), zone, t.UTC().Format(form))
}

// validation checks pieces, prints the results, and counts them.
type validation struct {
	out          *cli.Printer
	now          time.Time
	right, wrong int
	foreign      bool // a file without anything for gpuslice is no error

	printed  map[string]int // pieces of the file, by result
	mistakes int            // mistakes of the file
}

// Bounds of the output for one file. A user who has mended these mistakes checks the file again.
const (
	maxPieces   = 100  // with one result
	maxMistakes = 1000 // of all pieces
	longestLine = 2000 // characters
	longestName = 256
)

// The results for pieces.
const (
	passedOver = "passed over"
	isRight    = "right"
	isWrong    = "wrong"
)

// file checks the pieces of a file.
func (v *validation) file(name string, text []byte) {
	v.printed, v.mistakes = map[string]int{}, 0
	anything := false
	var policies clusterPolicies
	var queues queuedFlavors
	r := reader{foreign: v.foreign, found: func(p piece) {
		anything = anything || p.err != nil || p.format != nil || p.configMap == "" || p.key == ""
		v.piece(p)
		policies.note(p)
		queues.note(p)
	}}
	r.read(name, text)
	if !anything {
		v.out.Printf("%s: nothing that gpuslice reads, passed over\n", name)
	}
	policies.check(v)
	queues.check(v)
	for _, result := range []string{passedOver, isRight, isWrong} {
		if more := v.printed[result] - maxPieces; more > 0 {
			v.out.Printf("%s: and %d more, %s\n", name, more, result)
		}
	}
}

// say prints the result for a piece, unless it has printed that result often enough, and reports whether it has.
func (v *validation) say(result, format string, args ...any) bool {
	v.printed[result]++
	if v.printed[result] > maxPieces {
		return false
	}
	v.out.Printf(format, args...)
	return true
}

var errNothingToCheck = errors.New("there is nothing here that gpuslice reads: profiles (kind: Profiles), settings (kind: Settings), maintenance (kind: Maintenance), MIG configs (mig-configs:)," +
	" configs of NVIDIA's device plugin (sharing:, flags:), a ConfigMap with any of them, or manifests of Kueue's ResourceFlavor, ClusterQueue and LocalQueue," +
	" of HardwareProfile, ResourceQuota and PriorityClass; --ignore-foreign takes that for no error")

func (v *validation) piece(p piece) {
	switch {
	case p.err != nil:
		v.report(p.at, "", p.err)
	case p.format == nil && (p.configMap == "" || p.key == ""):
		v.say(passedOver, "%s: %s, passed over\n", sanitize.Cut(p.at, longestName), sanitize.Cut(p.foreign, longestName))
	case p.format == nil: // other programs may read this key of the ConfigMap
	default:
		found, err := p.format.check(p.text, v.now)
		if err != nil {
			found = p.format.name
		}
		v.report(p.at, found, addPlaces(p, err))
	}
}

// addPlaces adds to each mistake its line in the file, or in the value of the key if the file does not have that value line by line.
func addPlaces(p piece, err error) error {
	return addPlacesOf(sync.OnceValue(func() *document.Text { return document.Read(p.text) }), p, err) // read once for all mistakes
}

func addPlacesOf(text func() *document.Text, p piece, err error) error {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var all []error
		for _, one := range joined.Unwrap() {
			all = append(all, addPlacesOf(text, p, one))
		}
		slices.SortStableFunc(all, byPlace)
		return errors.Join(all...)
	}
	invalid, ok := errors.AsType[*config.InvalidError](err)
	if !ok {
		return err
	}
	var steps []string
	switch {
	case invalid.Config != "":
		steps = []string{"mig-configs", invalid.Config}
	case invalid.Profile != "":
		steps = []string{"profiles", invalid.Profile}
	}
	if invalid.Rule > 0 && invalid.Profile != "" {
		steps = append(steps, "mig")
	}
	if invalid.Rule > 0 {
		steps = append(steps, strconv.Itoa(invalid.Rule-1))
	}
	at, o := text().Locate(steps, invalid.Field), p.origin()
	switch {
	case at == (document.Place{}), !o.known && p.key == "":
		return err
	case !o.known:
		return &placed{at, " of " + p.key, err}
	default:
		return &placed{document.Place{Line: o.lines + at.Line, Column: o.indent + at.Column}, "", err}
	}
}

// placed is a mistake with its place in the file, or of a key of a ConfigMap.
type placed struct {
	at  document.Place
	of  string
	err error
}

func (p *placed) Error() string {
	return fmt.Sprintf("line %d, column %d%s: %v", p.at.Line, p.at.Column, p.of, p.err)
}

func (p *placed) Unwrap() error { return p.err }

// byPlace sorts mistakes as they stand in the file, those without a place last.
func byPlace(a, b error) int {
	x, y := document.Place{Line: math.MaxInt}, document.Place{Line: math.MaxInt}
	if at, ok := errors.AsType[*placed](a); ok {
		x = at.at
	}
	if at, ok := errors.AsType[*placed](b); ok {
		y = at.at
	}
	return cmp.Or(cmp.Compare(x.Line, y.Line), cmp.Compare(x.Column, y.Column))
}

// clusterPolicies checks that a file with ConfigMaps of the device plugin has the ConfigMap, and the key, that its ClusterPolicy names:
// otherwise each config is right, and no node gets any.
type clusterPolicies struct {
	keys    map[string][]string // of configs of the device plugin, by ConfigMap
	configs []policyPluginConfig
}

// policyPluginConfig has the ConfigMap and key of the device plugin's configs that a ClusterPolicy names.
type policyPluginConfig struct{ at, name, key string }

func (c *clusterPolicies) note(p piece) {
	switch {
	case p.configMap != "" && p.format != nil && p.format.name == pluginFormat:
		if c.keys == nil {
			c.keys = map[string][]string{}
		}
		c.keys[p.configMap] = append(c.keys[p.configMap], p.key)
	case isClusterPolicy(p):
		spec, _ := p.top["spec"].(map[string]any)
		plugin, _ := spec["devicePlugin"].(map[string]any)
		named, _ := plugin["config"].(map[string]any)
		name, _ := named["name"].(string)
		key, _ := named["default"].(string)
		c.configs = append(c.configs, policyPluginConfig{at: p.at + ", ClusterPolicy", name: name, key: key})
	}
}

func (c *clusterPolicies) check(v *validation) {
	if len(c.keys) == 0 {
		return
	}
	for _, of := range c.configs {
		switch here, there := c.keys[of.name]; {
		case of.name == "":
			v.report(of.at, "", fmt.Errorf("spec.devicePlugin.config.name: is not set, and no node gets a config of ConfigMap %s", joinFirst(slices.Sorted(maps.Keys(c.keys)))))
		case !there:
			v.report(of.at, "", fmt.Errorf("spec.devicePlugin.config.name: no ConfigMap %q with configs of the device plugin is here; there is %s",
				of.name, joinFirst(slices.Sorted(maps.Keys(c.keys)))))
		case of.key != "" && !slices.Contains(here, of.key):
			v.report(of.at, "", fmt.Errorf("spec.devicePlugin.config.default: ConfigMap %s has no key %q with a config of the device plugin; it has %s",
				of.name, of.key, joinFirst(here)))
		}
	}
}

// queuedFlavors checks that the ResourceFlavors of a file are those that its ClusterQueues name: Kueue keeps a queue inactive that names one which is
// not there. A file without any flavor may go with another that has them.
type queuedFlavors struct {
	there []string
	named []queuedFlavor
}

// queuedFlavor is a flavor that a ClusterQueue names.
type queuedFlavor struct{ at, queue, flavor string }

// maxFlavors bounds the flavors that are noted of a file.
const maxFlavors = 1000

func (q *queuedFlavors) note(p piece) {
	if len(q.there)+len(q.named) >= maxFlavors {
		return
	}
	switch kind, _ := p.top["kind"].(string); kind {
	case "ResourceFlavor":
		if meta, _ := p.top["metadata"].(map[string]any); meta != nil {
			name, _ := meta["name"].(string)
			q.there = append(q.there, sanitize.Cut(name, longestName))
		}
	case "ClusterQueue":
		var queue kinds.ClusterQueue
		if document.ManifestInto(p.text, &queue) != nil {
			return // what is wrong with it has been printed
		}
		for _, group := range queue.Spec.ResourceGroups {
			for _, f := range group.Flavors {
				q.named = append(q.named, queuedFlavor{p.at, sanitize.Cut(queue.Name, longestName), sanitize.Cut(f.Name, longestName)})
			}
		}
	}
}

func (q *queuedFlavors) check(v *validation) {
	if len(q.there) == 0 {
		return
	}
	for _, n := range q.named {
		if !slices.Contains(q.there, n.flavor) {
			v.report(n.at+", ClusterQueue "+n.queue, "", fmt.Errorf("spec.resourceGroups: no ResourceFlavor %q is here; there is %s", n.flavor, joinFirst(q.there)))
		}
	}
}

// joinFirst lists as many names as fit in a line.
func joinFirst(names []string) string {
	const most = 12
	if more := len(names) - most; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), more)
	}
	return strings.Join(names, ", ")
}

func (v *validation) report(at, found string, err error) {
	at = sanitize.Cut(at, longestName)
	if err == nil {
		v.right++
		v.say(isRight, "%s: %s\n", at, found)
		return
	}
	v.wrong++
	if found != "" {
		found += ", "
	}
	if !v.say(isWrong, "%s: %swrong\n", at, found) {
		return
	}
	left := 0
	for line := range strings.SplitSeq(err.Error(), "\n") {
		if v.mistakes++; v.mistakes > maxMistakes {
			left++
			continue
		}
		v.out.Printf("  %s\n", sanitize.Cut(line, longestLine))
	}
	if left > 0 {
		v.out.Printf("  and %d more\n", left)
	}
}

func (v *validation) result() error {
	switch {
	case v.out.Err != nil:
		return v.out.Err
	case v.right+v.wrong == 0 && v.foreign:
		return nil
	case v.right+v.wrong == 0:
		return errNothingToCheck
	case v.wrong == 0:
		return nil
	}
	return fmt.Errorf("%d of %d files and keys cannot be used", v.wrong, v.right+v.wrong)
}
