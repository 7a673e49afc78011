#!/bin/sh
# A Kubernetes cluster with simulated GPUs and gpuslice on it, for as long as the shell that it opens. Needs Linux on amd64 with glibc 2.34 or newer, and a
# user who may make namespaces; no root, no network, no GPU. Writes below $TMPDIR alone, and removes that at the end.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/bin/playground" --bundle "$here" "$@"
