package cluster

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

func TestAKubeconfigThatIsNotThereIsNamed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config")
	t.Setenv("KUBECONFIG", file)
	var o Options
	o.bind(pflag.NewFlagSet("", pflag.ContinueOnError))
	if _, err := o.Client(); err == nil || !strings.Contains(err.Error(), "KUBECONFIG names "+file+", which is not there") {
		t.Errorf("error is %v", err)
	}
}
