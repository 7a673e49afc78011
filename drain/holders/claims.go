package holders

import (
	"k8s.io/apimachinery/pkg/types"
)

// Claims are resource claims by namespace and name, those that could be read.
type Claims map[types.NamespacedName]Claim

// Claim is what is kept of a resource claim.
type Claim struct {
	Allocated bool
	Devices   []ClaimedDevice // those that the scheduler has allocated to it
	Pods      []types.UID     // those for which it is reserved
	Others    bool            // it is reserved for more than pods, so that Pods does not say who uses it
}

// ClaimedDevice is a device that is allocated to a claim. Several claims may have shares of one.
type ClaimedDevice struct {
	Device
	// Admin says that the claim has it by admin access, as for metrics: it then takes the device from no other claim.
	Admin bool
}

// Device names a device of a DRA driver as Kubernetes does. Its name says nothing of the hardware: minor numbers change with a reboot.
type Device struct{ Driver, Pool, Name string }

// Claimed is what GPUPods knows of resource claims, beside what kubelet says.
type Claimed struct {
	Claims Claims
	UUIDs  map[Device]string // of the GPUs and MIG devices that DRA drivers offer; see UUIDs
}
