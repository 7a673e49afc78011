package node

import "context"

// StartKubelet starts a stopped kubelet again, as `systemctl start kubelet` does, and changes nothing else of the node.
func (n *Node) StartKubelet(ctx context.Context) error { return n.startKubelet(ctx) }
