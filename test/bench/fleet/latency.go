package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/kubernetes"
)

// served is what the API server reports of all clients' requests, without watches.
type served struct {
	requests float64
	buckets  map[float64]float64 // how many took at most so many seconds
}

// askServed asks the API server for its metrics.
func askServed(ctx context.Context, client kubernetes.Interface) (served, error) {
	text, err := client.CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return served{}, fmt.Errorf("reading the API server's metrics: %w", err)
	}
	return parseServed(text)
}

func parseServed(text []byte) (served, error) {
	out := served{buckets: map[float64]float64{}}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		total := strings.HasPrefix(line, "apiserver_request_total{")
		if !total && !strings.HasPrefix(line, "apiserver_request_duration_seconds_bucket{") {
			continue
		}
		if verb := label(line, "verb"); verb == "WATCH" || verb == "CONNECT" {
			continue
		}
		n, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
		if err != nil {
			return served{}, fmt.Errorf("reading the API server's metrics: %s: %w", line, err)
		}
		if total {
			out.requests += n
			continue
		}
		most, err := strconv.ParseFloat(label(line, "le"), 64)
		if err != nil {
			return served{}, fmt.Errorf("reading the API server's metrics: %s: %w", line, err)
		}
		out.buckets[most] += n
	}
	return out, lines.Err()
}

// label is the value of a label of a series.
func label(line, name string) string {
	for _, before := range []string{"{", ","} {
		if _, rest, is := strings.Cut(line, before+name+`="`); is {
			value, _, _ := strings.Cut(rest, `"`)
			return value
		}
	}
	return ""
}

func (s served) since(before served) served {
	out := served{requests: s.requests - before.requests, buckets: map[float64]float64{}}
	for most, n := range s.buckets {
		out.buckets[most] = n - before.buckets[most]
	}
	return out
}

// quantile is the time that so much of the requests took at most, within the histogram's buckets.
func (s served) quantile(q float64) time.Duration {
	all := s.buckets[math.Inf(1)]
	below, from := 0.0, 0.0
	for _, most := range slices.Sorted(maps.Keys(s.buckets)) {
		n := s.buckets[most]
		switch {
		case all == 0 || n < q*all:
			below, from = n, most
		case math.IsInf(most, 1) || n == below:
			return seconds(from)
		default:
			return seconds(from + (most-from)*(q*all-below)/(n-below))
		}
	}
	return 0
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
