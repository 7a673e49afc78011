package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/google/uuid"

	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Kernel asks the host's kernel by its procfs. It must not be copied after use.
type Kernel struct {
	Proc string // mount point of procfs of the host's PID namespace; /proc if empty
	lane aside.Lane
}

// errNoBoot means that the kernel's file of its boot id has no boot id: another file is mounted there.
var errNoBoot = errors.New("it has no boot id, which is a UUID")

// Boot gives the id that the host's kernel has given itself when it started, proc(5)'s /proc/sys/kernel/random/boot_id: after a reboot it
// is another one. The node's status has it too, but any program with the right to write the status may change it there.
func (k *Kernel) Boot(ctx context.Context) (string, error) {
	path := filepath.Join(cmp.Or(k.Proc, "/proc"), "sys", "kernel", "random", "boot_id")
	const longest = 64 // a UUID has 36, and its line an end
	text, err := aside.ReadFile(ctx, &k.lane, path, longest)
	if err != nil {
		return "", fmt.Errorf("reading which boot of the host this is: %w", err)
	}
	boot := strings.TrimSuffix(string(text), "\n")
	if len(boot) != len(uuid.Nil.String()) || uuid.Validate(boot) != nil {
		return "", fmt.Errorf("reading which boot of the host this is: reading %s: %w", path, errNoBoot)
	}
	return boot, nil
}
