package gpusim

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
)

// tallyFile is in the directory of each node, next to the state: to count a read there would write all of it.
const tallyFile = "reads"

// maxFunctions is how many functions the file has room for.
const maxFunctions = 128

// tally counts the calls of functions that change nothing, of all processes, in the order of functions.
type tally [maxFunctions]uint64

func openTally(dir string) (_ *tally, err error) {
	if len(functions) > maxFunctions {
		return nil, fmt.Errorf("%s has room for %d functions, and there are %d", tallyFile, maxFunctions, len(functions))
	}
	f, err := os.OpenFile(filepath.Join(dir, tallyFile), os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }() // the mapping stays
	if err := f.Truncate(maxFunctions * wordSize); err != nil {
		return nil, err
	}
	at, err := mapFile(f, maxFunctions*wordSize)
	return (*tally)(at), err
}

func (t *tally) add(function string) {
	if at := slices.Index(functions, function); at >= 0 {
		atomic.AddUint64(&t[at], 1)
	}
}

func (t *tally) forget() {
	for at := range t {
		atomic.StoreUint64(&t[at], 0)
	}
}

// counts are those that are not 0.
func (t *tally) counts() map[string]int {
	out := map[string]int{}
	for at, function := range functions {
		if n := atomic.LoadUint64(&t[at]); n > 0 {
			out[function] = int(n)
		}
	}
	return out
}
