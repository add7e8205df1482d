package sim

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// callTable lists the calls that requests of others may abort.
type callTable struct {
	mu    sync.Mutex
	ranks map[*call]*rank
}

func (t *callTable) add(c *call, r *rank) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ranks == nil {
		t.ranks = make(map[*call]*rank)
	}
	t.ranks[c] = r
}

func (t *callTable) remove(c *call) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.ranks, c)
}

// abort ends the calls of some request ids, or all without a list, and returns how many it has asked to end.
func (t *callTable) abort(ids []string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c, r := range t.ranks {
		if len(ids) == 0 || slices.Contains(ids, c.plan.id) {
			r.cancel(c)
		}
	}
	if len(ids) > 0 {
		return len(ids) // known or not, as the imitated engine counts
	}
	return len(t.ranks)
}

// tell answers with an object of one member.
func tell(s api, w http.ResponseWriter, name string, value any) {
	s.writeJSON(w, http.StatusOK, mustMarshal(map[string]any{name: value}))
}

func isPaused(s api, w http.ResponseWriter, _ *http.Request) {
	tell(s, w, "is_paused", s.ranks[0].isPaused())
}

func isSleeping(s api, w http.ResponseWriter, _ *http.Request) {
	tell(s, w, "is_sleeping", s.faults.is(ModeKVSleep))
}

func worldSize(s api, w http.ResponseWriter, _ *http.Request) {
	tell(s, w, "world_size", max(len(s.ranks), s.cfg.DPSize))
}

// pausePoll is how often a pause looks whether what runs has ended.
const pausePoll = 5 * time.Millisecond

// pauseRanks answers POST /pause: requests wait from now on. What runs is aborted, ends by itself, or stands
// still.
func pauseRanks(s api, w http.ResponseWriter, r *http.Request) {
	mode := r.URL.Query().Get("mode")
	if !slices.Contains([]string{"", "abort", "wait", "keep"}, mode) {
		s.fail(w, schemaError("query.mode", "Input should be 'abort', 'wait' or 'keep'", mode))
		return
	}
	for _, one := range s.ranks {
		one.pause()
		switch mode {
		case "", "abort":
			one.submit(em.Input{Kind: em.InputAbortAll})
		case "keep":
			one.submit(em.Input{Kind: em.InputHang})
		}
	}
	for mode != "keep" && r.Context().Err() == nil && computes(s) {
		time.Sleep(pausePoll)
	}
	tell(s, w, "status", "paused")
}

// computes reports that a rank has requests which are not held back.
func computes(s api) bool {
	return slices.ContainsFunc(s.ranks, func(r *rank) bool {
		stats := r.stats()
		return !r.isPaused() || stats.Running+stats.Waiting > 0
	})
}

// resumeRanks answers POST /resume.
func resumeRanks(s api, w http.ResponseWriter, _ *http.Request) {
	for _, r := range s.ranks {
		if r.isPaused() {
			r.submit(em.Input{Kind: em.InputRecover})
			r.resume()
		}
	}
	tell(s, w, "status", "resumed")
}

// requestIDs reads request_ids of a body; ok = the list is there.
func requestIDs(s api, w http.ResponseWriter, r *http.Request) (ids []string, ok, good bool) {
	f, apiErr := s.body(r)
	if apiErr == nil {
		ok = f.has("request_ids")
		ids, apiErr = f.texts("request_ids"), f.fault
	}
	if apiErr != nil {
		s.fail(w, apiErr)
		return nil, false, false
	}
	return ids, ok, true
}

// abortRequests answers POST /abort_requests of the development mode: without a list it aborts everything.
func abortRequests(s api, w http.ResponseWriter, r *http.Request) {
	if ids, _, good := requestIDs(s, w, r); good {
		aborted := s.calls.abort(ids)
		s.writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"status":"aborted","aborted":%d}`, aborted))
	}
}

// abortListed answers POST /inference/v1/abort_requests: it wants a list, and an empty one aborts nothing.
func abortListed(s api, w http.ResponseWriter, r *http.Request) {
	ids, ok, good := requestIDs(s, w, r)
	switch {
	case !good:
	case !ok:
		s.fail(w, &apiError{
			status: http.StatusBadRequest, kind: "Bad Request",
			message: "Missing 'request_ids' in request body",
		})
	default:
		if len(ids) > 0 {
			s.calls.abort(ids)
		}
		w.Header().Set("Content-Length", "0")
		w.WriteHeader(http.StatusOK)
	}
}

// loadHeader adds the engine's load to an answer that does not stream, in the format that the client names.
func loadHeader(s api, w http.ResponseWriter, r *http.Request) {
	const name = "endpoint-load-metrics"
	format := r.Header.Get(name + "-format")
	if format == "" {
		return
	}
	waiting, usage := 0.0, 0.0
	for _, one := range s.ranks {
		stats := one.stats()
		waiting += float64(stats.Waiting)
		usage = max(usage, float64(stats.UsedBlocks)/float64(stats.Blocks))
	}
	switch strings.ToUpper(format) {
	case "JSON":
		w.Header().Set(name, fmt.Sprintf(`JSON {"named_metrics": {"num_requests_waiting": %s, `+
			`"kv_cache_usage_perc": %s}}`, pythonFloat(waiting), pythonFloat(usage)))
	case "TEXT":
		w.Header().Set(name, fmt.Sprintf("TEXT named_metrics.num_requests_waiting=%s, "+
			"named_metrics.kv_cache_usage_perc=%s", pythonFloat(waiting), pythonFloat(usage)))
	}
}
