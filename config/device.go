package config

import (
	"errors"
	"fmt"
	"regexp"
)

// deviceForm is how NVIDIA writes MIG devices: "1g.10gb", "1g.10gb+me", "1g.24gb-me", "1g.24gb+me.all", and
// "1c.3g.40gb" for a compute instance of one slice in a GPU instance of three.
var deviceForm = regexp.MustCompile(`^(?:([1-9])c\.)?([1-9])(g\.[1-9][0-9]*gb(?:[+-][a-zA-Z][a-zA-Z0-9.,]*)?)$`)

var errNotDevice = errors.New(`is no name of a MIG device: they look like "1g.10gb", "1g.10gb+me", "1c.3g.40gb"`)

// DeviceName brings the name of a MIG device to the form in which the hardware reports it: a compute instance that fills
// its GPU instance is not mentioned. The error says what is wrong about a name that is none, to be read behind the name.
func DeviceName(name string) (string, error) {
	m := deviceForm.FindStringSubmatch(name)
	if m == nil {
		return "", errNotDevice
	}
	compute, slices, rest := m[1], m[2], m[3]
	switch {
	case compute == "" || compute == slices:
		return slices + rest, nil
	case compute > slices:
		return "", fmt.Errorf("cannot be: a GPU instance of %s slices has no room for a compute instance of %s", slices, compute)
	default:
		return name, nil
	}
}
