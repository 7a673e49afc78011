package incumbent_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
)

func TestMain(m *testing.M) { gpusimtest.Main(m) }
