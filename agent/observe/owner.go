package observe

import (
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
)

// driverPatience is how long NVIDIA's DRA driver may take until it advertises GPUs: it needs seconds, and half a minute after a restart of kubelet.
const driverPatience = time.Minute

// Ownership finds who advertises the node's GPUs.
type Ownership struct {
	Clock *monotonic.Clock

	starting time.Time // since when NVIDIA's DRA driver is on the node and advertises nothing; zero otherwise
}

// Forget begins the wait for the driver again.
func (o *Ownership) Forget(time.Time) { o.starting = time.Time{} }

// Observe sets the owner from the rest of the observation.
func (o *Ownership) Observe(seen *state.Observed) {
	seen.Owner = offer.OwnerOf(seen)
	if seen.Owner.Kind != api.OwnerDRAStarting {
		o.starting = time.Time{}
		return
	}
	if o.starting.IsZero() {
		o.starting = o.Clock.Now()
	}
	seen.Owner.Since, seen.Owner.Left = o.starting, driverPatience-o.Clock.Since(o.starting)
}
