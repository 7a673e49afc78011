// Package kueue pins Kueue, whose definitions of its kinds an API server of the tests is given. It is a module of its own so that what
// Kueue requires never decides the versions that gpuslice is built with.
package kueue

import _ "sigs.k8s.io/kueue/apis/kueue/v1beta2" // so that go mod tidy keeps the module
