package watch_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/observe/watch"
)

const twoPods = `{"kind":"PodList","metadata":{"resourceVersion":"7"},"other":{"a":[1]},"items":[
  {"metadata":{"name":"a","namespace":"x","uid":"1","resourceVersion":"3","annotations":{"b":"c"}},"spec":{"nodeName":"gpu-1"}},
  {"metadata":{"name":"b","namespace":"y","uid":"2","resourceVersion":"4"}}
]}`

func TestOfAListTheNamesAreKept(t *testing.T) {
	got, err := watch.ReadNames(strings.NewReader(twoPods))
	if err != nil {
		t.Fatal(err)
	}
	want := &metav1.PartialObjectMetadataList{ListMeta: metav1.ListMeta{ResourceVersion: "7"}, Items: []metav1.PartialObjectMetadata{
		{ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "x", UID: "1", ResourceVersion: "3"}},
		{ObjectMeta: metav1.ObjectMeta{Name: "b", Namespace: "y", UID: "2", ResourceVersion: "4"}},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got, err := watch.ReadNames(strings.NewReader(`{"metadata":{"resourceVersion":"8"},"items":null}`)); err != nil || len(got.Items) != 0 || got.ResourceVersion != "8" {
		t.Errorf("of an empty list: %v, %v", got, err)
	}
}

// If a part of a list were missing, the watch would take objects for deleted.
func TestAListThatEndsTooEarlyIsNone(t *testing.T) {
	for end := range twoPods {
		if got, err := watch.ReadNames(strings.NewReader(twoPods[:end])); err == nil {
			t.Fatalf("of %q: %v", twoPods[:end], got)
		}
	}
	for _, other := range []string{"[]", `"items"`, `{"items":{}}`, `{"items":[7]}`, `{"metadata":[]}`} {
		if got, err := watch.ReadNames(strings.NewReader(other)); err == nil {
			t.Errorf("of %q: %v", other, got)
		}
	}
}
