package nvml_test

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
)

func TestSolve(t *testing.T) {
	for _, c := range []struct {
		name    string
		gpu     nvml.GPU
		request map[string]int
		keep    string
		destroy string
		create  string
		change  string // of the instances that stay: "3g.40gb(1c)@0 -1c@0 +2c@0"
	}{
		{"an empty request on an empty GPU is nothing to do", h100(), nil, "-", "-", "-", ""},
		{
			"an empty request destroys everything", stand(h100(), "1g.10gb@0", "3g.40gb@4!"),
			map[string]int{"1g.10gb": 0},
			"-", "1g.10gb@0 3g.40gb@4", "-", "",
		},
		{
			"a balanced request stands lowest, smallest first", h100(),
			map[string]int{"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
			"-", "-", "1g.10gb@0 1g.10gb@1 2g.20gb@2 3g.40gb@4", "",
		},
		{
			"one 3g and two 2g on an A100 80GB fit only with the 3g behind", a100(),
			map[string]int{"3g.40gb": 1, "2g.20gb": 2},
			"-", "-", "2g.20gb@0 2g.20gb@2 3g.40gb@4", "",
		},
		{
			"seven 1g on an A100 80GB fit", a100(),
			map[string]int{"1g.10gb": 7},
			"-", "-",
			"1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6", "",
		},
		{
			"three 2g and a 1g on an A100 80GB fit", a100(),
			map[string]int{"2g.20gb": 3, "1g.10gb": 1},
			"-", "-",
			"2g.20gb@0 2g.20gb@2 2g.20gb@4 1g.10gb@6", "",
		},
		{
			"what stands as wanted is kept where it is", stand(h100(), "1g.10gb@5", "3g.40gb@0"),
			map[string]int{"1g.10gb": 2, "3g.40gb": 1},
			"3g.40gb@0 1g.10gb@5", "-", "1g.10gb@4", "",
		},
		{
			"a 3g in the way of two 2g goes, since they fit in no other way", stand(a100(), "3g.40gb@0"),
			map[string]int{"3g.40gb": 1, "2g.20gb": 2},
			"-", "3g.40gb@0", "2g.20gb@0 2g.20gb@2 3g.40gb@4", "",
		},
		{
			"many idle instances go before one busy one", stand(h100(), "3g.40gb@0!", "1g.10gb@4", "1g.10gb@5", "1g.10gb@6"),
			map[string]int{"3g.40gb": 1, "1g.10gb": 3},
			"3g.40gb@0 1g.10gb@4 1g.10gb@5 1g.10gb@6", "-", "-", "",
		},
		{
			"the idle one of two equal instances goes", stand(h100(), "1g.10gb@0", "1g.10gb@6!"),
			map[string]int{"1g.10gb": 1},
			"1g.10gb@6", "1g.10gb@0", "-", "",
		},
		{
			"a busy instance in the middle is worth giving up three idle ones",
			stand(h100(), "1g.10gb@0", "1g.10gb@1", "1g.10gb@2", "1g.10gb@6!"),
			map[string]int{"3g.40gb": 1, "1g.10gb": 1},
			"1g.10gb@6", "1g.10gb@0 1g.10gb@1 1g.10gb@2", "3g.40gb@0", "",
		},
		{
			"fewer instances go before fewer memory slices", stand(h100(), "1g.10gb@0", "1g.10gb@1", "2g.20gb@4"),
			map[string]int{"3g.40gb": 1, "1g.10gb": 2},
			"1g.10gb@0 1g.10gb@1", "2g.20gb@4", "3g.40gb@4", "",
		},
		{
			"a half-made instance is finished where the same is wanted", stand(h100(), "3g.40gb@0?", "1g.10gb@4"),
			map[string]int{"3g.40gb": 1, "1g.10gb": 1},
			"1g.10gb@4", "-", "-", "3g.40gb@0 +3c@0",
		},
		{
			"a half-made instance is finished as what is wanted", stand(h100(), "3g.40gb@4?"),
			map[string]int{"1c.3g.40gb": 2},
			"-", "-", "-", "3g.40gb@4 +1c@0 +1c@1",
		},
		{
			"a half-made instance that no one wants goes", stand(h100(), "3g.40gb@0?"),
			map[string]int{"1g.10gb": 1},
			"-", "3g.40gb@0", "1g.10gb@0", "",
		},
		{
			"an instance divided in another way is divided again where it stands", stand(h100(), "3g.40gb(1c+2c)@0"),
			map[string]int{"3g.40gb": 1},
			"-", "-", "-", "3g.40gb(1c+2c)@0 -2c@0 -1c@2 +3c@0",
		},
		{
			"an undivided instance is divided where it stands", stand(h100(), "3g.40gb@4"),
			map[string]int{"1c.3g.40gb": 1},
			"-", "-", "-", "3g.40gb@4 -3c@0 +1c@0",
		},
		{
			"one part more is one more beside a busy one", stand(h100(), "3g.40gb(1c!)@4"),
			map[string]int{"1c.3g.40gb": 2},
			"-", "-", "-", "3g.40gb(1c)@4 +1c@1",
		},
		{
			"one part less is an idle one less", stand(h100(), "3g.40gb(1c:0!+1c:1+1c:2!)@4"),
			map[string]int{"1c.3g.40gb": 2},
			"-", "-", "-", "3g.40gb(1c+1c+1c)@4 -1c@1",
		},
		{
			"one part less of many instances is an idle one", stand(h100(), "3g.40gb(1c!)@0", "3g.40gb(1c:0!+1c:1)@4"),
			map[string]int{"1c.3g.40gb": 2},
			"3g.40gb(1c)@0", "-", "-", "3g.40gb(1c+1c)@4 -1c@1",
		},
		{
			"a larger part comes where the busy one leaves room", stand(h100(), "4g.40gb(1c:3!+1c:0)@0"),
			map[string]int{"1c.4g.40gb": 1, "2c.4g.40gb": 1},
			"-", "-", "-", "4g.40gb(1c+1c)@0 -1c@0 +2c@0",
		},
		{
			"a part in the way of a larger one goes rather than a busy one", stand(h100(), "4g.40gb(1c:1!+1c:2)@0"),
			map[string]int{"1c.4g.40gb": 2, "2c.4g.40gb": 1},
			"-", "-", "-", "4g.40gb(1c+1c)@0 -1c@2 +1c@0 +2c@2",
		},
		{
			"a busy part in the middle has another instance made rather than leave", stand(h100(), "3g.40gb(1c:1!)@4"),
			map[string]int{"1c.3g.40gb": 1, "2c.3g.40gb": 1},
			"3g.40gb(1c)@4", "-", "3g.40gb(2c)@0", "",
		},
		{
			"a busy part in the middle goes where nothing else can be", stand(h100(), "3g.40gb(1c:1!)@4", "4g.40gb@0!"),
			map[string]int{"1c.3g.40gb": 1, "2c.3g.40gb": 1, "4g.40gb": 1},
			"4g.40gb@0", "-", "-", "3g.40gb(1c)@4 -1c@1 +2c@0 +1c@2",
		},
		{
			"where no places are reported parts can only go", withoutPlaces(stand(h100(), "3g.40gb(1c!+1c)@0")),
			map[string]int{"1c.3g.40gb": 1},
			"-", "-", "-", "3g.40gb(1c+1c)@0 -1c@0",
		},
		{
			"where no places are reported parts come in another instance", withoutPlaces(stand(h100(), "3g.40gb(1c)@0")),
			map[string]int{"1c.3g.40gb": 3},
			"3g.40gb(1c)@0", "-", "3g.40gb(1c+1c)@4", "",
		},
		{
			"where no places are reported and there is no other instance it is made again", withoutPlaces(stand(h100(), "3g.40gb(1c!)@4", "4g.40gb@0")),
			map[string]int{"1c.3g.40gb": 2, "4g.40gb": 1},
			"4g.40gb@0", "3g.40gb(1c)@4", "3g.40gb(1c+1c)@4", "",
		},
		{
			"where no places are reported a half-made instance is finished where it stands", withoutPlaces(stand(a30(), "2g.12gb@2?")),
			map[string]int{"2g.12gb": 1},
			"-", "-", "2g.12gb@2", "",
		},
		{
			"where no places are reported a half-made instance is finished by its parts", withoutPlaces(stand(h100(), "3g.40gb@4?", "1g.10gb@0")),
			map[string]int{"1c.3g.40gb": 2},
			"-", "1g.10gb@0", "3g.40gb(1c+1c)@4", "",
		},
		{
			"parts share as few instances as hold them", h100(),
			map[string]int{"1c.3g.40gb": 2, "2c.3g.40gb": 2},
			"-", "-", "3g.40gb(1c+2c)@0 3g.40gb(1c+2c)@4", "",
		},
		{
			"parts are divided as it stands already", stand(h100(), "3g.40gb(1c+1c)@4"),
			map[string]int{"1c.3g.40gb": 4},
			"3g.40gb(1c+1c)@4", "-", "3g.40gb(1c+1c)@0", "",
		},
		{
			"parts are divided as it stands already, unevenly too", stand(h100(), "3g.40gb(1c+1c+1c)@4"),
			map[string]int{"1c.3g.40gb": 4},
			"3g.40gb(1c+1c+1c)@4", "-", "3g.40gb(1c)@0", "",
		},
		{
			"parts stay in more instances than they need", stand(h100(), "3g.40gb(1c)@0!", "3g.40gb(1c)@4!"),
			map[string]int{"1c.3g.40gb": 2},
			"3g.40gb(1c)@0 3g.40gb(1c)@4", "-", "-", "",
		},
		{
			"parts in more instances than there is room for come together",
			stand(h100(), "3g.40gb(1c)@0", "3g.40gb(1c)@4!"),
			map[string]int{"1c.3g.40gb": 2, "4g.40gb": 1},
			"-", "3g.40gb(1c)@0", "4g.40gb@0", "3g.40gb(1c)@4 +1c@1",
		},
		{
			"missing parts join the instance that has the fewest", stand(h100(), "3g.40gb(1c)@0", "3g.40gb(1c+1c)@4"),
			map[string]int{"1c.3g.40gb": 4},
			"3g.40gb(1c+1c)@4", "-", "-", "3g.40gb(1c)@0 +1c@1",
		},
		{
			"a part as large as its instance is the instance", stand(h100(), "3g.40gb@4"),
			map[string]int{"3c.3g.40gb": 1, "1c.1g.10gb": 1},
			"3g.40gb@4", "-", "1g.10gb@0", "",
		},
		{
			"names may come as labels write them", h100(),
			map[string]int{"1g.10gb.me": 1, "1c.3g.40gb": 1},
			"-", "-", "1g.10gb+me@0 3g.40gb(1c)@4", "",
		},
		{
			"an A30 has its own places", stand(a30(), "1g.6gb@1!"),
			map[string]int{"2g.12gb": 1, "1g.6gb": 2},
			"1g.6gb@1", "-", "1g.6gb@0 2g.12gb@2", "",
		},
		{
			"an H200 has its own names", h200(),
			map[string]int{"4g.71gb": 1, "1g.35gb": 2},
			"-", "-",
			"4g.71gb@0 1g.35gb@4 1g.35gb@6", "",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := nvml.Solve(c.gpu, c.request)
			if err != nil {
				t.Fatal(err)
			}
			got := []string{
				nvml.Geometry(s.Keep).String(), nvml.Geometry(s.Destroy).String(), nvml.Geometry(s.Create).String(), changes(s),
			}
			if diff := gocmp.Diff([]string{c.keep, c.destroy, c.create, c.change}, got); diff != "" {
				t.Errorf("keep, destroy, create, change (-want +got):\n%s", diff)
			}
		})
	}
}

// changes writes what a solution does to the instances that stay.
func changes(s nvml.Solution) string {
	var out []string
	for _, c := range s.Change {
		out = append(out, c.Instance.String())
		for _, p := range c.Destroy {
			out = append(out, "-"+p.String())
		}
		for _, p := range c.Create {
			out = append(out, "+"+p.String())
		}
	}
	return strings.Join(out, " ")
}

// withoutPlaces is the GPU with a driver that says nothing of where compute instances may stand.
func withoutPlaces(g nvml.GPU) nvml.GPU {
	g.Profiles = slices.Clone(g.Profiles)
	for i, p := range g.Profiles {
		g.Profiles[i].Compute = slices.Clone(p.Compute)
		for n := range p.Compute {
			g.Profiles[i].Compute[n].Placements = nil
		}
	}
	return g
}

func TestSolveExplainsTheImpossible(t *testing.T) {
	for _, c := range []struct {
		name    string
		gpu     nvml.GPU
		request map[string]int
		want    string
	}{
		{
			"memory", a100(),
			map[string]int{"3g.40gb": 2, "1g.10gb": 1},
			"2x 3g.40gb take all 8 memory slices; 1g.10gb needs 1 more; possible: 2x 3g.40gb, or 1x 3g.40gb + 4x 1g.10gb",
		},
		{
			"memory of several kinds", h100(),
			map[string]int{"3g.40gb": 1, "2g.20gb": 1, "1g.20gb": 2},
			"1x 3g.40gb + 1x 2g.20gb + 1x 1g.20gb take all 8 memory slices; 1g.20gb needs 2 more; " +
				"possible: 1x 3g.40gb + 1x 2g.20gb + 1x 1g.20gb, or 1x 3g.40gb + 2x 1g.20gb, or 2x 2g.20gb + 2x 1g.20gb",
		},
		{
			"memory that parts do not take to the end", h100(),
			map[string]int{"4g.40gb": 1, "1c.3g.40gb": 4},
			"1x 4g.40gb takes 4 of the 8 memory slices; 4x 1c.3g.40gb need 8; " +
				"possible: 1x 4g.40gb + 3x 1c.3g.40gb, or 4x 1c.3g.40gb",
		},
		{
			"a whole GPU and more", h100(),
			map[string]int{"7g.80gb": 1, "1g.10gb": 1},
			"1x 7g.80gb takes all 8 memory slices; 1g.10gb needs 1 more; possible: 1x 7g.80gb, or 7x 1g.10gb",
		},
		{
			"compute slices", h100(),
			map[string]int{"4g.40gb": 1, "2g.20gb": 2},
			"1x 4g.40gb + 2x 2g.20gb need 8 compute slices, and NVIDIA H100 80GB HBM3 has 7; " +
				"possible: 1x 4g.40gb + 1x 2g.20gb, or 3x 2g.20gb",
		},
		{
			"an engine that the GPU has once", a30(),
			map[string]int{"2g.12gb+me": 1, "1g.6gb+me": 1},
			"1x 2g.12gb+me + 1x 1g.6gb+me need 2 JPEG engines, and NVIDIA A30 has 1; possible: 1x 2g.12gb+me, or 1x 1g.6gb+me",
		},
		{
			"too many of one", h100(),
			map[string]int{"1g.10gb.me": 2},
			"at most 1x 1g.10gb+me fits, not 2; possible: 1x 1g.10gb+me",
		},
		{
			"far too many of one", h100(),
			map[string]int{"1g.10gb": nvml.MaxDevices},
			"at most 7x 1g.10gb fit, not 1000; possible: 7x 1g.10gb",
		},
		{
			"more than is counted", h100(),
			map[string]int{"1g.10gb": math.MaxInt},
			"1g.10gb: 9223372036854775807 is more than any GPU holds; give at most 1000",
		},
		{
			"more than is counted, beside a part of the same", h100(),
			map[string]int{"3g.40gb": math.MaxInt, "1c.3g.40gb": 1},
			"3g.40gb: 9223372036854775807 is more than any GPU holds; give at most 1000",
		},
		{
			"more than is counted by two spellings", h100(),
			map[string]int{"1g.10gb": math.MaxInt, "1c.1g.10gb": 1},
			"1g.10gb: 9223372036854775807 is more than any GPU holds; give at most 1000",
		},
		{
			"too many by two spellings of what is counted each", h100(),
			map[string]int{"3g.40gb": nvml.MaxDevices, "3c.3g.40gb": 1},
			"3g.40gb: 1000 is more than any GPU holds; give at most 1000",
		},
		{
			"too many parts", h100(),
			map[string]int{"2c.3g.40gb": 3},
			"at most 2x 2c.3g.40gb fit, not 3; possible: 2x 2c.3g.40gb",
		},
		{
			"too many parts beside a whole one", h100(),
			map[string]int{"3g.40gb": 1, "2c.3g.40gb": 2},
			"1x 3g.40gb + 2x 2c.3g.40gb need more than 2 instances of 3g.40gb, and at most 2 fit; " +
				"possible: 1x 3g.40gb + 1x 2c.3g.40gb, or 2x 2c.3g.40gb",
		},
		{
			"places", onlyApart(),
			map[string]int{"2g": 1, "3g": 1, "1g": 1},
			"no arrangement of 1x 3g + 1x 2g fits: 3g fits only at 0, 2g fits only at 1 or 2; " +
				"possible: 1x 3g + 2x 1g, or 1x 2g + 2x 1g",
		},
		{
			"an unknown name", h100(),
			map[string]int{"9g.999gb": 1},
			"unknown profile 9g.999gb: NVIDIA H100 80GB HBM3 offers " +
				"1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb",
		},
		{
			"an unknown part", h100(),
			map[string]int{"4c.3g.40gb": 1},
			"3g.40gb cannot be divided into 4c: it offers 1c, 2c, 3c",
		},
		{
			"a part of an unknown profile", a30(),
			map[string]int{"1c.3g.40gb": 1},
			"unknown profile 1c.3g.40gb: NVIDIA A30 offers 1g.6gb, 1g.6gb+me, 2g.12gb, 2g.12gb+me, 4g.24gb",
		},
		{
			"a GPU that cannot be cut",
			nvml.GPU{Model: "NVIDIA L40S"},
			map[string]int{"1g.10gb": 1},
			"NVIDIA L40S cannot be cut into instances, so there is no 1g.10gb",
		},
		{"a negative count", h100(), map[string]int{"1g.10gb": -1}, "1g.10gb: -1 is not a count; give 0 or more"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := nvml.Solve(c.gpu, c.request)
			if impossible := new(nvml.Impossible); !errors.As(err, &impossible) {
				t.Fatalf("got %v, want an *Impossible", err)
			}
			if diff := gocmp.Diff(c.want, err.Error()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// onlyApart is a GPU with room enough for a 2g and a 3g, whose places always overlap.
func onlyApart() nvml.GPU {
	return nvml.GPU{Profiles: []nvml.Profile{
		{Name: "1g", Slices: 1, Max: 2, Compute: computeOf(1), Placements: []nvml.Span{{Start: 4, Size: 1}, {Start: 5, Size: 1}}},
		{Name: "2g", Slices: 2, Max: 1, Compute: computeOf(2), Placements: []nvml.Span{{Start: 1, Size: 2}, {Start: 2, Size: 2}}},
		{Name: "3g", Slices: 3, Max: 1, Compute: computeOf(3), Placements: []nvml.Span{{Start: 0, Size: 3}}},
		{Name: "6g", Slices: 6, Max: 1, Compute: computeOf(6), Placements: []nvml.Span{{Start: 0, Size: 6}}},
	}}
}

// NVIDIA's library counts wrongly on the A30. Whatever it says, there is one set of the engines of "+me", and two places for half of the GPU.
// Free slices are not enough: the place has to be one of the profile's, and the engines have to be there.
func TestTheLargestInstanceThatStillFits(t *testing.T) {
	for name, row := range map[string]struct {
		gpu  nvml.GPU
		want string
	}{
		"an empty GPU":                    {a100(), "7g.80gb"},
		"half of it":                      {stand(a100(), "3g.40gb@0"), "3g.40gb"},
		"half of it, elsewhere":           {stand(a100(), "3g.40gb@4"), "4g.40gb"},
		"one in the middle of each half":  {stand(a100(), "1g.10gb@1", "1g.10gb@5"), "2g.20gb"},
		"one in each pair":                {stand(a100(), "1g.10gb@1", "1g.10gb@3", "1g.10gb@5", "1g.10gb@6"), "1g.10gb"},
		"memory, and no compute slices":   {stand(a100(), "4g.40gb@0", "3g.40gb@4"), ""},
		"all slices":                      {stand(a100(), "7g.80gb@0"), ""},
		"a half-made one takes its place": {stand(a100(), "7g.80gb@0?"), ""},
	} {
		p, fits := row.gpu.Largest()
		if p.Name != row.want || fits != (row.want != "") {
			t.Errorf("%s: %s %t, want %q", name, p.Name, fits, row.want)
		}
	}
}

// mostBeside tries all sets of places.
func mostBeside(g nvml.GPU, p nvml.Profile) int {
	var with []nvml.Placed
	for _, i := range g.Instances {
		with = append(with, i.Placed)
	}
	held, most := len(with), 0
	var put func(from int)
	put = func(from int) {
		if enough(g, with) {
			most = max(most, len(with)-held)
		}
		for n := from; n < len(p.Placements); n++ {
			at := p.Placements[n]
			if !slices.ContainsFunc(with, func(o nvml.Placed) bool { return o.Overlaps(at) }) {
				with = append(with, nvml.Placed{Profile: p.Name, Span: at})
				put(n + 1)
				with = with[:len(with)-1]
			}
		}
	}
	put(0)
	return most
}

func TestAsManyMoreInstancesFitAsBruteForceFinds(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	found := map[int]int{}
	for range 2000 {
		g := crowd(r, []nvml.GPU{a100(), h100(), h200(), sixteen(), onlyApart()}[r.IntN(5)])
		if r.IntN(2) == 0 {
			g.Instances = g.Instances[:len(g.Instances)/3]
		}
		for _, p := range g.Profiles {
			want := mostBeside(g, p)
			if got := g.Further(p); got != want {
				t.Fatalf("%d more of %s fit on %s with %s, want %d", got, p.Name, g.Model, g.Geometry(), want)
			}
			found[want]++
		}
	}
	if found[0] == 0 || found[1] == 0 || found[2] == 0 || found[4] == 0 {
		t.Errorf("cases by result: %v", found)
	}
}

func TestSlicesThatNoInstanceHasAreFreeAsLongAsOneCanUseThem(t *testing.T) {
	for name, row := range map[string]struct {
		gpu  nvml.GPU
		want int
	}{
		"an empty GPU":               {a100(), 8},
		"a half":                     {stand(a100(), "3g.40gb@4"), 4},
		"both halves":                {stand(a100(), "4g.40gb@0", "3g.40gb@4"), 0},
		"six of seven":               {stand(a100(), "1g.10gb@0", "1g.10gb@1", "1g.10gb@2", "1g.10gb@3", "1g.10gb@4", "1g.10gb@6"), 2},
		"seven of one slice":         {stand(a100(), "1g.10gb@0", "1g.10gb@1", "1g.10gb@2", "1g.10gb@3", "1g.10gb@4", "1g.10gb@5", "1g.10gb@6"), 0},
		"no profiles at all":         {nvml.GPU{}, 0},
		"an instance of much memory": {stand(a100(), "1g.20gb@6"), 6},
	} {
		if got := row.gpu.FreeSlices(); got != row.want {
			t.Errorf("%s: %d, want %d", name, got, row.want)
		}
	}
}

func TestTheLibrarysCountsAreBoundedByWhatTheGPUHas(t *testing.T) {
	counting := func(n int) nvml.GPU {
		g := a30()
		for i := range g.Profiles {
			g.Profiles[i].Max = n
		}
		return g
	}
	for name, want := range map[string]int{"1g.6gb": 4, "1g.6gb+me": 1, "2g.12gb": 2, "2g.12gb+me": 1, "4g.24gb": 1} {
		for _, reported := range []int{2, 4, 7, 100} {
			g := counting(reported)
			p, _ := g.Profile(name)
			want := min(want, reported)
			if got := g.Holds(p); got != want {
				t.Errorf("of %s, which the library says that %d fit, the GPU holds %d, want %d", name, reported, got, want)
			}
			if _, err := nvml.Solve(g, map[string]int{name: want}); err != nil {
				t.Errorf("%dx %s: %v", want, name, err)
			}
			fits := fmt.Sprintf("at most %dx %s fit", want, name)
			offer := fmt.Sprintf("possible: %dx %s", want, name)
			if _, err := nvml.Solve(g, map[string]int{name: want + 3}); err == nil || !strings.Contains(err.Error(), fits) || !strings.Contains(err.Error(), offer) {
				t.Errorf("%dx %s: %v; want %q and %q", want+3, name, err, fits, offer)
			}
		}
	}
	if s, err := nvml.Solve(counting(4), map[string]int{"2g.12gb+me": 1, "1g.6gb+me": 1}); err == nil {
		t.Errorf("two with all media engines fit: %v", s)
	}
}

func TestRestoreKeepsOnlyWhatStandsAtItsPlace(t *testing.T) {
	g := stand(h100(), "1g.10gb@0", "1g.10gb@1?", "3g.40gb@4!")
	target := nvml.Geometry{parsePlaced(g, "3g.40gb@4"), parsePlaced(g, "1g.10gb@1"), parsePlaced(g, "1g.10gb@2")}
	s := nvml.Restore(g, target)
	want := []string{"1g.10gb@1 1g.10gb@2 3g.40gb@4", "3g.40gb@4", "1g.10gb@0", "1g.10gb@2", "1g.10gb@1 +1c@0"}
	got := []string{
		s.Target.String(), nvml.Geometry(s.Keep).String(), nvml.Geometry(s.Destroy).String(), nvml.Geometry(s.Create).String(), changes(s),
	}
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("target, keep, destroy, create, change (-want +got):\n%s", diff)
	}
	if target[0].Profile != "3g.40gb" {
		t.Error("Restore has sorted its caller's target")
	}
}

func TestEveryRequestOnASevenSliceGPUIsSolvedAsByBruteForce(t *testing.T) {
	fitting, refused := 0, 0
	for _, empty := range []nvml.GPU{a100(), h100()} {
		r := rand.New(rand.NewPCG(1, 2))
		eachRequest(empty, func(request map[string]int) {
			g := crowd(r, empty)
			check(t, g, request, &fitting, &refused)
		})
	}
	t.Logf("%d requests fit, %d do not", fitting, refused)
	if fitting < 100 || refused < 100 {
		t.Error("the requests are too one-sided to prove anything")
	}
}

// eachRequest calls yield with every request of undivided instances that does not ask for more of one than fits, nor for more
// than seven in all.
func eachRequest(g nvml.GPU, yield func(map[string]int)) {
	request := map[string]int{}
	var choose func(i, left int)
	choose = func(i, left int) {
		if i == len(g.Profiles) {
			yield(maps.Clone(request))
			return
		}
		p := g.Profiles[i]
		for n := 0; n <= min(p.Max, left); n++ {
			request[p.Name] = n
			choose(i+1, left-n)
		}
		delete(request, p.Name)
	}
	choose(0, 7)
}

func TestRandomRequestsAreSolvedAsByBruteForce(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	fitting, refused := 0, 0
	gpus := []nvml.GPU{a100(), h100(), h200(), a30(), onlyApart()}
	for range 3000 {
		empty := gpus[r.IntN(len(gpus))]
		check(t, crowd(r, empty), randomRequest(r, empty), &fitting, &refused)
	}
	t.Logf("%d requests fit, %d do not", fitting, refused)
	if fitting < 300 || refused < 300 {
		t.Error("the requests are too one-sided to prove anything")
	}
}

// What stands, with a part more or a part less: most of it is busy, and can stay.
func TestAPartMoreOrLessIsSolvedAsByBruteForce(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	fitting, refused, changed := 0, 0, 0
	gpus := []nvml.GPU{a100(), h100(), h200(), a30(), onlyApart()}
	for range 3000 {
		g := crowd(r, gpus[r.IntN(len(gpus))])
		request := map[string]int{}
		var names []string
		for _, i := range g.Instances {
			for _, d := range i.Devices {
				request[d.Profile]++
			}
			p, _ := g.Profile(i.Profile)
			for _, c := range p.Compute {
				names = append(names, c.Name+"."+p.Name)
			}
		}
		if len(names) == 0 {
			continue
		}
		for range 1 + r.IntN(2) {
			name := names[r.IntN(len(names))]
			request[name] = max(0, request[name]+1-2*r.IntN(2))
		}
		check(t, g, request, &fitting, &refused)
		if s, err := nvml.Solve(g, request); err == nil {
			changed += len(s.Change)
		}
	}
	t.Logf("%d requests fit, %d do not; %d instances are divided otherwise where they stand", fitting, refused, changed)
	if fitting < 1000 || refused < 100 || changed < 500 {
		t.Error("the requests are too one-sided to prove anything")
	}
}

func randomRequest(r *rand.Rand, g nvml.GPU) map[string]int {
	request := map[string]int{}
	for range 1 + r.IntN(3) {
		p := g.Profiles[r.IntN(len(g.Profiles))]
		name := p.Name
		if len(p.Compute) > 1 && r.IntN(2) == 0 {
			name = p.Compute[r.IntN(len(p.Compute))].Name + "." + name
		}
		request[name] += 1 + r.IntN(3)
	}
	return request
}

// check compares Solve with brute force, and proves that executing any part of the solution changes nothing about it.
func check(t *testing.T, g nvml.GPU, request map[string]int, fitting, refused *int) {
	t.Helper()
	want, fewest, possible := bruteForce(g, request)
	s, err := nvml.Solve(g, request)
	if possible != (err == nil) {
		t.Fatalf("%v on %s with %v: possible is %v, Solve says %v", request, g.Model, g.Geometry(), possible, err)
	}
	if err != nil {
		*refused++
		return
	}
	*fitting++
	if diff := gocmp.Diff(want.String(), s.Target.String()); diff != "" {
		t.Fatalf("%v on %s with %v (-brute force +Solve):\n%s", request, g.Model, describe(g), diff)
	}
	if cheapest, got := cost(g, want)[:4], costOf(g, s); !slices.Equal(cheapest, got) {
		t.Fatalf("%v on %s with %v: (busy, devices, calls, memory) %v, and %v is enough: %+v", request, g.Model, describe(g), got, cheapest, s)
	} else if got[2] > fewest {
		t.Errorf("%v on %s with %v: %d calls, and %d are enough to destroy no more that is busy: %+v", request, g.Model, describe(g), got[2], fewest, s)
	}
	if again, err := nvml.Solve(g, request); err != nil || !gocmp.Equal(s, again) {
		t.Fatalf("%v on %s: solved again it is %v, %v", request, g.Model, again, err)
	}
	calls := len(s.Destroy) + len(s.Create)
	for _, c := range s.Change {
		calls += len(c.Destroy) + len(c.Create)
	}
	for part := range 1 << min(5, calls) {
		again, err := nvml.Solve(executed(g, s, part), request)
		if err != nil || !gocmp.Equal(s.Target, again.Target) {
			t.Fatalf("%v on %s with %v: target %v becomes %v (%v) after part %b", request, g.Model, describe(g), s.Target,
				again.Target, err, part)
		}
	}
}

// executed is the GPU after those of a solution's calls whose bits are set, as far as they are possible without the others.
func executed(g nvml.GPU, s nvml.Solution, part int) nvml.GPU {
	g.Instances = slices.Clone(g.Instances)
	next := func() bool {
		bit := part&1 == 1
		part >>= 1
		return bit
	}
	for _, p := range s.Destroy {
		if next() {
			g.Instances = slices.DeleteFunc(g.Instances, func(i nvml.Instance) bool { return i.Placed == p })
		}
	}
	for _, c := range s.Change {
		at := slices.IndexFunc(g.Instances, func(i nvml.Instance) bool { return i.Placed == c.Instance })
		i := &g.Instances[at]
		i.Devices = slices.Clone(i.Devices)
		for _, p := range c.Destroy {
			if next() {
				i.Devices = slices.DeleteFunc(i.Devices, func(d nvml.Device) bool { return d.Part == p })
			}
		}
		for _, p := range c.Create {
			free := !slices.ContainsFunc(i.Devices, func(d nvml.Device) bool { return d.Part.Overlaps(p.Span) })
			if next() && free {
				i.Devices = append(i.Devices, nvml.Device{UUID: fmt.Sprintf("MIG-new-%v-%v", i.Span, p), Part: p})
			}
		}
		i.Compute = layout(g, *i)
	}
	for _, p := range s.Create {
		free := !slices.ContainsFunc(g.Instances, func(i nvml.Instance) bool { return i.Overlaps(p.Span) })
		if next() && free {
			g.Instances = append(g.Instances, instance(g, p))
		}
	}
	return g
}

// layout names the devices of an instance as nvml.Placed does, and puts them into their order.
func layout(g nvml.GPU, i nvml.Instance) string {
	slices.SortFunc(i.Devices, func(a, b nvml.Device) int {
		return cmp.Or(cmp.Compare(a.Part.Size, b.Part.Size), cmp.Compare(a.Part.Start, b.Part.Start))
	})
	p, _ := g.Profile(i.Profile)
	var names []string
	for _, d := range i.Devices {
		if d.Part.Size == p.Slices {
			return ""
		}
		names = append(names, d.Part.Name)
	}
	return strings.Join(names, "+")
}

func describe(g nvml.GPU) string {
	var out []string
	for _, i := range g.Instances {
		s := fmt.Sprintf("%s@%d", i.Profile, i.Start)
		for _, d := range i.Devices {
			s += " " + d.Part.String()
			if d.Held || len(i.ProcessesOn(d)) > 0 {
				s += "!"
			}
		}
		out = append(out, "["+s+"]")
	}
	return strings.Join(out, " ")
}

// bruteForce tries every division and every choice of places, and knows the rules only as they are written down. It also gives
// the fewest calls that destroy no more busy devices than the best does.
func bruteForce(g nvml.GPU, request map[string]int) (best nvml.Geometry, fewest int, possible bool) {
	var bestCost []int
	fewest = math.MaxInt
	busy := math.MaxInt
	for _, instances := range divisions(g, request) {
		if !enough(g, instances) {
			continue
		}
		eachPlacing(g, instances, nil, func(target nvml.Geometry) {
			target = slices.Clone(target)
			target.Sort()
			c := cost(g, target)
			switch {
			case c[0] < busy:
				busy, fewest = c[0], c[2]
			case c[0] == busy:
				fewest = min(fewest, c[2])
			}
			order := cmp.Or(slices.Compare(c, bestCost), slices.CompareFunc(target, best, nvml.ComparePlaced))
			if bestCost == nil || order < 0 {
				best, bestCost = target, c
			}
		})
	}
	return best, fewest, bestCost != nil
}

// divisions is every list of instances, as profile and layout, that makes the requested devices available.
func divisions(g nvml.GPU, request map[string]int) [][]nvml.Placed {
	out := [][]nvml.Placed{nil}
	for _, p := range g.Profiles {
		var whole []nvml.Placed
		var parts []nvml.ComputeProfile
		for range request[p.Name] {
			whole = append(whole, nvml.Placed{Profile: p.Name})
		}
		for _, c := range p.Compute {
			for range request[c.Name+"."+p.Name] {
				if c.Slices == p.Slices {
					whole = append(whole, nvml.Placed{Profile: p.Name})
				} else {
					parts = append(parts, c)
				}
			}
		}
		var next [][]nvml.Placed
		for n := range p.Max + 1 {
			for _, bins := range binnings(p, parts, make([][]nvml.ComputeProfile, n)) {
				for _, before := range out {
					next = append(next, slices.Concat(before, whole, bins))
				}
			}
		}
		out = next
	}
	return out
}

// binnings puts each part into each bin, and gives the distinct outcomes with no bin empty or overfull.
func binnings(p nvml.Profile, parts []nvml.ComputeProfile, bins [][]nvml.ComputeProfile) [][]nvml.Placed {
	distinct := map[string][]nvml.Placed{}
	var put func(i int)
	put = func(i int) {
		if i < len(parts) {
			for b := range bins {
				bins[b] = append(bins[b], parts[i])
				put(i + 1)
				bins[b] = bins[b][:len(bins[b])-1]
				if len(bins[b]) == 0 {
					break // one empty bin is as good as another
				}
			}
			return
		}
		var out []nvml.Placed
		for _, bin := range bins {
			var names []string
			used, count := 0, map[string]int{}
			for _, c := range bin {
				names, used = append(names, c.Name), used+c.Slices
				if count[c.Name]++; count[c.Name] > c.Max {
					return
				}
			}
			if used == 0 || used > p.Slices {
				return
			}
			out = append(out, nvml.Placed{Profile: p.Name, Compute: strings.Join(names, "+")})
		}
		slices.SortFunc(out, nvml.ComparePlaced)
		distinct[fmt.Sprint(out)] = out
	}
	put(0)
	return slices.Collect(maps.Values(distinct))
}

func enough(g nvml.GPU, instances []nvml.Placed) bool {
	count, slices, most := map[string]int{}, 0, 0
	var used, has nvml.Engines
	for _, p := range g.Profiles {
		most = max(most, p.Slices)
		has.Copy = max(has.Copy, p.Max*p.Engines.Copy)
		has.Decoder = max(has.Decoder, p.Max*p.Engines.Decoder)
		has.JPEG = max(has.JPEG, p.Max*p.Engines.JPEG)
		has.OFA = max(has.OFA, p.Max*p.Engines.OFA)
	}
	for _, i := range instances {
		p, _ := g.Profile(i.Profile)
		slices += p.Slices
		used.Copy += p.Engines.Copy
		used.Decoder += p.Engines.Decoder
		used.JPEG += p.Engines.JPEG
		used.OFA += p.Engines.OFA
		if count[p.Name]++; count[p.Name] > p.Max {
			return false
		}
	}
	return slices <= most && used.Copy <= has.Copy && used.Decoder <= has.Decoder && used.JPEG <= has.JPEG && used.OFA <= has.OFA
}

func eachPlacing(g nvml.GPU, instances []nvml.Placed, placed nvml.Geometry, yield func(nvml.Geometry)) {
	if len(instances) == 0 {
		yield(placed)
		return
	}
	p, _ := g.Profile(instances[0].Profile)
	for _, at := range p.Placements {
		if slices.ContainsFunc(placed, func(o nvml.Placed) bool { return o.Overlaps(at) }) {
			continue
		}
		// Equal instances are interchangeable: try them in one order only.
		if last := len(placed) - 1; last >= 0 && placed[last].Profile == p.Name &&
			placed[last].Compute == instances[0].Compute && placed[last].Start > at.Start {
			continue
		}
		eachPlacing(g, instances[1:], append(placed, nvml.Placed{Profile: p.Name, Span: at, Compute: instances[0].Compute}), yield)
	}
}

// cost is busy devices destroyed, devices destroyed, calls into the driver, memory slices destroyed; and the devices of each instance by
// which all of them share it.
func cost(g nvml.GPU, target nvml.Geometry) []int {
	c := []int{0, 0, 0, 0, 0}
	for _, p := range target {
		c[4] += len(p.Devices()) * len(p.Devices())
		if !slices.ContainsFunc(g.Instances, func(i nvml.Instance) bool { return i.Profile == p.Profile && i.Span == p.Span }) {
			c[2] += 1 + len(p.Devices())
		}
	}
	for _, i := range g.Instances {
		add := gone(i, nil)
		add[2]++
		add[3] += i.Size
		at := slices.IndexFunc(target, func(p nvml.Placed) bool { return i.Profile == p.Profile && i.Span == p.Span })
		if at >= 0 {
			add = cheapest(g, i, target[at])
		}
		for n := range add {
			c[n] += add[n]
		}
	}
	return c
}

// gone is the cost of those of the instance's devices that are no parts of the target.
func gone(i nvml.Instance, target []nvml.Part) []int {
	c := []int{0, 0, 0, 0}
	for _, d := range i.Devices {
		if slices.Contains(target, d.Part) {
			continue
		}
		if d.Held || len(i.ProcessesOn(d)) > 0 {
			c[0]++
		}
		c[1]++
		c[2]++
	}
	return c
}

// cheapest puts the parts that are wanted onto the compute slices of an instance in every way.
func cheapest(g nvml.GPU, i nvml.Instance, want nvml.Placed) []int {
	profile, _ := g.Profile(i.Profile)
	names := []string{fmt.Sprintf("%dc", profile.Slices)}
	if want.Compute != "" {
		names = strings.Split(want.Compute, "+")
	}
	var best []int
	var put func(parts []nvml.Part)
	put = func(parts []nvml.Part) {
		if len(parts) < len(names) {
			for _, c := range profile.Compute {
				for _, at := range c.Placements {
					if c.Name == names[len(parts)] && !slices.ContainsFunc(parts, func(o nvml.Part) bool { return o.Overlaps(at) }) {
						put(append(slices.Clone(parts), nvml.Part{Name: c.Name, Span: at}))
					}
				}
			}
			return
		}
		c := gone(i, parts)
		for _, p := range parts {
			if !slices.ContainsFunc(i.Devices, func(d nvml.Device) bool { return d.Part == p }) {
				c[2]++
			}
		}
		if best == nil || slices.Compare(c, best) < 0 {
			best = c
		}
	}
	put(nil)
	return best
}

// costOf is the same of the calls that a solution names.
func costOf(g nvml.GPU, s nvml.Solution) []int {
	c := []int{0, 0, 0, 0}
	for _, i := range g.Instances {
		var stay []nvml.Part
		for _, d := range i.Devices {
			stay = append(stay, d.Part)
		}
		at := slices.IndexFunc(s.Change, func(o nvml.Change) bool { return o.Instance == i.Placed })
		switch {
		case slices.Contains(s.Destroy, i.Placed):
			stay = nil
			c[2]++
			c[3] += i.Size
		case at >= 0:
			stay = slices.DeleteFunc(stay, func(p nvml.Part) bool { return slices.Contains(s.Change[at].Destroy, p) })
			c[2] += len(s.Change[at].Create)
		}
		for n, add := range gone(i, stay) {
			c[n] += add
		}
	}
	for _, p := range s.Create {
		c[2] += 1 + len(p.Devices())
	}
	return c
}

func TestWhatIsOfferedInsteadIsPossible(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	offered := 0
	for range 400 {
		g := []nvml.GPU{a100(), h100(), a30(), a30()}[r.IntN(4)]
		for i := range g.Profiles {
			if g.Model == a30().Model { // where the library counts wrongly
				g.Profiles[i].Max = 1 + r.IntN(5)
			}
		}
		_, err := nvml.Solve(g, randomRequest(r, g))
		impossible := new(nvml.Impossible)
		if !errors.As(err, &impossible) {
			continue
		}
		if len(impossible.Possible) == 0 {
			t.Errorf("%v offers nothing instead", err)
		}
		for _, s := range impossible.Possible {
			offered++
			if _, err := nvml.Solve(g, parseRequest(t, s)); err != nil {
				t.Errorf("%q is offered, but %v", s, err)
			}
		}
	}
	if offered < 100 {
		t.Errorf("only %d offers were made", offered)
	}
}

// parseRequest reads "1x 3g.40gb + 4x 1g.10gb".
func parseRequest(t *testing.T, s string) map[string]int {
	t.Helper()
	request := map[string]int{}
	for _, line := range strings.Split(s, " + ") {
		var n int
		var name string
		if _, err := fmt.Sscanf(line, "%dx %s", &n, &name); err != nil {
			t.Fatalf("reading %q: %v", line, err)
		}
		request[name] += n
	}
	return request
}

func FuzzSolve(f *testing.F) {
	f.Add(uint64(1), "3g.40gb", 2, "1g.10gb", 1)
	f.Add(uint64(2), "1c.3g.40gb", 4, "1g.10gb.me", 1)
	f.Add(uint64(3), "9g.999gb", -1, "", 0)
	f.Add(uint64(1), "1g.10gb", math.MaxInt, "1c.1g.10gb", 1)
	f.Add(uint64(5), "3g.40gb", math.MaxInt, "1c.3g.40gb", 1)
	f.Fuzz(func(t *testing.T, seed uint64, name string, n int, other string, m int) {
		r := rand.New(rand.NewPCG(seed, 0))
		solveAnything(t, crowd(r, someGPU(r)), map[string]int{name: n, other: m})
	})
}

// FuzzSolveCounts asks a GPU for what it has, in counts of any size.
func FuzzSolveCounts(f *testing.F) {
	f.Add(uint64(1), 2, 1, 0)
	f.Add(uint64(2), math.MaxInt, 1, 1)
	f.Add(uint64(3), math.MaxInt/2+1, math.MaxInt/2+1, 0)
	f.Add(uint64(4), nvml.MaxDevices, nvml.MaxDevices, nvml.MaxDevices)
	f.Fuzz(func(t *testing.T, seed uint64, first, second, third int) {
		r := rand.New(rand.NewPCG(seed, 0))
		g := someGPU(r)
		request := map[string]int{}
		for _, n := range []int{first, second, third} {
			p := g.Profiles[r.IntN(len(g.Profiles))]
			name := p.Name
			if len(p.Compute) > 0 && r.IntN(2) == 0 {
				name = p.Compute[r.IntN(len(p.Compute))].Name + "." + name
			}
			request[name] = n
		}
		solveAnything(t, crowd(r, g), request)
	})
}

func someGPU(r *rand.Rand) nvml.GPU {
	return []nvml.GPU{a100(), h100(), a30(), sixteen()}[r.IntN(4)]
}

// solveAnything demands an answer to any request at all: a reason, or a solution that has what is requested and nothing else.
func solveAnything(t *testing.T, g nvml.GPU, request map[string]int) {
	t.Helper()
	s, err := nvml.Solve(g, request)
	if err != nil {
		if err.Error() == "" {
			t.Error("an empty reason")
		}
		return
	}
	for i, p := range s.Target {
		if i > 0 && s.Target[i-1].End() > p.Start {
			t.Errorf("%v stands on %v", p, s.Target[i-1])
		}
	}
	var devices, wanted int
	for _, p := range s.Target {
		devices += len(p.Devices())
	}
	for name, n := range request {
		if n > nvml.MaxDevices {
			t.Errorf("%d of %s are granted", n, name)
		}
		wanted += n
	}
	if devices != wanted {
		t.Errorf("%v has %d devices, want %d", s.Target, devices, wanted)
	}
	if got := len(s.Keep) + len(s.Change) + len(s.Destroy); got != len(g.Instances) {
		t.Errorf("%d instances are kept, changed or destroyed, of %d", got, len(g.Instances))
	}
	if got := len(s.Keep) + len(s.Change) + len(s.Create); got != len(s.Target) {
		t.Errorf("%d instances are kept, changed or created, of %d", got, len(s.Target))
	}
}

func BenchmarkSolve(b *testing.B) {
	for _, c := range []struct {
		name    string
		gpu     nvml.GPU
		request map[string]int
	}{
		{"balanced on a full H100", stand(h100(), "3g.40gb@0!", "1g.10gb@4", "1g.10gb@5", "1g.10gb@6"), map[string]int{"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}},
		{"impossible on an A100", a100(), map[string]int{"3g.40gb": 2, "1g.10gb": 1}},
		{"eight kinds on sixteen slices", sixteen(), map[string]int{
			"1g.6gb": 2, "1g.6gb+me": 2, "1g.6gb-me": 2, "1g.6gb+gfx": 2, "1g.12gb": 1, "2g.12gb": 1, "3g.24gb": 1,
		}},
		{"four kinds of one slice on sixteen", sixteen(), map[string]int{"1g.6gb": 4, "1g.6gb+me": 4, "1g.6gb-me": 4, "1g.6gb+gfx": 4}},
		{"six kinds on a crowded sixteen", stand(sixteen(), "1g.6gb+gfx@2", "2g.12gb@3!", "3g.24gb(1c+2c)@8", "1g.6gb-me@15!"), map[string]int{
			"1g.6gb": 3, "1g.6gb+gfx": 3, "1g.6gb+me": 3, "1g.6gb-me": 3, "2g.12gb": 1, "1g.12gb": 1,
		}},
		{"parts on sixteen slices", sixteen(), map[string]int{"1c.4g.24gb": 7, "2c.4g.24gb": 3}},
		{"parts beside four kinds on sixteen", sixteen(), map[string]int{
			"1c.2g.12gb": 2, "1g.6gb": 7, "1g.6gb+gfx": 1, "1g.6gb+me": 2, "1g.6gb-me": 4,
		}},
		{"four kinds on sixteen, impossible", sixteen(), map[string]int{"1g.6gb": 9, "1g.6gb+me": 4, "2g.12gb": 4, "3g.24gb": 1}},
		{"ten kinds on sixteen, impossible", sixteen(), map[string]int{
			"1g.6gb": 2, "1g.6gb+me": 2, "1g.6gb-me": 2, "1g.6gb+gfx": 2, "1g.12gb": 2, "2g.12gb": 2, "3g.24gb": 1, "4g.24gb": 1,
			"8g.48gb": 1, "16g.96gb": 1,
		}},
		{"far too many of ten kinds on sixteen, impossible", sixteen(), map[string]int{
			"1g.6gb": 99, "1g.6gb+me": 99, "1g.6gb-me": 99, "1g.6gb+gfx": 99, "1g.12gb": 99, "2g.12gb": 99, "3g.24gb": 99,
			"4g.24gb": 99, "8g.48gb": 99, "16g.96gb": 99,
		}},
		{"parts and kinds on sixteen, impossible", sixteen(), map[string]int{
			"1c.2g.12gb": 5, "1c.3g.24gb": 3, "1g.6gb": 5, "1g.6gb+gfx": 3, "1g.6gb+me": 4, "1g.6gb-me": 11, "2g.12gb": 2, "4g.24gb": 1,
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				_, _ = nvml.Solve(c.gpu, c.request) // an impossible request is as good a subject
			}
		})
	}
}
