package agent

import (
	"context"
	"time"
)

// Pass is one pass of the loop, for tests that are the loop themselves.
func (a *Agent) Pass(ctx context.Context) time.Duration { return a.pass(ctx) }

// ParseJournal is how the journal is read.
var ParseJournal = parseJournal
