package journal_test

import (
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/state/journal"
)

var update = flag.Bool("update", false, "rewrite testdata/format.txt")

// An agent refuses a field that it does not know, as no agent's: after a roll back each node would say so, and change nothing. So once a release has written a
// format, a field more takes another version of it, which an older agent knows to be a newer one's.
func TestTheFieldsOfAFormatGoWithItsVersion(t *testing.T) {
	t.Parallel()
	var got strings.Builder
	fmt.Fprintf(&got, "record, version %d\n", journal.Version)
	fields(&got, "", reflect.TypeFor[journal.Record]())
	got.WriteString("journal, version 1\n")
	fields(&got, "", reflect.TypeFor[journal.Journal]())
	const golden = "testdata/format.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(got.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("raise the version if a release has the former one, read that as well, and run this with -update (-former +now):\n%s", diff)
	}
}

// fields writes the names of a type's fields as they are in JSON, each below that of its struct.
func fields(to *strings.Builder, indent string, of reflect.Type) {
	for of.Kind() == reflect.Slice || of.Kind() == reflect.Pointer || of.Kind() == reflect.Map {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct || of.PkgPath() == "time" || strings.HasPrefix(of.PkgPath(), "k8s.io/") {
		return
	}
	for field := range of.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name == "" && field.Anonymous {
			fields(to, indent, field.Type)
			continue
		}
		fmt.Fprintf(to, "%s  %s\n", indent, name)
		fields(to, indent+"  ", field.Type)
	}
}
