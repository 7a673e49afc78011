package nvml_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// driverOf simulates one GPU with MIG mode on.
func driverOf(t *testing.T, model string) (nvml.Driver, *gpusim.Node) {
	t.Helper()
	n, err := gpusim.Create(t.TempDir(), gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: model, MIG: true}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n.Driver(), n
}

func observe(t *testing.T, d nvml.Driver) nvml.GPU {
	t.Helper()
	gpus, err := d.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return gpus[0]
}

func TestAsManyAsTheHardwareSaysFitOfEachProfile(t *testing.T) {
	for _, model := range gpusim.ModelsWithMIG() {
		t.Run(model, func(t *testing.T) {
			d, _ := driverOf(t, model)
			g := observe(t, d)
			for _, p := range g.Profiles {
				if _, err := nvml.Solve(g, map[string]int{p.Name: p.Max}); err != nil {
					t.Errorf("%d of %s: %v", p.Max, p.Name, err)
				}
			}
		})
	}
}

// Each solution is carried out on simulated GPUs, which refuse what hardware refuses, and the next request finds what it left.
func TestSolutionsCanBeCarriedOutOnEveryModel(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for _, model := range gpusim.ModelsWithMIG() {
		t.Run(model, func(t *testing.T) {
			d, n := driverOf(t, model)
			done, kept, changed := 0, 0, 0
			for range 100 {
				g := observe(t, d)
				s, err := nvml.Solve(g, randomRequest(r, g))
				if impossible := new(nvml.Impossible); errors.As(err, &impossible) {
					continue
				}
				if err := carryOut(t.Context(), d, g.UUID, s); err != nil {
					t.Fatalf("on the way from %v to %v: %v\n%v", g.Geometry(), s.Target, err, n)
				}
				if diff := gocmp.Diff(s.Target.String(), observe(t, d).Geometry().String()); diff != "" {
					t.Fatalf("from %v (-target +got):\n%s", g.Geometry(), diff)
				}
				done, kept, changed = done+1, kept+len(s.Keep), changed+len(s.Change)
			}
			t.Logf("%d changes, %d instances kept, %d divided otherwise", done, kept, changed)
			if done < 10 {
				t.Errorf("only %d requests could be had", done)
			}
		})
	}
}

func carryOut(ctx context.Context, d nvml.Driver, gpu nvml.UUID, s nvml.Solution) error {
	for _, p := range s.Destroy {
		if err := d.Destroy(ctx, gpu, p); err != nil {
			return err
		}
	}
	for _, c := range s.Change {
		for _, p := range c.Destroy {
			if err := d.DestroyPart(ctx, gpu, c.Instance, p); err != nil {
				return err
			}
		}
		for _, p := range c.Create {
			if err := d.CreatePart(ctx, gpu, c.Instance, p); err != nil {
				return err
			}
		}
	}
	for _, p := range s.Create {
		if err := d.Create(ctx, gpu, p); err != nil {
			return err
		}
	}
	return nil
}
