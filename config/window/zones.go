package window

import (
	_ "embed"
	"strings"
)

//go:embed zones.txt
var zones string

// Zones are the names of the IANA time zone database, sorted. package time knows the zones by their names only, and does not
// list them. There may be newer ones.
func Zones() []string { return strings.Fields(zones) }
