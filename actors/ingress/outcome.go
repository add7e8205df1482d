package ingress

import (
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/engine/openai"
)

// refuse sends an answer of dpserve's own. There is exactly one log line for it.
func (c *call) refuse(f *failure) {
	c.count(f.status)
	c.log(failureLevel(f.status), "request not served", f.result(), slog.Int("code", f.status))
	if f.gone {
		c.cut = true // whoever still listens must not see an empty answer
		return
	}
	h := c.w.Header()
	c.ownHeaders(h, nil)
	if f.retryAfter > 0 {
		h["Retry-After"] = []string{strconv.Itoa(f.retryAfter)}
	}
	c.armWrite(time.Now())
	writeError(c.w, f)
}

// finish counts and logs a request whose answer has begun.
func (c *call) finish(res *result) {
	c.entry.lane.meter.Load().Attempt(rows[res.cause].name, "free")
	code := c.status
	if c.cut || res.cause == causeErrorEvent {
		code = codeOf(res)
	}
	switch {
	case c.cut || res.cause == causeErrorEvent:
		c.log(failureLevel(code), "request failed after its first byte", res, slog.Int("code", code))
	case code >= http.StatusBadRequest:
		c.log(slog.LevelInfo, "engine refused the request", res, slog.Int("code", code))
	default:
		c.log(slog.LevelDebug, "request served", res, slog.Int("code", code))
	}
	c.count(code)
}

// codeOf is the status in metrics of an answer that broke after its first byte; 200 had been sent by then.
func codeOf(res *result) int {
	switch res.cause {
	case causeClientGone, causeSlowReader:
		return statusClientGone
	case causeErrorEvent:
		return res.status
	default:
		code, _ := brokenOff(res.cause)
		return openai.Status(code)
	}
}

// count puts the request into metrics and totals.
func (c *call) count(code int) {
	c.in.requests.Add(1)
	if c.entry == nil {
		c.in.metrics.RequestRefused(c.route.String(), code)
		return
	}
	var ttft time.Duration
	if !c.begun.IsZero() && c.scan.Stream {
		ttft = c.begun.Sub(c.start)
	}
	c.entry.lane.meter.Load().Request(c.route.String(), code, time.Since(c.start), ttft)
}

// ownHeaders names where the answer comes from.
func (c *call) ownHeaders(h http.Header, rk *rank) {
	h[headerRequestID] = c.ids
	if c.entry == nil {
		return
	}
	h[headerApp] = []string{c.entry.app.Name}
	if rk != nil {
		h[headerGroup], h[headerRank] = rk.groupValue, rk.rankValue
		if c.prompt.looked { // predicted at dispatch; what the engine found is in its usage
			h[headerCached] = []string{strconv.Itoa(c.query.HitOn(rk.id))}
		}
	}
	n := c.attempts
	if rk != nil {
		n++
	}
	h[headerAttempts] = []string{strconv.Itoa(n)}
}

// failureLevel is a warning when the fault is on this side of the client.
func failureLevel(code int) slog.Level {
	if code >= http.StatusInternalServerError {
		return slog.LevelWarn
	}
	return slog.LevelInfo
}

// log writes one line about the request; never a word of the prompt or the answer.
func (c *call) log(level slog.Level, text string, res *result, attrs ...slog.Attr) {
	ctx := c.r.Context()
	if !c.in.log.Enabled(ctx, level) {
		return
	}
	attrs = append(attrs,
		slog.String("request_id", c.id), slog.String("route", c.route.String()), slog.String("cause", res.name()),
		slog.Int("attempt", c.attempts), slog.Float64("dur_ms", float64(time.Since(c.start).Microseconds())/1000))
	if c.entry != nil {
		attrs = append(attrs, slog.String("app", c.entry.app.Name))
	}
	if rk := c.attempt.rank; rk != nil {
		attrs = append(attrs, slog.String("unit", rk.unit), slog.Int("group", rk.id.Group()), slog.Int("rank", rk.id.Rank()), slog.Uint64("epoch", rk.epoch))
	}
	c.in.log.LogAttrs(ctx, level, text, append(attrs, res.attrs(c.in.hash(), c.in.log.Enabled(ctx, slog.LevelDebug))...)...) //nolint:sloglint // text is a constant of each caller
}
