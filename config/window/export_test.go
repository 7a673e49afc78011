package window

import "time"

// Edge is the first instant after t at which Contains changes. There is none where it stays as it is for ever.
func (s Schedule) Edge(t time.Time) (time.Time, bool) { return s.next(wall(t)) }
