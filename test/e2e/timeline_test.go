package e2e_test

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/test/cluster/realkubelet"
	"github.com/gpuslice/gpuslice/test/cluster/timeline"
)

var update = flag.Bool("update", false, "write what the real kubelet does to the files that it is compared with")

// The stand-in kubelet goes through the same script in its own package.
func TestTheTimeLineOfDevicePluginsIsThatOfTheRealKubelet(t *testing.T) {
	r := newRig(t, "gpus: [{model: H100-80GB, count: 1}]")
	got, err := timeline.Run(t.Context(), timeline.Subject{
		View: r.View, PluginDir: realkubelet.DevicePluginDir, Image: "localhost/pause:1", Restart: r.Restart, Reboot: r.Reboot, Kill: r.kill,
	})
	if err != nil {
		t.Fatalf("%v; until then:\n%s", err, got)
	}
	compare(t, "../cluster/timeline/golden.txt", got)
}

// So does the script of claims.
func TestTheTimeLineOfClaimsIsThatOfTheRealKubelet(t *testing.T) {
	r := newRig(t, "gpus: [{model: H100-80GB, count: 1}]")
	got, err := timeline.RunClaims(t.Context(), timeline.ClaimSubject{
		View: r.View, KubeletDir: filepath.Dir(realkubelet.DevicePluginDir), Image: "localhost/pause:1", Restart: r.Restart,
		Pass: func(ctx context.Context, d time.Duration) error {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(d): // kubelet has the machine's clock
				return nil
			}
		},
	})
	if err != nil {
		t.Fatalf("%v; until then:\n%s", err, got)
	}
	compare(t, "../cluster/timeline/claims.txt", got)
}

// compare holds what was seen to what is on record.
func compare(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; -update writes it):\n%s", file, diff)
	}
}
