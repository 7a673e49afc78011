package maintenance_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/config/window"
)

const maintenanceHead = "apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\n"

// asText compares what only its own package can look into.
var asText = cmp.Options{
	cmp.Comparer(func(a, b *time.Location) bool { return a.String() == b.String() }),
	cmp.Comparer(func(a, b labels.Selector) bool {
		return (a == nil) == (b == nil) && (a == nil || a.String() == b.String())
	}),
}

func at(t *testing.T, text string) time.Time {
	t.Helper()
	instant, err := time.Parse(time.RFC3339, text)
	if err != nil {
		t.Fatal(err)
	}
	return instant.UTC()
}

func located(t *testing.T, name string) *time.Location {
	t.Helper()
	zone, err := time.LoadLocation(name)
	if err != nil {
		t.Fatal(err)
	}
	return zone
}

func TestMaintenanceInEveryForm(t *testing.T) {
	got, err := maintenance.Parse([]byte(maintenanceHead + `
windows:
  - {days: [Fri, saturday, SUN], start: "22:00", duration: 6h, timeZone: Europe/Berlin}
  - {days: Mon, start: 08:30, duration: 1m, notBefore: 2026-12-01T20:00:00Z, notAfter: "2026-12-02T05:00:00+01:00"}
  - {notBefore: "2026-12-01T20:00:00Z", notAfter: "2026-12-02T04:00:00Z"}
freezes:
  - {from: "2026-12-20T00:00:00Z", to: "2027-01-07T00:00:00+01:00", reason: year end}
estimate: 20m
jitter: 0s
pools:
  - {name: research, selector: pool=research, maxUnavailable: 2}
  - name: production
    selector: pool in (a, b)
    maxUnavailable: 10%
    pauseAfter: 0
    windows: [{days: [Wednesday], start: "00:00", duration: 168h}]
    freezes: [{from: "2026-06-01T00:00:00Z", to: "2026-06-02T00:00:00Z"}]
    estimate: 1h
    jitter: 30m
  - {name: none, selector: "!pool", maxUnavailable: 0, pauseAfter: 1000}
`))
	freeze := window.Freeze{From: at(t, "2026-12-20T00:00:00Z"), To: at(t, "2027-01-06T23:00:00Z"), Reason: "year end"}
	all := window.Schedule{
		Windows: []window.Window{
			{
				Days: []time.Weekday{time.Friday, time.Saturday, time.Sunday}, Start: 22 * time.Hour, Duration: 6 * time.Hour, Zone: located(t, "Europe/Berlin"),
			},
			{
				Days: []time.Weekday{time.Monday}, Start: 8*time.Hour + 30*time.Minute, Duration: time.Minute, Zone: time.UTC,
				NotBefore: at(t, "2026-12-01T20:00:00Z"), NotAfter: at(t, "2026-12-02T04:00:00Z"),
			},
			{Zone: time.UTC, NotBefore: at(t, "2026-12-01T20:00:00Z"), NotAfter: at(t, "2026-12-02T04:00:00Z")},
		},
		Freezes: []window.Freeze{freeze},
	}
	want := maintenance.Maintenance{
		Others: maintenance.Pool{Schedule: all, Estimate: 20 * time.Minute, MaxUnavailable: &maintenance.Limit{Percent: 10}},
		Pools: []maintenance.Pool{
			{
				Name: "research", Selector: parsed(t, "pool=research"), Schedule: all, Estimate: 20 * time.Minute,
				MaxUnavailable: &maintenance.Limit{Nodes: 2}, PauseAfter: 3,
			},
			{
				Name: "production", Selector: parsed(t, "pool in (a,b)"), Estimate: time.Hour, Jitter: 30 * time.Minute,
				Schedule: window.Schedule{
					Windows: []window.Window{{Days: []time.Weekday{time.Wednesday}, Duration: 7 * 24 * time.Hour, Zone: time.UTC}},
					Freezes: []window.Freeze{freeze, {From: at(t, "2026-06-01T00:00:00Z"), To: at(t, "2026-06-02T00:00:00Z")}},
				},
				MaxUnavailable: &maintenance.Limit{Percent: 10},
			},
			{
				Name: "none", Selector: parsed(t, "!pool"), Schedule: all, Estimate: 20 * time.Minute, MaxUnavailable: &maintenance.Limit{}, PauseAfter: 1000,
			},
		},
	}
	if diff := cmp.Diff(want, got, asText); err != nil || diff != "" {
		t.Errorf("error %v, maintenance (-want +got):\n%s", err, diff)
	}
}

func TestMaintenanceThatSaysNothingIsAlways(t *testing.T) {
	got, err := maintenance.Parse([]byte(maintenanceHead + "windows:\nfreezes: []\npools: [{name: a, selector: a=b}]\n"))
	others := maintenance.Pool{Estimate: 15 * time.Minute, Jitter: 5 * time.Minute}
	pool := others
	pool.Name, pool.Selector, pool.PauseAfter = "a", parsed(t, "a=b"), 3
	others.MaxUnavailable = &maintenance.Limit{Percent: 10}
	if diff := cmp.Diff(maintenance.Maintenance{Others: others, Pools: []maintenance.Pool{pool}}, got, asText); err != nil || diff != "" {
		t.Errorf("error %v, maintenance (-want +got):\n%s", err, diff)
	}
	if !got.Others.Schedule.Always() || !got.Pools[0].Schedule.Always() {
		t.Error("it is not always open")
	}
}

func TestTheFirstPoolThatSelectsANodeCounts(t *testing.T) {
	m, err := maintenance.Parse([]byte(maintenanceHead + "pools: [{name: a, selector: x=1}, {name: b, selector: y=1}, {name: c, selector: x=1}]"))
	if err != nil {
		t.Fatal(err)
	}
	for want, has := range map[string]map[string]string{"a": {"x": "1", "y": "1"}, "b": {"y": "1"}, "": {"z": "1"}} {
		if got := m.For(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: has}}); got.Name != want {
			t.Errorf("a node with %v is of pool %q, want %q", has, got.Name, want)
		}
	}
}

func TestLimits(t *testing.T) {
	for _, test := range []struct {
		limit       maintenance.Limit
		nodes, want int
	}{
		{maintenance.Limit{Nodes: 2}, 1, 2},
		{maintenance.Limit{}, 100, 0},
		{maintenance.Limit{Percent: 10}, 400, 40},
		{maintenance.Limit{Percent: 10}, 19, 1},
		{maintenance.Limit{Percent: 1}, 3, 1},
		{maintenance.Limit{Percent: 100}, 3, 3},
	} {
		if got := test.limit.Of(test.nodes); got != test.want {
			t.Errorf("%+v of %d nodes is %d, want %d", test.limit, test.nodes, got, test.want)
		}
	}
}

func TestMaintenanceIsRefused(t *testing.T) {
	const weekly = `days: [Fri], duration: 1h, start: "22:00"`
	window := func(text string) string { return maintenanceHead + "windows: [{" + text + "}]" }
	pool := func(text string) string { return maintenanceHead + "pools: [{name: a, selector: b=c, " + text + "}]" }
	const date = `"2026-12-20T22:00:00Z"`
	for name, test := range map[string]struct {
		file string
		want []string
	}{
		"when empty":              {"", []string{`reading maintenance: the file is empty, and needs at least "apiVersion: gpuslice.io/v1alpha1" and "kind: Maintenance"`}},
		"when of another kind":    {"apiVersion: v1\nkind: Settings", []string{`apiVersion: "v1" must be gpuslice.io/v1alpha1`, `kind: "Settings" must be Maintenance`}},
		"when it is no mapping":   {"[]", []string{`file: must be a mapping, not a list`}},
		"for fields there are no": {maintenanceHead + "window: []\npools: [{name: a, selector: b, limit: 1}]", []string{`window: is unknown here: use apiVersion, kind, windows, freezes, estimate, jitter, maxUnavailable, pools`, `pools[0].limit: is unknown here: use name, selector, maxUnavailable, pauseAfter, windows, freezes, estimate, jitter`}},
		"for everything at once": {
			maintenanceHead + `
windows:
  - {days: [Fri, Fri, friday, Freitag], start: "24:00", duration: 8d, timeZone: Europe/Berln}
  - {days: [], start: 1320, duration: 30s, timeZone: Local}
freezes: [{from: 2026-12-20, to: "2026-12-20T00:00:00"}, ~]
estimate: 0s
jitter: 25h
pools:
  - {name: Research, selector: "a in b", maxUnavailable: 0%, pauseAfter: -1}
  - {name: a, selector: b=c, windows: [], estimate: soon}
  - {name: a, maxUnavailable: -1, windows: [{days: [Mon], start: "7:00", duration: 200h, timeZone: Berlin}]}
  - ~
`,
			[]string{
				`windows[0].days[1]: "Fri" is there twice`,
				`windows[0].days[2]: "friday" is there twice`,
				`windows[0].days[3]: "Freitag" must be a day of the week: Mon, Tue, Wed, Thu, Fri, Sat or Sun`,
				`windows[0].start: "24:00" must be a time of day in quotes, from "00:00" to "23:59": midnight is the start of the next day, "00:00"`,
				`windows[0].duration: "8d" must be a duration with its unit, like "90s" or "1h30m"`,
				`windows[0].timeZone: "Europe/Berln" is not in the IANA time zone database: did you mean Europe/Berlin?`,
				`windows[1].days: [] has no day, so that the window would never open: write at least one, like Fri`,
				`windows[1].start: "1320" must be a time of day in quotes, from "00:00" to "23:59": without them YAML 1.1 reads 22:00 as the number 1320`,
				`windows[1].duration: "30s" must be from 1m to 168h`,
				`windows[1].timeZone: "Local" would differ on each node: name the zone, like "Europe/Berlin"`,
				`freezes[0].from: "2026-12-20" must be a date with its time and zone, like "2026-12-20T22:00:00Z" or "2026-12-20T23:00:00+01:00"`,
				`freezes[0].to: "2026-12-20T00:00:00" must be a date with its time and zone, like "2026-12-20T22:00:00Z" or "2026-12-20T23:00:00+01:00"`,
				`freezes[1].from: is missing: write a date with its time and zone, like "2026-12-20T22:00:00Z"`,
				`freezes[1].to: is missing: write a date with its time and zone, like "2026-12-20T22:00:00Z"`,
				`estimate: "0s" must be from 1s to 24h`,
				`jitter: "25h" must be from 0s to 24h`,
				`pools[0].name: "Research" a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')`,
				`pools[0].selector: "a in b" is invalid: write a label selector, like "pool=research", or "nvidia.com/gpu.present" for all nodes with GPUs: unable to parse requirement: found 'b' expected: '('`,
				`pools[0].maxUnavailable: "0%" must be a number of nodes, 0 for none at all, a percentage from "1%" to "100%", or none for no limit`,
				`pools[0].pauseAfter: "-1" must be a number of failures, or 0 for never, from 0 to 1000`,
				`pools[1].windows: must be a list of at least one window: leave it out where there is none, or write a freeze for never`,
				`pools[1].estimate: "soon" must be a duration with its unit, like "90s" or "1h30m"`,
				`pools[2].selector: is missing or empty: write a label selector, like "pool=research", or "nvidia.com/gpu.present" for all nodes with GPUs`,
				`pools[2].maxUnavailable: "-1" must be a number of nodes, 0 for none at all, a percentage from "1%" to "100%", or none for no limit`,
				`pools[2].windows[0].start: "7:00" must be a time of day in quotes, from "00:00" to "23:59"`,
				`pools[2].windows[0].duration: "200h" must be from 1m to 168h`,
				`pools[2].windows[0].timeZone: "Berlin" is not in the IANA time zone database: did you mean Europe/Berlin?`,
				`pools[3].name: is missing: name the pool, like research`,
				`pools[3].selector: is missing or empty: write a label selector, like "pool=research", or "nvidia.com/gpu.present" for all nodes with GPUs`,
				`pools[2].name: "a" is there twice`,
			},
		},
		"for lists that are none":  {maintenanceHead + "windows: Fri\nfreezes: {}\npools: {a: b}", []string{`windows: must be a list of at least one window: leave it out where there is none, or write a freeze for never`, `freezes: must be a list of freezes with "from" and "to"`, `pools: must be a list of pools with "name" and "selector"`}},
		"for no windows":           {maintenanceHead + "windows: []", []string{`windows: must be a list of at least one window: leave it out where there is none, or write a freeze for never`}},
		"for a window of nothing":  {maintenanceHead + "windows: [~]", []string{`windows[0]: must have "days", "start" and "duration", or "notBefore" and "notAfter" to be open once`}},
		"for a text as a window":   {maintenanceHead + "windows: [Fri]", []string{`windows[0]: must be a mapping, not text`}},
		"for a start alone":        {window(`start: "22:00", duration: 1h`), []string{`windows[0]: must have "days", "start" and "duration", or "notBefore" and "notAfter" to be open once`, `windows[0].start: "22:00" needs "days": without them a window is open once, from notBefore to notAfter`, `windows[0].duration: "1h" needs "days": without them a window is open once, from notBefore to notAfter`}},
		"for a day alone":          {window(`days: [Fri]`), []string{`windows[0].start: is needed with days: write a time of day in quotes, from "00:00" to "23:59"`, `windows[0].duration: is needed with days: write a duration with its unit, like "90s" or "1h30m"`}},
		"for one bound":            {window("notBefore: " + date), []string{`windows[0]: must have "days", "start" and "duration", or "notBefore" and "notAfter" to be open once`}},
		"for bounds the wrong way": {window(weekly + ", notBefore: " + date + ", notAfter: " + date), []string{`windows[0].notAfter: "2026-12-20T22:00:00Z" must be after notBefore, which is 2026-12-20T22:00:00Z`}},
		"for a zone of the host's": {window(weekly + ", timeZone: localtime"), []string{`windows[0].timeZone: "localtime" would differ on each node: name the zone, like "Europe/Berlin"`}},
		"for letters as a zone":    {window(weekly + ", timeZone: PST"), []string{`windows[0].timeZone: "PST" is not in the IANA time zone database: write one like "Europe/Berlin", or leave it out for UTC`}},
		"for a zone with a blank":  {window(weekly + ", timeZone: new york"), []string{`windows[0].timeZone: "new york" is not in the IANA time zone database: did you mean America/New_York?`}},
		"for a way out of zones":   {window(weekly + ", timeZone: ../../etc/passwd"), []string{`windows[0].timeZone: "../../etc/passwd" is not in the IANA time zone database: write one like "Europe/Berlin", or leave it out for UTC`}},
		"for a freeze backwards":   {pool(`freezes: [{from: "2026-12-20T22:00:00+01:00", to: "2026-12-20T21:00:00Z"}]`), []string{`pools[0].freezes[0].to: "2026-12-20T21:00:00Z" must be after from, which is 2026-12-20T21:00:00Z`}},
		"for a limit beyond all":   {pool(`maxUnavailable: 101%`), []string{`pools[0].maxUnavailable: "101%" must be a number of nodes, 0 for none at all, a percentage from "1%" to "100%", or none for no limit`}},
		"for half a node":          {pool(`maxUnavailable: 0.5`), []string{`pools[0].maxUnavailable: "0.5" must be a number of nodes, 0 for none at all, a percentage from "1%" to "100%", or none for no limit`}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := maintenance.Parse([]byte(test.file))
			if err == nil {
				t.Fatal("no error")
			}
			if diff := cmp.Diff(strings.Join(test.want, "\n"), err.Error()); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}
}

func TestProfilesMayHaveWindowsOfTheirOwn(t *testing.T) {
	got, err := catalog.ParseProfiles([]byte(profilesHead + `profiles: {a: {sharing: none, windows: [{days: [Sun], start: "02:00", duration: 4h, timeZone: America/New_York}]}}`))
	want := []window.Window{{Days: []time.Weekday{time.Sunday}, Start: 2 * time.Hour, Duration: 4 * time.Hour, Zone: located(t, "America/New_York")}}
	if diff := cmp.Diff(want, got["a"].Windows, asText); err != nil || diff != "" {
		t.Errorf("error %v, windows (-want +got):\n%s", err, diff)
	}
	_, err = catalog.ParseProfiles([]byte(profilesHead + "profiles: {a: {windows: [{days: [Sun], start: '02:00'}]}, b: {sharing: none, windows: []}}"))
	wrong := `profile "a", windows[0].duration: is needed with days: write a duration with its unit, like "90s" or "1h30m"
profile "a": requests nothing: it must have at least one of mig, sharing, migStrategy, labels and taints
profile "b", windows: must be a list of at least one window: leave it out where there is none, or write a freeze for never`
	if err == nil || err.Error() != wrong {
		t.Errorf("error %v, want:\n%s", err, wrong)
	}
}

// The examples of the pages, which users copy, must work.
func TestTheMaintenanceThatWeShowIsRead(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "deploy", "examples", "configmap-maintenance.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var m corev1.ConfigMap
	if err := yaml.UnmarshalStrict(text, &m); err != nil {
		t.Fatal(err)
	}
	got, err := maintenance.Parse([]byte(m.Data[config.DefaultMaintenanceKey]))
	if err != nil || m.Name != config.DefaultMaintenance || len(got.Pools) != 3 {
		t.Errorf("ConfigMap %s has %d pools, error %v", m.Name, len(got.Pools), err)
	}
}

// Agents of several nodes have to find the same pool, and one that no written pool can have.
func TestNodesThatAreAskedForTheSameAreOnePool(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("a", 63)
	for name, c := range map[string]struct {
		file        string
		label, asks string
		set         bool   // the node has the label; otherwise it is asked by the settings alone
		pool, limit string // no pool if empty
	}{
		"without a file":           {"", config.LabelProfile, "research", true, "profile.research", "10% of its nodes"},
		"a MIG config":             {"", config.LabelMIGConfig, "all-1g.10gb", true, "mig.all-1g.10gb", "10% of its nodes"},
		"a config of the plugin":   {"", config.LabelDevicePluginConfig, "shared-4", true, "device-plugin.shared-4", "10% of its nodes"},
		"one of the settings":      {"", config.LabelDevicePluginConfig, "shared-4", false, "device-plugin.shared-4", "10% of its nodes"},
		"no Lease has such a name": {"", config.LabelProfile, "Research_1", true, "profile.5061542c8987", "10% of its nodes"},
		"the longest name":         {"", config.LabelProfile, long, true, "profile." + long, "10% of its nodes"},
		"asked for nothing":        {"", "", "", false, "", ""},
		"a file that says nothing": {"windows:\n", config.LabelProfile, "research", true, "profile.research", "10% of its nodes"},
		"a number":                 {"maxUnavailable: 3\n", config.LabelProfile, "research", true, "profile.research", "3 nodes"},
		"none":                     {"maxUnavailable: none\n", config.LabelProfile, "research", true, "", ""},
		"a pool without a limit": {
			"pools: [{name: a, selector: gpuslice.io/profile}]\n", config.LabelProfile, "research", true, "a", "",
		},
		"a pool that says none": {
			"pools: [{name: a, selector: gpuslice.io/profile, maxUnavailable: none}]\n", config.LabelProfile, "research", true, "a", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := maintenance.Without()
			if c.file != "" {
				var err error
				if m, err = maintenance.Parse([]byte(maintenanceHead + c.file)); err != nil {
					t.Fatal(err)
				}
			}
			m.Asked = func(*corev1.Node) (string, string) { return c.label, c.asks }
			node := &corev1.Node{}
			if c.set {
				node.Labels = map[string]string{c.label: c.asks}
			}
			p := m.For(node)
			limit := ""
			if p.Name != "" && p.MaxUnavailable != nil {
				limit = p.MaxUnavailable.String()
			}
			if p.Name != c.pool || limit != c.limit || p.ForEvictions != (limit != "") {
				t.Errorf("pool %q with limit %q, for evictions alone %t", p.Name, limit, p.ForEvictions)
			}
			if p.Selector != nil && !p.Selector.Matches(labels.Set(node.Labels)) {
				t.Errorf("%s does not select the node", p.Selector)
			}
		})
	}
}

func FuzzParseMaintenance(f *testing.F) {
	f.Add(maintenanceHead)
	f.Add(maintenanceHead + `windows: [{days: [Fri], start: "22:00", duration: 1h, timeZone: Europe/Berlin}]`)
	f.Add(maintenanceHead + `pools: [{name: a, selector: b, maxUnavailable: 1%, freezes: [{from: 2026-12-20T00:00:00Z, to: 2027-12-20T00:00:00Z}]}]`)
	f.Fuzz(func(t *testing.T, text string) {
		m, err := maintenance.Parse([]byte(text))
		if err != nil {
			return
		}
		for _, p := range append(m.Pools, m.Others) {
			if p.Estimate <= 0 || p.Jitter < 0 || p.PauseAfter < 0 {
				t.Errorf("a pool that was taken is out of bounds: %+v", p)
			}
			for _, w := range p.Schedule.Windows {
				if w.Zone == nil || len(w.Days) > 0 && (w.Duration < time.Minute || w.Start < 0 || w.Start >= 24*time.Hour) {
					t.Errorf("a window that was taken is out of bounds: %+v", w)
				}
			}
			p.Schedule.Next(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), p.Estimate)
		}
	})
}

// A pool is found by its name when no label of the node chooses it any more: one of the file with all that the file says, and one of nodes with the same
// request by the selector that it had.
func TestAPoolIsFoundByItsName(t *testing.T) {
	t.Parallel()
	m, err := maintenance.Parse([]byte("apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nmaxUnavailable: 3\npools: [{name: research, selector: pool=research, maxUnavailable: 1}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	if p := m.Named("research", ""); p.Name != "research" || p.MaxUnavailable.Nodes != 1 || p.Selector.String() != "pool=research" {
		t.Errorf("%+v", p)
	}
	m.Asked = func(*corev1.Node) (label, name string) { return "nvidia.com/mig.config", "all-balanced" }
	alike := m.For(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"nvidia.com/mig.config": "all-balanced"}}})
	m.Asked = nil
	if p := m.Named(alike.Name, alike.Selector.String()); p.Name != alike.Name || p.Selector.String() != alike.Selector.String() || p.MaxUnavailable.Nodes != 3 || !p.ForEvictions {
		t.Errorf("%+v, want %+v", p, alike)
	}
	if p := m.Named("gone", "no,,selector"); p.Name != "gone" || p.Selector != nil {
		t.Errorf("of a selector that cannot be read: %+v", p)
	}
}
