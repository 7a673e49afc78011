package catalog

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

const attribute = `[a-zA-Z](?:[a-zA-Z0-9.]*[a-zA-Z0-9])?`

// deviceForm is how NVIDIA writes MIG devices: "1g.10gb", "1g.10gb+me", "1g.24gb-me", "1g.24gb+me.all", and
// "1c.3g.40gb" for a compute instance of one slice in a GPU instance of three.
var deviceForm = regexp.MustCompile(`^(?:([1-9])c\.)?([1-9])(g\.[1-9][0-9]{0,5}gb)((?:[+-]` + attribute + `(?:,` + attribute + `)*)?)$`)

var errNotDevice = errors.New(`is not a MIG device: they look like "1g.10gb", "1g.10gb+me", "1c.3g.40gb"`)

// DeviceName returns the name of a MIG device as the hardware reports it: without a compute instance that fills its GPU instance. The error is a
// predicate that follows a wrong name.
func DeviceName(name string) (string, error) {
	m := deviceForm.FindStringSubmatch(name)
	if m == nil {
		return "", errNotDevice
	}
	compute, of, rest := m[1], m[2], m[3]+m[4]
	if attributes := strings.Split(strings.TrimLeft(m[4], "+-"), ","); len(slices.Compact(slices.Sorted(slices.Values(attributes)))) < len(attributes) {
		return "", errNotDevice
	}
	switch {
	case compute == "" || compute == of:
		return of + rest, nil
	case compute > of:
		return "", fmt.Errorf("cannot be: a GPU instance of %s slices has no room for a compute instance of %s", of, compute)
	default:
		return name, nil
	}
}
