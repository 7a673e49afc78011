#!/bin/sh
# Tries gpuslice on the GPUs of this machine, changes nothing of them, and prints a table; with --simulated, on simulated GPUs.
# Exits 0 if all is as it should be, 1 if not. Fetches nothing, and writes below $TMPDIR alone.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/bin/hardware" --bundle "$here" "$@"
