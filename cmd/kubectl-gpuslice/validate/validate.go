// Package validate has the command that checks files before they reach a cluster, and what a cluster promises of its GPUs.
package validate

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// Command is validate.
func Command(o *cluster.Options) *cobra.Command {
	var files, autoscaled []string
	var at string
	var foreign, against bool
	var of cluster.AgentSettings
	c := &cobra.Command{
		Use:   "validate (-f FILE... | --against-cluster)",
		Short: "Check files before they reach a cluster, or what a cluster promises of its GPUs",
		Long: "Check files before they reach a cluster. It recognizes a file by its content: profiles, settings, maintenance, MIG configs in\n" +
			"mig-parted's format, configs of NVIDIA's device plugin, or manifests with ConfigMaps of any of them, or values of the GPU Operator's chart.\n" +
			"It reports all mistakes at once.\n" +
			"It also reads manifests of Kueue's ResourceFlavor, ClusterQueue, LocalQueue and WorkloadPriorityClass, and of HardwareProfile, ResourceQuota and\n" +
			"PriorityClass.\n" +
			"With --against-cluster it reads these objects from the cluster, and says where they promise GPUs that no node offers, and which queues give a pod\n" +
			"of one class of isolation (time-slicing or MPS, MIG, whole GPUs) what is of another.\n" +
			"Files do not say which nodes have NVIDIA's DRA driver, which allocates no parts of instances and shares devices by claims alone:\n" +
			"--against-cluster checks the labels of such nodes.\n" +
			"For maintenance it says when each pool opens next for as long as a change is estimated to take.",
		Example: "kubectl gpuslice validate -f deploy/examples/configmap-pools.yaml\nkubectl get configmap time-slicing-config -o yaml |\n  kubectl gpuslice validate -f -",
		RunE: func(cmd *cobra.Command, args []string) error {
			files = append(files, args...) // a shell turns -f *.yaml into -f a.yaml b.yaml
			switch {
			case against && len(files) > 0:
				return errors.New("--against-cluster reads the cluster: check files without it")
			case against:
				return againstCluster(cmd.Context(), o, of, autoscaled, &cli.Printer{W: cmd.OutOrStdout()})
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
			v := fileCheck{out: &cli.Printer{W: cmd.OutOrStdout()}, now: now, foreign: foreign}
			for _, given := range files {
				if err := v.files(given, cmd.InOrStdin()); err != nil {
					return err
				}
			}
			v.classes.check(&v)
			return v.result()
		},
	}
	of.Bind(c.Flags())
	c.Flags().StringArrayVarP(&files, "file", "f", nil, "file or folder of files to check, several by several flags; - for standard input")
	c.Flags().BoolVar(&against, "against-cluster", false, "compare the cluster's quotas, queues and hardware profiles with what its nodes offer, and its queues with the classes of its nodes")
	c.Flags().StringArrayVar(&autoscaled, "autoscaled", nil, "with --against-cluster: ResourceFlavor or HardwareProfile with nodes that an autoscaler creates on demand: too few of them, or none, are no drift; several by several flags")
	c.Flags().BoolVar(&foreign, "ignore-foreign", false,
		"pass over files for other programs, and accept that nothing here is for gpuslice, as in a folder of all kinds of manifests")
	c.Flags().StringVar(&at, "at", "", "list the openings of maintenance after this time, like 2026-12-20T22:00:00Z; by default after now")
	return c
}

// found says what a piece has, and what is wrong with it.
func (c *fileCheck) found(p manifest.Piece) (found string, err error) {
	switch p.Format {
	case manifest.Profiles:
		return counted(catalog.ParseProfiles, p.Text, "profile")
	case manifest.Maintenance:
		m, err := maintenance.Parse(p.Text)
		return describeMaintenance(m, c.now), err
	case manifest.Settings:
		_, err := config.Parse(p.Text)
		return "settings", err
	case manifest.MIGConfigs:
		return counted(migparted.Parse, p.Text, "MIG config")
	case manifest.PluginConfig:
		read, err := deviceplugin.Parse(p.Text)
		if err == nil {
			err = hiddenSlices(read)
		}
		return describeSharing(read.Sharing), err
	case manifest.Object:
		return kinds.Name(p.Top), kinds.Check(p.Top, p.Text)
	}
	return "", nil
}

func counted[T any](parse func([]byte) (map[string]T, error), text []byte, noun string) (string, error) {
	all, err := parse(text)
	return sanitize.Counted(len(all), noun), err
}

// hiddenSlices refuses sharing of MIG devices by names that the plugin advertises under the strategy mixed alone: it silently passes over them.
func hiddenSlices(read catalog.PluginConfig) error {
	if read.MIGStrategy == "" || read.MIGStrategy == config.MIGStrategyMixed {
		return nil // without a strategy here the plugin's environment has it
	}
	for _, name := range read.Sharing.Resources() {
		if strings.HasPrefix(name, nvml.ResourceMIGPrefix) {
			return &check.InvalidError{
				Field: "flags.migStrategy", Value: string(read.MIGStrategy),
				Want: "does not go with sharing of " + name + ", which the device plugin offers by the strategy mixed alone; by single share " + nvml.ResourceGPU,
			}
		}
	}
	return nil
}

func describeSharing(s catalog.Sharing) string {
	if s.Strategy == catalog.SharingNone {
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
func describeMaintenance(m maintenance.Maintenance, now time.Time) string {
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

func describeOpening(p maintenance.Pool, now time.Time) string {
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

// fileCheck checks pieces, prints the results, and counts them.
type fileCheck struct {
	out          *cli.Printer
	now          time.Time
	right, wrong int
	foreign      bool     // a file without anything for gpuslice is no error
	unused       []string // files and folders without anything for gpuslice
	classes      queuedClasses

	printed  map[string]int // pieces of the file, by result
	mistakes int            // mistakes of the file
}

// Bounds of the output for one file. A user who has mended these mistakes checks the file again.
const (
	maxPieces   = 100  // with one result
	maxMistakes = 1000 // of all pieces
	longestLine = 2000 // characters
)

// The results for pieces.
const (
	passedOver = "passed over"
	isRight    = "right"
	isWrong    = "wrong"
)

// files checks a file, or the files of a folder.
func (c *fileCheck) files(given string, stdin io.Reader) error {
	files, err := manifest.Files(given)
	if err != nil {
		return err
	}
	before := c.right + c.wrong
	defer func() {
		if c.right+c.wrong == before {
			c.unused = append(c.unused, sanitize.Text(given))
		}
	}()
	for _, file := range files {
		text, err := manifest.ReadFile(file, stdin)
		if err != nil {
			return err
		}
		c.file(sanitize.Text(file), text)
	}
	return nil
}

// file checks the pieces of a file.
func (c *fileCheck) file(name string, text []byte) {
	c.printed, c.mistakes = map[string]int{}, 0
	anything := false
	var policies clusterPolicies
	var queues queuedFlavors
	r := manifest.Reader{Foreign: c.foreign, Found: func(p manifest.Piece) {
		anything = anything || p.Err != nil || p.Format != "" || p.ConfigMap == "" || p.Key == ""
		c.piece(p)
		policies.note(p)
		queues.note(p)
		c.classes.note(p)
	}}
	r.Read(name, text)
	if !anything {
		c.out.Printf("%s: nothing that gpuslice reads, passed over\n", name)
	}
	policies.check(c)
	queues.check(c)
	for _, result := range []string{passedOver, isRight, isWrong} {
		if more := c.printed[result] - maxPieces; more > 0 {
			c.out.Printf("%s: and %d more, %s\n", name, more, result)
		}
	}
}

// say prints the result for a piece, unless it has printed that result often enough, and reports whether it has.
func (c *fileCheck) say(result, format string, args ...any) bool {
	c.printed[result]++
	if c.printed[result] > maxPieces {
		return false
	}
	c.out.Printf(format, args...)
	return true
}

var errNothingToCheck = errors.New("there is nothing here that gpuslice reads: profiles (kind: Profiles), settings (kind: Settings), maintenance (kind: Maintenance), MIG configs (mig-configs:)," +
	" configs of NVIDIA's device plugin (sharing:, flags:), a ConfigMap with any of them, or manifests of Kueue's ResourceFlavor, ClusterQueue, LocalQueue and WorkloadPriorityClass," +
	" of HardwareProfile, ResourceQuota and PriorityClass, or values of the GPU Operator's chart with any of these configs; --ignore-foreign accepts that")

func (c *fileCheck) piece(p manifest.Piece) {
	switch {
	case p.Err != nil:
		c.report(p.At, "", p.Err)
	case p.Format == "" && (p.ConfigMap == "" || p.Key == ""):
		c.say(passedOver, "%s: %s, passed over\n", sanitize.Cut(p.At, manifest.LongestName), sanitize.Cut(p.Foreign, manifest.LongestName))
	case p.Format == "": // other programs may read this key of the ConfigMap
	default:
		found, err := c.found(p)
		switch {
		case err != nil && p.Format == manifest.Object:
			found = kinds.Name(p.Top)
		case err != nil:
			found = string(p.Format)
		}
		c.report(p.At, found, manifest.AddPlaces(p, err))
		if err == nil {
			c.warn(p)
		}
	}
}

// warn names what no model that is known holds: the agent of each node would refuse it, and mig-parted fails there.
func (c *fileCheck) warn(p manifest.Piece) {
	type named struct {
		what  string
		rules catalog.MIGConfig
	}
	var all []named
	switch p.Format {
	case manifest.MIGConfigs:
		configs, _ := migparted.Parse(p.Text)
		for _, name := range slices.Sorted(maps.Keys(configs)) {
			all = append(all, named{fmt.Sprintf("config %q, rule", name), configs[name]})
		}
	case manifest.Profiles:
		profiles, _ := catalog.ParseProfiles(p.Text)
		for _, name := range slices.Sorted(maps.Keys(profiles)) {
			all = append(all, named{fmt.Sprintf("profile %q, mig entry", name), profiles[name].MIG})
		}
	case manifest.Maintenance, manifest.Settings, manifest.PluginConfig, manifest.Object:
	}
	for _, of := range all {
		for i, rule := range of.rules {
			why := features.AllRefuse(rule.Devices, rule.Models)
			if why == "" {
				continue
			}
			if c.mistakes++; c.mistakes > maxMistakes {
				c.out.Printf("  and more\n")
				return
			}
			c.out.Printf("  %s\n", sanitize.Cut(fmt.Sprintf("warning: %s %d: by NVIDIA's tables %s", of.what, i+1, why), longestLine))
		}
	}
}

// clusterPolicies checks that a file with ConfigMaps of the device plugin has the ConfigMap, and the key, that its ClusterPolicy names:
// otherwise each config is right, and no node gets any.
type clusterPolicies struct {
	keys    map[string][]string // of configs of the device plugin, by ConfigMap
	configs []policyPluginConfig
}

// policyPluginConfig has the ConfigMap and key of the device plugin's configs that a ClusterPolicy names.
type policyPluginConfig struct{ at, field, name, key string }

func (c *clusterPolicies) note(p manifest.Piece) {
	switch {
	case p.ConfigMap != "" && p.Format == manifest.PluginConfig:
		if c.keys == nil {
			c.keys = map[string][]string{}
		}
		c.keys[p.ConfigMap] = append(c.keys[p.ConfigMap], p.Key)
	case manifest.IsClusterPolicy(p):
		spec, _ := p.Top["spec"].(map[string]any)
		c.noteSpec(policyPluginConfig{at: p.At + ", ClusterPolicy", field: "spec.devicePlugin.config."}, spec)
	case p.Values != nil:
		c.noteSpec(policyPluginConfig{at: p.At, field: "devicePlugin.config."}, p.Values)
	}
}

// noteSpec notes the ConfigMap and key that the spec of a ClusterPolicy names, or values of the operator's chart, which have the same fields.
func (c *clusterPolicies) noteSpec(of policyPluginConfig, spec map[string]any) {
	plugin, _ := spec["devicePlugin"].(map[string]any)
	named, _ := plugin["config"].(map[string]any)
	of.name, _ = named["name"].(string)
	of.key, _ = named["default"].(string)
	c.configs = append(c.configs, of)
}

func (c *clusterPolicies) check(v *fileCheck) {
	if len(c.keys) == 0 {
		return
	}
	for _, of := range c.configs {
		switch here, there := c.keys[of.name]; {
		case of.name == "":
			v.report(of.at, "", fmt.Errorf("%sname: is not set, and no node gets a config of ConfigMap %s",
				of.field, joinFirst(slices.Sorted(maps.Keys(c.keys)))))
		case !there:
			v.report(of.at, "", fmt.Errorf("%sname: no ConfigMap %q with configs of the device plugin is here; there is %s",
				of.field, of.name, joinFirst(slices.Sorted(maps.Keys(c.keys)))))
		case of.key != "" && !slices.Contains(here, of.key):
			v.report(of.at, "", fmt.Errorf("%sdefault: ConfigMap %s has no key %q with a config of the device plugin; it has %s",
				of.field, of.name, of.key, joinFirst(here)))
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

func (q *queuedFlavors) note(p manifest.Piece) {
	if len(q.there)+len(q.named) >= maxFlavors {
		return
	}
	switch kind, _ := p.Top["kind"].(string); kind {
	case "ResourceFlavor":
		if meta, _ := p.Top["metadata"].(map[string]any); meta != nil {
			name, _ := meta["name"].(string)
			q.there = append(q.there, sanitize.Cut(name, manifest.LongestName))
		}
	case "ClusterQueue":
		var queue kinds.ClusterQueue
		if document.ManifestInto(p.Text, &queue) != nil {
			return // what is wrong with it has been printed
		}
		for _, group := range queue.Spec.ResourceGroups {
			for _, f := range group.Flavors {
				q.named = append(q.named, queuedFlavor{p.At, sanitize.Cut(queue.Name, manifest.LongestName), sanitize.Cut(f.Name, manifest.LongestName)})
			}
		}
	}
}

func (q *queuedFlavors) check(v *fileCheck) {
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

func (c *fileCheck) report(at, found string, err error) {
	at = sanitize.Cut(at, manifest.LongestName)
	if err == nil {
		c.right++
		c.say(isRight, "%s: %s\n", at, found)
		return
	}
	c.wrong++
	if found != "" {
		found += ", "
	}
	if !c.say(isWrong, "%s: %swrong\n", at, found) {
		return
	}
	left := 0
	for line := range strings.SplitSeq(err.Error(), "\n") {
		if c.mistakes++; c.mistakes > maxMistakes {
			left++
			continue
		}
		c.out.Printf("  %s\n", sanitize.Cut(line, longestLine))
	}
	if left > 0 {
		c.out.Printf("  and %d more\n", left)
	}
}

func (c *fileCheck) result() error {
	switch {
	case c.out.Err != nil:
		return c.out.Err
	case c.right+c.wrong == 0 && c.foreign:
		return nil
	case c.right+c.wrong == 0:
		return errNothingToCheck
	}
	var wrong []string
	if c.wrong > 0 {
		wrong = append(wrong, fmt.Sprintf("%d of %d files and keys cannot be used", c.wrong, c.right+c.wrong))
	}
	if len(c.unused) > 0 && !c.foreign {
		wrong = append(wrong, fmt.Sprintf("there is nothing that gpuslice reads in %s: leave it out, or say --ignore-foreign", sanitize.Listed(c.unused)))
	}
	if len(wrong) == 0 {
		return nil
	}
	return errors.New(strings.Join(wrong, "; "))
}
