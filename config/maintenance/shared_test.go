package maintenance_test

import (
	"testing"

	"k8s.io/apimachinery/pkg/labels"
)

func parsed(t *testing.T, text string) labels.Selector {
	t.Helper()
	selector, err := labels.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return selector
}

const profilesHead = "apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\n"
