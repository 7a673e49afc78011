package outcome

import "time"

// Repeats counts how often in a row the agent has answered another program that undoes what the agent has done. Without the count, the agent would answer
// each of the other's writes at once, for ever.
type Repeats struct {
	Times int       `json:"times"`
	Last  time.Time `json:"last"`
}

// Pauses says how long the agent leaves what another program has undone.
type Pauses struct {
	First   time.Duration // it doubles each time
	Longest time.Duration // bounds it
}

// forgotten is after how many of the longest pauses the next time counts as the first one again.
const forgotten = 6

// Again returns the count with one more time, at now.
func (r Repeats) Again(now time.Time, p Pauses) Repeats {
	if age := now.Sub(r.Last); age < 0 || age > forgotten*p.Longest {
		r.Times = 0
	}
	return Repeats{Times: r.Times + 1, Last: now}
}

// Until returns until when the agent pauses after the last time; zero if it does not. A last time in the future was written before the clock was set back,
// and does not count.
func (r Repeats) Until(now time.Time, p Pauses) time.Time {
	if r.Times < 1 || r.Last.After(now) {
		return time.Time{}
	}
	until := r.Last.Add(min(p.First<<min(r.Times-1, 10), p.Longest))
	if !now.Before(until) {
		return time.Time{}
	}
	return until
}
