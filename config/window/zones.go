package window

import (
	_ "embed"
	"strings"
)

//go:embed zones.txt
var zones string

// Zones lists the names of the IANA time zone database, sorted. Package time finds zones by their names, and does not list them. There may be newer
// ones.
func Zones() []string { return strings.Fields(zones) }
