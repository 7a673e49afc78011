// Package krew pins krew and its check of manifests, which the tests of a release run. It is a module of its own so that what they require
// never decides the versions that gpuslice is built with.
package krew
