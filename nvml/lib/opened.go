package lib

import (
	"sync"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// opened is the library while anyone has it open: the driver's session, and who reads health beside it. The last one shuts it down,
// as a driver that was loaded anew is only found by a library that was shut down before.
type opened struct {
	mu    sync.Mutex
	lib   nv.Interface
	users int
	gone  chan struct{} // closed when nobody has it open any more
}

// open initialises the library, unless somebody has it open still.
func (o *opened) open(path string) (nv.Interface, error) {
	if lib, ok := o.join(); ok {
		return lib, nil
	}
	// Nobody else initialises it: go-nvml rebinds its functions then, without a lock of those who call them.
	lib := nv.New(nv.WithLibraryPath(path))
	if err := check("initialising NVIDIA's library", "", lib.Init()); err != nil {
		return nil, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lib, o.users, o.gone = lib, 1, make(chan struct{})
	return lib, nil
}

// join gives the library if anybody has it open, until leave.
func (o *opened) join() (nv.Interface, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.users == 0 {
		return nil, false
	}
	o.users++
	return o.lib, true
}

// leave undoes one open or join.
func (o *opened) leave() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.users--
	if o.users == 0 {
		_ = o.lib.Shutdown() // the library answers nothing to a driver that is gone
		close(o.gone)
	}
}

// wait returns when nobody has the library open.
func (o *opened) wait() {
	o.mu.Lock()
	gone := o.gone
	o.mu.Unlock()
	if gone != nil {
		<-gone
	}
}
