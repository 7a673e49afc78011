package kubelet

import (
	"context"

	"google.golang.org/grpc/connectivity"
)

// FollowDrivers does at once what kubelet does each second, and reports whether it is connected to all drivers of the names.
func (k *Kubelet) FollowDrivers(ctx context.Context, names ...string) bool {
	k.drivers.scan(ctx)
	k.drivers.wipe(ctx)
	for _, name := range names {
		if conn, err := k.drivers.registered(ctx, name); err != nil || conn.GetState() != connectivity.Ready {
			return false
		}
	}
	return true
}
