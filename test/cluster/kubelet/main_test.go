package kubelet_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

func TestMain(m *testing.M) { clustertest.Main(m) }
