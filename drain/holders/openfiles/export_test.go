package openfiles

// SetMajor has another driver's device files taken for those of GPUs: tests run where NVIDIA's is not loaded, and no file of a
// driver that is not loaded can be opened.
func (s *Scan) SetMajor(major uint32) { s.gpus = major }
