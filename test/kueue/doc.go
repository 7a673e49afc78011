// Package kueue pins Kueue. An API server of the tests gets Kueue's definitions of its kinds, and its manager runs beside it; go.mod names that
// as a tool. It is a separate module so that Kueue's requirements never decide the versions that gpuslice is built with.
package kueue

import _ "sigs.k8s.io/kueue/apis/kueue/v1beta2" // so that go mod tidy keeps the module
