package cdi

// SetMknod replaces the system call that makes device files, until restore is called.
func SetMknod(f func(path string, mode uint32, dev int) error) (restore func()) {
	old := mknod
	mknod = f
	return func() { mknod = old }
}
