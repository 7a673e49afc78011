package kubelet

import (
	"context"
	"time"
)

// FollowDrivers does at once what kubelet does each second, and returns when the deletions that have begun are done.
func (k *Kubelet) FollowDrivers(ctx context.Context) {
	k.drivers.scan(ctx)
	k.drivers.wipe(ctx)
	for k.drivers.wiping() && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (t *driverTable) wiping() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, a := range t.absent {
		if a.wiping {
			return true
		}
	}
	return false
}

// Connected reports whether a connection to a driver of the name stands.
func (k *Kubelet) Connected(name string) bool {
	t := k.drivers
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, d := range t.sockets {
		if d.name == name && d.connected {
			return true
		}
	}
	return false
}
