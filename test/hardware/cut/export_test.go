package cut

import "github.com/gpuslice/gpuslice/agent/state/hostfile"

// Disk is the store's file, of which a test can make the disk hang.
func (s *Store) Disk() *hostfile.File { return s.file }
