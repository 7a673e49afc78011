// Command parameters reads the parameters of a claim's config on stdin, as JSON, like NVIDIA's DRA driver for GPUs v0.5.0 does with the gates of its
// sharing on. It fails with the driver's error if the driver would refuse them.
package main

import (
	"fmt"
	"io"
	"os"

	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/dra-driver-nvidia-gpu/api/nvidia.com/resource/v1beta1"
	"sigs.k8s.io/dra-driver-nvidia-gpu/pkg/featuregates"
)

func main() {
	if err := read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// read goes the way of the driver when kubelet has it prepare a claim.
func read(in io.Reader) error {
	gates := map[string]bool{string(featuregates.TimeSlicingSettings): true, string(featuregates.MPSSupport): true}
	if err := featuregates.FeatureGates().SetFromMap(gates); err != nil {
		return err
	}
	text, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	object, err := runtime.Decode(v1beta1.StrictDecoder, text)
	if err != nil {
		return err
	}
	config, is := object.(v1beta1.Interface)
	if !is {
		return fmt.Errorf("a %T is no config of a device", object)
	}
	if err := config.Normalize(); err != nil {
		return err
	}
	return config.Validate()
}
