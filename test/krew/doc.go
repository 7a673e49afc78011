// Package krew pins krew and its check of manifests, which the tests of a release run. It is a separate module so that their requirements
// never decide the versions that gpuslice is built with.
package krew
