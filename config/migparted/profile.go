package migparted

import (
	"fmt"
	"regexp"
)

// profileForm is how NVIDIA writes MIG devices: "1g.10gb", "1g.10gb+me", "1g.24gb-me", "1g.24gb+me.all", and
// "1c.3g.40gb" for a compute instance of one slice in a GPU instance of three.
var profileForm = regexp.MustCompile(`^(?:([1-9])c\.)?([1-9])(g\.[1-9][0-9]*gb(?:[+-][a-zA-Z][a-zA-Z0-9.,]*)?)$`)

// profile brings the name of a MIG device to the form in which the hardware reports it: a compute instance that fills
// its GPU instance is not mentioned. If the name is none, problem says why.
func profile(name string) (canonical, problem string) {
	m := profileForm.FindStringSubmatch(name)
	if m == nil {
		return "", `is no name of a MIG device: they look like "1g.10gb", "1g.10gb+me", "1c.3g.40gb"`
	}
	compute, slices, rest := m[1], m[2], m[3]
	switch {
	case compute == "" || compute == slices:
		return slices + rest, ""
	case compute > slices:
		return "", fmt.Sprintf("cannot be: a GPU instance of %s slices has no room for a compute instance of %s", slices, compute)
	default:
		return name, ""
	}
}
