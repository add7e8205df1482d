//go:build linux

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// scrape reads the metrics of a node and adds up the values of one name by the value of one label.
func scrape(ctx context.Context, admin, name, label string) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+admin+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return sumByLabel(resp.Body, name, label)
}

// sumByLabel reads metrics in the text format.
func sumByLabel(text io.Reader, name, label string) (map[string]float64, error) {
	out := map[string]float64{}
	lines := bufio.NewScanner(text)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		labels, ok := strings.CutPrefix(lines.Text(), name+"{")
		if !ok {
			continue
		}
		labels, value, _ := strings.Cut(labels, "} ")
		_, of, _ := strings.Cut(","+labels, ","+label+`="`)
		of, _, _ = strings.Cut(of, `"`)
		v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil {
			return nil, fmt.Errorf("%w: metric %q", errUnexpected, lines.Text())
		}
		out[of] += v
	}
	return out, lines.Err()
}

// ways are requests by how their prompt was computed.
type ways struct{ remote, local, fallback float64 }

func waysOf(ctx context.Context, admin string) (ways, error) {
	by, err := scrape(ctx, admin, "dpserve_pd_requests_total", "way")
	return ways{by["remote"], by["local"], by["fallback"]}, err
}

func (w ways) minus(o ways) ways {
	return ways{w.remote - o.remote, w.local - o.local, w.fallback - o.fallback}
}

// share is that of the requests whose prompt a prefill rank computed.
func (w ways) share() float64 { return w.remote / max(w.remote+w.local+w.fallback, 1) }

// String implements fmt.Stringer.
func (w ways) String() string {
	return fmt.Sprintf("%.0f times by a prefill rank, %.0f by the decode rank, %.0f by it as a fallback",
		w.remote, w.local, w.fallback)
}

// pairPatience is how long pairs of ranks may take to meet.
const pairPatience = 30 * time.Second

// waitForPairs waits until that many pairs of a prefill rank and a decode rank have met: until then the
// decode ranks compute every prompt.
func waitForPairs(ctx context.Context, admin string, want int) error {
	const between = 50 * time.Millisecond
	met := 0.0
	for range pairPatience / between {
		by, err := scrape(ctx, admin, "dpserve_pd_pairs", "state")
		if err != nil {
			return err
		}
		if met = by["connected"]; int(met) >= want {
			return nil
		}
		if err := pause(ctx, between); err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: %.0f of %d pairs of ranks have met after %s", errUnexpected, met, want,
		pairPatience)
}
