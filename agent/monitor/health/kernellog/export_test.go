package kernellog

import "io"

// ParseRecord and ParseXid are parseRecord and parseXid.
var (
	ParseRecord = parseRecord
	ParseXid    = parseXid
)

// MostRecords is mostRecords.
const MostRecords = mostRecords

// OpenBy has the log opened by a function instead.
func (l *Log) OpenBy(open func() (io.ReadSeekCloser, error)) {
	l.open = func(string) (source, error) { return open() }
}
