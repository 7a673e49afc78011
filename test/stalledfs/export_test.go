package stalledfs

// Others reports the thread ids of other processes that wait for an answer.
func (f *FS) Others() <-chan int { return f.others }
