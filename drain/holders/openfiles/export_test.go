package openfiles

// SetMajor has another driver's device files taken for those of GPUs: tests run where NVIDIA's is not loaded, and no file of a
// driver that is not loaded can be opened.
func (l *Scan) SetMajor(major uint32) { l.gpus = major }
