package kubelet_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

func TestMain(m *testing.M) {
	if runsAsProgram() {
		program()
		return
	}
	clustertest.Main(m)
}
