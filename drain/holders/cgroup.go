package holders

import (
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// Owner names the pod, container or unit that a process belongs to. A process of a container has no Unit, even if the container is a
// unit's; a process that is started outside of both has neither.
type Owner struct {
	PodUID    types.UID // of a static pod this is the hash of its manifest, which the API server shows as an annotation
	Container string    // the container runtime's id, 64 digits
	Unit      string    // the unit of the host's systemd: nvidia-persistenced.service, session-3.scope
}

// ofSamePod reports whether both are of one pod, as far as that shows without the pods. The agent's own pod has no UID if the
// agent sees cgroups from its own namespace of them, and it has only one container.
func (o Owner) ofSamePod(as Owner) bool {
	if o.PodUID != "" && as.PodUID != "" {
		return o.PodUID == as.PodUID
	}
	return o.Container != "" && o.Container == as.Container
}

var (
	// A pod's cgroup by kubelet's systemd driver: kubepods.slice, kubepods-burstable.slice or kubepods-besteffort.slice
	// above it is repeated in its name, and a prefix where kubelet's cgroupRoot sets one, as kind does. The dashes of the
	// UID are underscores there.
	podSlice = regexp.MustCompile(`^(?:.+-)?kubepods(?:-burstable|-besteffort)?-pod([^-:]+)\.slice(?::|$)`)
	// A pod's cgroup by kubelet's cgroupfs driver, if its name alone shows that: a UID, or a static pod's hash. This is
	// needed in a cgroup namespace, where nothing above it is seen. "podman" is no pod.
	podFolder = regexp.MustCompile(`^pod([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})$`)
	// A container's cgroup, by whichever runtime: <id>, cri-containerd-<id>.scope, crio-<id>.scope, docker-<id>.scope,
	// libpod-<id>.scope; <slice>:cri-containerd:<id> where kubelet and containerd do not agree on the driver.
	containerID = regexp.MustCompile(`(?:^|[-:])([0-9a-f]{64})(?:\.scope)?$`)
	// The kinds of units that can have processes of their own.
	unitName = regexp.MustCompile(`\.(?:service|scope|socket|mount|swap)$`)
)

// ParseCgroup reads the owner of a process from the text of /proc/PID/cgroup. It reads cgroup v1, v2 and both at
// once, and ignores lines in other forms. Of containers in containers the outer one counts, which kubelet knows.
//
// The paths may be relative to a cgroup namespace of the reader's own. Then a process in the reader's own pod, and
// outside of its container, has no PodUID.
func ParseCgroup(text string) Owner {
	var out Owner
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3) // hierarchy, controllers, path
		if len(fields) < 3 {
			continue
		}
		// With v1, the process has no own cgroup in some hierarchies: next to a pod's line there may be one with containerd's unit, and next to a
		// unit's line one without any.
		if of := pathOwner(fields[2]); of.known() > out.known() {
			out = of
		}
	}
	return out
}

// known orders owners by how many of their fields are known.
func (o Owner) known() int {
	switch {
	case o.PodUID != "" && o.Container != "":
		return 4
	case o.PodUID != "":
		return 3
	case o.Container != "":
		return 2
	case o.Unit != "":
		return 1
	default:
		return 0
	}
}

func pathOwner(path string) Owner {
	// The kernel appends this when the cgroup was removed below a process that is about to end.
	parts := strings.Split(strings.TrimSuffix(path, " (deleted)"), "/")
	var o Owner
	for i, part := range parts {
		if uid := podUID(parts[:i], part); uid != "" {
			o.PodUID = uid
			parts = parts[i:]
			break
		}
	}
	for _, part := range parts {
		if m := containerID.FindStringSubmatch(part); m != nil {
			o.Container = m[1]
			break
		}
	}
	if o.PodUID == "" && o.Container == "" {
		o.Unit = hostUnit(parts)
	}
	return o
}

// podUID returns the UID in the name of a part of a path, if it is a pod's cgroup. above has the parts before it.
func podUID(above []string, part string) types.UID {
	if m := podSlice.FindStringSubmatch(part); m != nil {
		return types.UID(strings.ReplaceAll(m[1], "_", "-"))
	}
	if m := podFolder.FindStringSubmatch(part); m != nil {
		return types.UID(m[1])
	}
	// A static pod's manifest may set any UID.
	if len(above) > 0 && slices.Contains([]string{"kubepods", "burstable", "besteffort"}, above[len(above)-1]) {
		uid, _ := strings.CutPrefix(part, "pod")
		if uid != part {
			return types.UID(uid)
		}
	}
	return ""
}

// hostUnit returns the unit as systemd itself defines it: the first part below the slices. Units below a unit are not the host's: those of a user's
// own systemd below user@1000.service, or of a container below docker.service.
func hostUnit(parts []string) string {
	for _, part := range parts {
		if part == "" || part == ".." || strings.HasSuffix(part, ".slice") {
			continue
		}
		if !unitName.MatchString(part) {
			return ""
		}
		return strings.TrimPrefix(part, "_") // which systemd puts before names that the kernel might take for its own
	}
	return ""
}
