// Package karpenter pins Karpenter with its simulated cloud, kwok: its manager runs beside an API server of the tests, which gets Karpenter's
// definitions of its kinds. It is a separate module so that Karpenter's requirements never decide the versions that gpuslice is built with.
package karpenter

import _ "sigs.k8s.io/karpenter/pkg/apis/v1" // so that go mod tidy keeps the module
