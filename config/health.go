package config

import (
	"fmt"
	"slices"
	"strconv"
)

// Health is which of NVIDIA's error numbers are told by ConditionGPUUnhealthy, beside those of the agent's own table.
type Health struct {
	CriticalXids    []int // told on sight
	ApplicationXids []int // programs' own errors, which take no GPU away; never one of the others
}

// mostXid is more than NVIDIA has numbers: 999 is its own for one that it does not know.
const mostXid = 999

func (c *checks) health(in healthInputs) Health {
	h := Health{CriticalXids: c.xids("health.criticalXids", in.CriticalXids), ApplicationXids: c.xids("health.applicationXids", in.ApplicationXids)}
	for i, n := range h.ApplicationXids {
		if slices.Contains(h.CriticalXids, n) {
			c.refuse(fmt.Sprintf("health.applicationXids[%d]", i), strconv.Itoa(n), "must not be one of health.criticalXids")
		}
	}
	return h
}

func (c *checks) xids(field string, in list) []int {
	c.each(field, in, func(text string) []string {
		if n, err := strconv.Atoi(text); err != nil || n < 1 || n > mostXid || strconv.Itoa(n) != text {
			return []string{fmt.Sprintf("must be the number of an Xid, from 1 to %d", mostXid)}
		}
		return nil
	})
	var out []int
	for _, text := range in {
		if n, err := strconv.Atoi(string(text)); err == nil {
			out = append(out, n)
		}
	}
	return out
}
