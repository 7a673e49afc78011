package lib

import (
	"sync"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// opened counts the users of the open library: the driver's session, and the readers next to it. The last one shuts it down, since a library that was
// not shut down does not find a driver that is loaded again.
type opened struct {
	mu    sync.Mutex
	lib   nv.Interface
	users int
	gone  chan struct{} // closed when the last user has left
}

// open initialises the library, unless another user has it open.
func (o *opened) open(path string, wrap func(nv.Interface) nv.Interface) (nv.Interface, error) {
	if lib, ok := o.join(); ok {
		return lib, nil
	}
	// Only open initialises it: go-nvml then binds its functions again, and does not lock out their callers while it does.
	lib := nv.New(nv.WithLibraryPath(path))
	if wrap != nil {
		lib = wrap(lib)
	}
	if err := check("initialising NVIDIA's library", "", lib.Init()); err != nil {
		return nil, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lib, o.users, o.gone = lib, 1, make(chan struct{})
	return lib, nil
}

// join gives the library if another user has it open, until leave.
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
		_ = o.lib.Shutdown() // its error means that the driver is gone
		close(o.gone)
	}
}

// wait returns when no user has the library open.
func (o *opened) wait() {
	o.mu.Lock()
	gone := o.gone
	o.mu.Unlock()
	if gone != nil {
		<-gone
	}
}
