package main

import (
	"bytes"
	"strings"
	"testing"
)

// runs runs the command, and returns what it prints.
func runs(t *testing.T, stdin string, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	c := command()
	c.SetIn(strings.NewReader(stdin))
	c.SetOut(&out)
	c.SetArgs(args)
	err := c.ExecuteContext(t.Context())
	return out.String(), err
}

// prints is what the command says, and its error.
func prints(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	said, err := runs(t, stdin, args...)
	if err != nil {
		said += "error: " + err.Error() + "\n"
	}
	return said
}
