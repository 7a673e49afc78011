package verdict_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

func xid(gpu, number, gi int) nvml.Event {
	return nvml.Event{Kind: nvml.EventXid, GPU: nvml.UUID(fmt.Sprintf("GPU-%d", gpu)), Xid: uint64(number), GI: gi, CI: gi}
}

// The oldest settled Xid gives way to a new one. Unsettled ones stay, are remembered of the whole GPU when there are many, and at last not at all.
func TestWhichXidsAreForgotten(t *testing.T) {
	for _, row := range []struct {
		critical bool
		events   int // each with a number of its own
		most     int
		oldest   bool // is remembered
		last     bool
	}{
		{false, 32, 32, true, true},
		{false, 33, 32, false, true},
		{true, 64, 64, true, true},
		{true, 65, 64, true, false},
	} {
		s := config.Health{}
		for i := range row.events {
			if row.critical {
				s.CriticalXids = append(s.CriticalXids, 300+i)
			}
		}
		n := verdict.New(s)
		n.ObserveGPUs(began, []nvml.Health{well(0)}, true)
		var last *verdict.Occurrence
		for i := range row.events {
			_, _, last = n.ObserveEvent(began.Add(time.Duration(i)*time.Second), xid(0, 300+i, 1))
		}
		remembered, whole := map[uint64]bool{}, 0
		for _, x := range n.Xids(n.GPU("GPU-0")) {
			remembered[x.Xid.Number] = true
			if x.GI == nvml.WholeGPU && x.CI == nvml.WholeGPU {
				whole++
			}
		}
		if len(remembered) != row.most || remembered[300] != row.oldest || (last != nil) != row.last || whole != max(0, len(remembered)-32) {
			t.Errorf("of %d Xids (critical: %t) %d are remembered, %d of them of the whole GPU, the oldest: %t, the last: %t",
				row.events, row.critical, len(remembered), whole, remembered[300], last != nil)
		}
	}
}

func TestGPUsThatAreRememberedAreBounded(t *testing.T) {
	var all []nvml.Health
	var bus []nvml.BusGPU
	for i := range 65 {
		all = append(all, well(i))
		bus = append(bus, nvml.BusGPU{PCI: well(i).PCI})
	}
	for name, observe := range map[string]func(*verdict.Node){
		"readings": func(n *verdict.Node) { n.ObserveGPUs(began, all, true) },
		"the bus": func(n *verdict.Node) {
			n.ObserveBus(bus, true)
			n.ObserveGPUs(began, all[:1], true)
		},
		"events": func(n *verdict.Node) {
			for i := range 65 {
				n.ObserveEvent(began, xid(i, 62, nvml.WholeGPU))
			}
			n.ObserveEvent(began, nvml.Event{Kind: nvml.EventXid, Xid: 62})
		},
	} {
		n := verdict.New(config.Health{})
		observe(n)
		if len(n.GPUs()) != 64 {
			t.Errorf("%s: %d GPUs are remembered, want 64", name, len(n.GPUs()))
		}
	}
	n := verdict.New(config.Health{})
	n.ObserveGPUs(began, all[:1], true)
	for i := range 20 { // of which 12 are remembered, and are those that count
		n.GPUs()[0].NoteProgramError(began, types.UID(fmt.Sprint(i)))
	}
	n.GPUs()[0].NoteProgramError(began.Add(time.Hour), "0")
	n.GPUs()[0].NoteProgramError(began.Add(time.Hour), "19")
	n.ObserveGPUs(began, all[:1], true)
	if f := n.GPUs()[0].Findings(); len(f) != 1 || f[0].Detail != ": 12 pods" {
		t.Errorf("the findings are %v, want one of 12 pods", f)
	}
	n.ObserveGPUs(began.Add(time.Hour), all[:1], true)
	n.ObserveGPUs(began.Add(time.Hour+verdict.Interval), all[:1], true)
	if f := n.GPUs()[0].Findings(); len(f) != 0 {
		t.Errorf("an hour later the findings are %v", f)
	}
}

// A record is one that this agent can have written, or it is refused whole.
func TestARecordIsHeldToItsBounds(t *testing.T) {
	list := func(n int, one string) string { return "[" + strings.TrimSuffix(strings.Repeat(one+",", n), ",") + "]" }
	const finding = `{"reason":"GPULost","action":"%s","detail":"%s","instances":%s,"since":"2026-03-01T12:00:00Z"}`
	found := func(action, detail, instances int) string {
		return `{"index":0,"findings":[` + fmt.Sprintf(finding, strings.Repeat("a", action), strings.Repeat("d", detail), list(instances, "1")) + `]}`
	}
	oneOf := func(key string, n int, one string) string { return fmt.Sprintf(`{"index":0,%q:%s}`, key, list(n, one)) }
	const at = `"2026-03-01T12:00:00Z"`
	const x = `{"xid":1,"gi":0,"ci":0,"count":1,"first":` + at + `,"last":` + at + `}`
	lost := fmt.Sprintf(finding, "", "", "[]")
	for _, row := range []struct {
		name, legal, illegal string // GPUs
	}{
		{"an index", `{"index":-1},{"index":1024}`, `{"index":-2}`},
		{"an index", `{"index":0}`, `{"index":1025}`},
		{"a UUID", `{"index":0,"uuid":"` + strings.Repeat("u", 80) + `"}`, `{"index":0,"uuid":"` + strings.Repeat("u", 81) + `"}`},
		{"a place", `{"index":0,"pci":"` + strings.Repeat("p", 32) + `"}`, `{"index":0,"pci":"` + strings.Repeat("p", 33) + `"}`},
		{"a place", `{"index":0,"pci":"p"}`, `{"index":0,"pci":"\u0007"}`},
		{"findings", oneOf("findings", 16, lost), oneOf("findings", 17, lost)},
		{"a reason", oneOf("findings", 1, lost), oneOf("findings", 1, strings.Replace(lost, "GPULost", "Odd", 1))},
		{"an action", found(32, 0, 0), found(33, 0, 0)},
		{"a detail", found(0, 256, 0), found(0, 257, 0)},
		{"instances", found(0, 0, 16), found(0, 0, 17)},
		{"Xids", oneOf("xids", 64, x), oneOf("xids", 65, x)},
		{"rises", oneOf("rises", 3, at), oneOf("rises", 4, at)},
		{"resets", oneOf("resets", 3, `{"at":`+at+`}`), oneOf("resets", 4, `{"at":`+at+`}`)},
		{"GPUs", strings.TrimSuffix(strings.Repeat(`{"index":0},`, 64), ","), strings.TrimSuffix(strings.Repeat(`{"index":0},`, 65), ",")},
	} {
		for gpus, legal := range map[string]bool{row.legal: true, row.illegal: false} {
			if _, err := verdict.ParseRecord([]byte(`{"version":1,"boot":"b","gpus":[` + gpus + `]}`)); (err == nil) != legal {
				t.Errorf("%s: %v, want an error: %t", row.name, err, !legal)
			}
		}
	}
	padded := func(n int) string { return `{"version":1,"boot":"b"` + strings.Repeat(" ", n) + "}" }
	for text, legal := range map[string]bool{
		`{"version":1,"boot":"b"}`:                                                   true,
		`{"version":2,"boot":"b"}`:                                                   false,
		`{"version":1,"boot":"` + strings.Repeat("b", 65) + `"}`:                     false,
		`{"version":1,"boot":"b","reported":"` + strings.Repeat("t", 1<<16) + `"}`:   true,
		`{"version":1,"boot":"b","reported":"` + strings.Repeat("t", 1<<16+1) + `"}`: false,
		`{"version":1,"boot":"b","odd":1}`:                                           false,
		padded(verdict.LongestRecord - len(padded(0))):                               true,
		padded(verdict.LongestRecord - len(padded(0)) + 1):                           false,
	} {
		if _, err := verdict.ParseRecord([]byte(text)); (err == nil) != legal {
			t.Errorf("%.80s, %d bytes: %v, want an error: %t", text, len(text), err, !legal)
		}
	}
}

// Only what is worth a write changes a key.
func TestKeysOfARecord(t *testing.T) {
	n := verdict.New(config.Health{})
	rows := well(0)
	rows.Rows.Corrected, rows.Rows.Uncorrected = nvml.Answered(uint64(1)), nvml.Answered(uint64(2))
	n.ObserveGPUs(began, []nvml.Health{rows}, true)
	n.ObserveEvent(began, xid(0, 62, 1))
	n.ObserveEvent(began, xid(0, 13, 1))
	key := n.Record("boot", "").Key()
	for name, row := range map[string]struct {
		observe func(now time.Time)
		same    bool
	}{
		"the same once more":    {func(now time.Time) { n.ObserveGPUs(now, []nvml.Health{rows}, true) }, true},
		"the same Xids again":   {func(now time.Time) { n.ObserveEvent(now, xid(0, 13, 1)); n.ObserveEvent(now, xid(0, 62, 1)) }, true},
		"an Xid of hangs again": {func(now time.Time) { n.ObserveLogged(now, xid(1, 79, 1)) }, true},
	} {
		row.observe(began.Add(time.Minute))
		if got := n.Record("boot", "").Key(); (got == key) != row.same {
			t.Errorf("%s: the key is %s, was %s", name, got, key)
		}
	}
	if rows := n.GPUs()[0].Rows(); rows == nil || rows.Corrected != 1 || rows.Uncorrected != 2 {
		t.Errorf("the rows are %v, want 1 and 2", rows)
	}
	half := well(0)
	half.Rows.Corrected = nvml.Answered(uint64(7))
	n.ObserveGPUs(began.Add(time.Minute), []nvml.Health{half}, true)
	if got := n.Record("boot", "").Key(); got != key {
		t.Error("rows of which only half is known are taken over")
	}
	n.ObserveEvent(began.Add(time.Minute), xid(0, 31, 1))
	if got := n.Record("boot", "").Key(); got == key {
		t.Error("another Xid leaves the key as it was")
	}
}

// That no GPU is critical is known of a node that is well, and not of a driver that does not answer.
func TestWhatIsKnownIsInTheKeyOfAVerdict(t *testing.T) {
	n := verdict.New(config.Health{})
	rows := well(0)
	n.ObserveGPUs(began, []nvml.Health{rows}, true)
	n.ObserveEvent(began, xid(0, 62, 1))
	n.Acknowledge(began.Add(time.Hour))
	for i := range 2 {
		n.ObserveGPUs(began.Add(time.Hour+time.Duration(i)*time.Minute), []nvml.Health{rows}, true)
	}
	v, _ := n.Judge(began)
	if critical, known := v.Critical(); critical || !known || !strings.HasSuffix(v.Key(), "false") {
		t.Errorf("of a node that is well it is known that no GPU is critical: %t, and the key is %s", known, v.Key())
	}
	n.ObserveError(began, nvml.ErrUnresponsive)
	v, _ = n.Judge(began.Add(5 * time.Second))
	if critical, known := v.Critical(); critical || known || !strings.HasSuffix(v.Key(), "true") {
		t.Errorf("of a driver that does not answer it is not known that no GPU is critical: %t, and the key is %s", known, v.Key())
	}
	if data, err := json.Marshal(n.Record("boot", "")); err != nil || !strings.Contains(string(data), `"xid":62`) {
		t.Errorf("the record is %s, %v", data, err)
	}
}

func TestNamesOfGPUs(t *testing.T) {
	n := verdict.New(config.Health{})
	placeless, nameless, bare := well(1), well(2), well(3)
	placeless.PCI, nameless.UUID, bare.UUID, bare.PCI = "", "", "", ""
	n.ObserveGPUs(began, []nvml.Health{well(0), placeless, nameless, bare}, true)
	n.ObserveEvent(began, xid(9, 62, 1))
	want := []string{"GPU 0 (GPU-0, 0000:01:00.0)", "GPU 1 (GPU-1)", "GPU 2 (0000:03:00.0)", "GPU 3", "a GPU (GPU-9)"}
	for i, g := range n.GPUs() {
		if g.Name() != want[i] {
			t.Errorf("GPU %d is called %q, want %q", i, g.Name(), want[i])
		}
	}
	for _, i := range []int{0, 2} {
		if g := n.GPUAt(well(i).PCI); g == nil || g.Name() != want[i] {
			t.Errorf("at %s is %v", well(i).PCI, g)
		}
	}
	if n.GPUAt("") != nil || n.GPUAt("0000:09:00.0") != nil || n.GPU("") != nil || n.GPU("GPU-7") != nil {
		t.Error("there is a GPU at no place or of no name")
	}
	if got := n.Xids(n.GPUs()[4]); len(got) != 1 || got[0].Count != 1 {
		t.Errorf("the Xids are %v", got)
	}
}

func TestGPUsThatAreNamedByTheirPlaces(t *testing.T) {
	n := verdict.New(config.Health{})
	placeless := well(1)
	placeless.PCI = ""
	n.ObserveGPUs(began, []nvml.Health{well(0), placeless}, true)
	n.ObserveEvent(began, xid(9, 62, 1))
	n.ObserveBus([]nvml.BusGPU{{PCI: well(0).PCI}}, true)
	n.ObserveGPUs(began.Add(time.Minute), []nvml.Health{well(0)}, true)
	if got := n.GPUs()[len(n.GPUs())-1].Name(); got != "a GPU (GPU-9)" {
		t.Errorf("the last GPU is %s, want the one without an index", got)
	}
	n.ObserveBus([]nvml.BusGPU{{PCI: well(0).PCI}, {PCI: well(7).PCI}}, true)
	moved := well(1)
	n.ObserveGPUs(began.Add(time.Minute), []nvml.Health{well(0), moved}, true)
	moved.PCI = ""
	n.ObserveGPUs(began.Add(time.Minute), []nvml.Health{well(0), moved}, true)
	if g := n.GPUAt(well(7).PCI); g == nil || g.Name() != "a GPU ("+well(7).PCI+")" || n.GPU("GPU-1").PCI() != well(1).PCI {
		t.Errorf("the bus alone has %v, and GPU 1 is at %q", g, n.GPU("GPU-1").PCI())
	}
}

// The detail of a missing GPU says how many there are.
func TestWhatIsSaidOfAMissingGPU(t *testing.T) {
	for want, row := range map[string]struct {
		bus   []nvml.BusGPU
		known bool
	}{
		"; 1 answer":                           {},
		"; 2 are on the PCI bus, and 1 answer": {[]nvml.BusGPU{{PCI: well(0).PCI}, {PCI: well(1).PCI}}, true},
		", nor is it on the PCI bus any more; 1 are, and 1 answer": {[]nvml.BusGPU{{PCI: well(0).PCI}}, true},
	} {
		n := verdict.New(config.Health{})
		n.ObserveGPUs(began, []nvml.Health{well(0), well(1)}, true)
		n.ObserveBus(row.bus, row.known)
		n.ObserveGPUs(began.Add(time.Minute), []nvml.Health{well(0)}, true)
		f := n.GPU("GPU-1").Findings()
		if len(f) != 1 || f[0].Detail != want {
			t.Errorf("the findings are %v, want %q", f, want)
		}
		if index, is := n.GPU("GPU-1").Missing(); index != 1 || !is {
			t.Errorf("GPU %d is missing: %t", index, is)
		}
	}
	n := verdict.New(config.Health{})
	n.ObserveBus([]nvml.BusGPU{{PCI: "a"}, {PCI: "b"}}, true)
	n.ObserveError(began, nvml.ErrNoDriver)
	if v, _ := n.Judge(began.Add(time.Minute)); !strings.Contains(v.Unknown, "the PCI bus has 2 GPUs") {
		t.Errorf("where the bus has GPUs and there is no driver, the verdict says %q", v.Unknown)
	}
	n.ObserveBus(nil, false)
	if v, _ := n.Judge(began.Add(time.Minute)); v.NoGPU || !strings.Contains(v.Unknown, "NVIDIA's driver is not loaded") {
		t.Errorf("where the bus is not known and there is no driver, the verdict says %q", v.Unknown)
	}
}

func TestEventsOfAnXid(t *testing.T) {
	n := verdict.New(config.Health{})
	n.ObserveGPUs(began, []nvml.Health{well(0)}, true)
	_, _, o := n.ObserveEvent(began, xid(0, 13, 1))
	if !o.EventDue(began, time.Hour) {
		t.Error("no Event is due of the first one")
	}
	if unreported, since := o.NoteEvent(began.Add(time.Second)); unreported != 0 || !since.Equal(began) {
		t.Errorf("%d since %s, want 0 since the first one", unreported, since)
	}
	if o.EventDue(began.Add(time.Hour), time.Hour) || !o.EventDue(began.Add(time.Hour+time.Second), time.Hour) {
		t.Error("an Event is due before the pause is over, or not when it is")
	}
	o.CountUnreported()
	o.CountUnreported()
	if unreported, since := o.NoteEvent(began.Add(time.Hour)); unreported != 2 || !since.Equal(began.Add(time.Second)) {
		t.Errorf("%d since %s, want 2 since the last Event", unreported, since)
	}
	if unreported, _ := o.NoteEvent(began.Add(time.Hour)); unreported != 0 {
		t.Errorf("%d are counted again", unreported)
	}
}

func TestWhetherTheDriverHandsOutItsEvents(t *testing.T) {
	n := verdict.New(config.Health{})
	for _, row := range []struct {
		kind nvml.EventKind
		want bool
	}{{nvml.EventECC, false}, {nvml.EventWatching, true}, {nvml.EventECC, true}, {nvml.EventSilence, false}, {nvml.EventWatching, true}} {
		n.ObserveEvent(began, nvml.Event{Kind: row.kind})
		if n.HasEvents() != row.want {
			t.Errorf("after an event of kind %v the driver hands out its events: %t", row.kind, n.HasEvents())
		}
	}
	n.SetEvents(false)
	if n.HasEvents() {
		t.Error("SetEvents changes nothing")
	}
	n.ConfirmLogged(began, xid(0, 62, 1))
	if !n.HasEvents() || n.Observed() || n.DriverAnswers() {
		t.Error("an event does not show that events are sent, or it shows an answer")
	}
	n.ObserveGPUs(began, nil, true)
	if !n.Observed() || !n.DriverAnswers() {
		t.Error("the driver has answered")
	}
	n.ObserveError(began, nvml.ErrUnresponsive)
	if !n.Observed() || n.DriverAnswers() {
		t.Error("the driver answers no more")
	}
}

func TestWhatIsAdvised(t *testing.T) {
	f := func(r config.Reason, a verdict.Action) verdict.Finding { return verdict.Finding{Reason: r, Action: a} }
	support := f(config.ReasonResetRequired, verdict.ActionContactSupport).Advice()
	known := f(config.ReasonResetRequired, verdict.ActionResetGPU).Advice()
	if !strings.Contains(support, "NVIDIA's support") || support == known || support == f(config.ReasonRowRemapFailed, verdict.ActionContactSupport).Advice() {
		t.Errorf("of an action that is not known the same is advised as of others: %s", support)
	}
	if verdict.Worse(config.ReasonGPULost, config.ReasonGPULost) {
		t.Error("a reason is worse than itself")
	}
	if !verdict.InTable(62) || verdict.InTable(61) {
		t.Error("the table has not what NVIDIA's catalog has")
	}
	n := verdict.New(config.Health{CriticalXids: []int{13, 44, 154}})
	for number, want := range map[int]verdict.Class{13: verdict.ClassUnknown, 44: verdict.ClassUnknown, 154: verdict.ClassState, 31: verdict.ClassApplication} {
		if _, x, _ := n.ObserveEvent(began, xid(0, number, 1)); x.Class != want || x.Critical != (number != 31) {
			t.Errorf("with the settings Xid %d is %s, critical: %t", number, x.Class, x.Critical)
		}
	}
}

// What has come and gone too often, how a reset of the agent ended, and from when on a GPU is well.
func TestWhatAGPUSaysOfItself(t *testing.T) {
	n := verdict.New(config.Health{})
	sick := well(0)
	sick.RepairPending = nvml.Answered(true)
	now := began
	observe := func(h nvml.Health) {
		n.ObserveGPUs(now, []nvml.Health{h}, true)
		now = now.Add(verdict.Interval)
	}
	for i := range 3 {
		observe(sick)
		g := n.GPUs()[0]
		if _, flaps := g.FlappingUntil(now); flaps != (i == 2) {
			t.Errorf("after %d times it flaps: %t", i+1, flaps)
		}
		observe(well(0))
		observe(well(0))
	}
	g := n.GPUs()[0]
	until, flaps := g.FlappingUntil(now)
	if !flaps {
		t.Fatal("it does not flap")
	}
	if _, flaps := g.FlappingUntil(until); flaps {
		t.Errorf("it flaps at %s, until when it does", until)
	}
	now = until.Add(verdict.Interval)
	observe(well(0))
	calm := now.Add(-verdict.Interval)
	last, _ := g.RecoveredFrom(calm)
	for after, want := range map[time.Duration]bool{5*time.Second - 1: false, 5 * time.Second: true} {
		if _, is := g.RecoveredFrom(last.Add(after)); is != want {
			t.Errorf("%s after the last trouble it has recovered: %t", after, is)
		}
	}
}

func TestResetsThatAreTooManyOrInVain(t *testing.T) {
	n, now := verdict.New(config.Health{}), began
	n.ObserveGPUs(now, []nvml.Health{well(0)}, true)
	g := n.GPUs()[0]
	if g.RowPending() || g.RowFailed() || g.ResetTooOften(now) {
		t.Error("a well GPU says otherwise")
	}
	if _, has := g.LastReset(); has {
		t.Error("the agent has not reset it")
	}
	for range 2 {
		g.BeginReset(now)
		g.EndReset(now)
	}
	if g.ResetTooOften(now) {
		t.Error("two resets are too often")
	}
	g.EndReset(now)
	if at, vain := g.ResetInVain(); vain || !at.Equal(now) || !g.ResetTooOften(now) || g.ResetTooOften(now.Add(24*time.Hour)) {
		t.Error("three resets of a GPU that is well are in vain, or not too often")
	}
}
