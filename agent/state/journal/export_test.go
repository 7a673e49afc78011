package journal

// Hang makes every call on the disk wait until the channel is closed.
func (f *RecordFile) Hang(until <-chan struct{}) {
	f.file.Work = func(work func()) {
		<-until
		work()
	}
}
