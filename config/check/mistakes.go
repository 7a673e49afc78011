package check

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// InvalidError is one value that is not allowed, with its place and the allowed values.
type InvalidError struct {
	Config  string // name of the MIG config; empty outside of a catalog
	Profile string // name of the profile, in place of Config
	Rule    int    // number of the rule in the config, or of the entry in the profile, from 1; 0 for all of it
	Field   string // in the file's spelling: "devices", "timeouts.drain"
	Value   string // in the file's spelling; empty if there is none
	Want    string // the predicate of the message, which says what is allowed: "is not a GPU of this node: they are 0 to 7"

	PassedOver bool // NVIDIA's device plugin ignores it, and runs by the rest of its config
}

// PassedOver reports whether NVIDIA's device plugin ignores all mistakes of its config that err joins. The plugin then runs by the rest.
func PassedOver(err error) bool {
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		all := several.Unwrap()
		return len(all) > 0 && !slices.ContainsFunc(all, func(err error) bool { return !PassedOver(err) })
	}
	invalid, ok := errors.AsType[*InvalidError](err)
	return ok && invalid.PassedOver
}

// maxMistakes bounds the mistakes that an error lists. A user who has fixed a hundred checks the file again.
const maxMistakes = 100

// AddMistake adds a mistake of a file to those found so far. Beyond a hundred it only counts them, in the last error: "and 2900 more".
func AddMistake(found []error, err error) []error {
	further := moreMistakesError(1)
	if more, ok := err.(moreMistakesError); ok { //nolint:errorlint // it is never wrapped
		further = more
	}
	if len(found) == 0 {
		return []error{err}
	}
	last := len(found) - 1
	if more, ok := found[last].(moreMistakesError); ok { //nolint:errorlint // it is never wrapped
		found[last] = more + further
		return found
	}
	if len(found) >= maxMistakes {
		err = further
	}
	return append(found, err)
}

// moreMistakesError counts the mistakes that the error does not list.
type moreMistakesError int

func (n moreMistakesError) Error() string { return fmt.Sprintf("and %d more", int(n)) }

// The longest text of a file that a message quotes, and the longest Want, in bytes. Allowed names and values are shorter.
const (
	maxQuoted = 256
	maxWant   = 1024
)

// shorten cuts a text that is too long to be read in a message.
func shorten(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// Error names the place, the value and what is allowed. It shortens long texts.
func (e *InvalidError) Error() string {
	var at []string
	if e.Config != "" {
		at = append(at, fmt.Sprintf("config %q", shorten(e.Config, maxQuoted)))
	}
	rule := "rule"
	if e.Profile != "" {
		at, rule = append(at, fmt.Sprintf("profile %q", shorten(e.Profile, maxQuoted))), "mig entry"
	}
	if e.Rule > 0 {
		at = append(at, fmt.Sprintf("%s %d", rule, e.Rule))
	}
	if e.Field != "" {
		at = append(at, shorten(e.Field, maxQuoted))
	}
	place := strings.Join(at, ", ")
	if e.Value == "" {
		return fmt.Sprintf("%s: %s", place, shorten(e.Want, maxWant))
	}
	return fmt.Sprintf("%s: %s %s", place, shorten(e.Value, maxQuoted), shorten(e.Want, maxWant))
}
