#!/bin/sh
# Tries gpuslice on the GPUs of this machine, changes nothing of them, and prints a table; with --simulated, on simulated GPUs.
# With --cut --confirm=UUID it cuts that GPU, and restores it; it keeps what it found in /var/lib/gpuslice-hardware, and writes ./gpuslice-latency.yaml.
# Exits 0 if all is as it should be, 1 if not. Fetches nothing. Without --cut it writes below $TMPDIR alone.
set -eu
export PATH="${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}" # a shell that is given none keeps its own to itself
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/bin/hardware" --bundle "$here" "$@"
