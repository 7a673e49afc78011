package node

import "context"

// StartKubelet brings back a kubelet that was stopped, on the node as it was left: what `systemctl start kubelet` does.
func (n *Node) StartKubelet(ctx context.Context) error { return n.startKubelet(ctx) }
