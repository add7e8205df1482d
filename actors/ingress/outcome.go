package ingress

import (
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/engine/openai"
)

// answerFailure sends an answer of dpserve's own. It writes exactly one log line.
func (req *request) answerFailure(f *failure) {
	req.countAnswer(f.status)
	req.logLine(failureLevel(f.status), "request not served", f.result(), slog.Int("code", f.status))
	if f.clientGone {
		req.cutConn = true // a client that still reads must not see an empty answer
		return
	}
	h := req.w.Header()
	req.setOwnHeaders(h, nil)
	if f.retryAfter > 0 {
		h["Retry-After"] = []string{strconv.Itoa(f.retryAfter)}
	}
	req.extendWriteDeadline(time.Now())
	writeError(req.w, f)
}

// finishAnswered counts and logs a request whose answer has begun.
func (req *request) finishAnswered(res *result) {
	req.app.router.metrics.Load().Attempt(causePolicies[res.cause].name, "free")
	code := req.status
	if req.cutConn || res.cause == causeErrorEvent {
		code = codeOf(res)
	}
	switch {
	case req.cutConn || res.cause == causeErrorEvent:
		req.logLine(failureLevel(code), "request failed after its first byte", res, slog.Int("code", code))
	case code >= http.StatusBadRequest:
		req.logLine(slog.LevelInfo, "engine refused the request", res, slog.Int("code", code))
	default:
		req.logLine(slog.LevelDebug, "request served", res, slog.Int("code", code))
	}
	req.countAnswer(code)
}

// codeOf is the status in metrics of an answer that broke after its first byte; the client received 200.
func codeOf(res *result) int {
	switch res.cause {
	case causeClientGone, causeSlowReader:
		return statusClientGone
	case causeErrorEvent:
		return res.status
	default:
		code, _ := streamError(res.cause)
		return openai.Status(code)
	}
}

// countAnswer updates metrics and totals.
func (req *request) countAnswer(code int) {
	req.in.answered.Add(1)
	if req.app == nil {
		req.in.metrics.RequestRefused(req.route.String(), code)
		return
	}
	var ttft time.Duration
	if !req.firstByte.IsZero() && req.scan.Stream {
		ttft = req.firstByte.Sub(req.start)
	}
	req.app.router.metrics.Load().Request(req.route.String(), code, time.Since(req.start), ttft)
}

// setOwnHeaders sets the headers that name the application and the rank.
func (req *request) setOwnHeaders(h http.Header, rk *rank) {
	h[headerRequestID] = req.idHeader
	if req.app == nil {
		return
	}
	h[headerApp] = []string{req.app.app.Name}
	if rk != nil {
		h[headerGroup], h[headerRank] = rk.groupValue, rk.rankValue
		if req.prompt.lookedUp { // predicted at dispatch; the engine's own number is in its usage
			h[headerCached] = []string{strconv.Itoa(req.query.HitOn(rk.id))}
		}
	}
	n := req.attempts
	if rk != nil {
		n++
	}
	h[headerAttempts] = []string{strconv.Itoa(n)}
}

// failureLevel is a warning when the fault is not the client's.
func failureLevel(code int) slog.Level {
	if code >= http.StatusInternalServerError {
		return slog.LevelWarn
	}
	return slog.LevelInfo
}

// logLine writes one line about the request; never a word of the prompt or the answer.
func (req *request) logLine(level slog.Level, text string, res *result, attrs ...slog.Attr) {
	ctx := req.r.Context()
	if !req.in.log.Enabled(ctx, level) {
		return
	}
	attrs = append(attrs,
		slog.String("request_id", req.id), slog.String("route", req.route.String()),
		slog.String("cause", res.name()),
		slog.Int("attempt", req.attempts), slog.Float64(
			"dur_ms", float64(time.Since(req.start).Microseconds())/1000))
	if req.app != nil {
		attrs = append(attrs, slog.String("app", req.app.app.Name))
	}
	if rk := req.attempt.rank; rk != nil {
		attrs = append(attrs, slog.String("unit", rk.unit), slog.Int("group", rk.id.Group()),
			slog.Int("rank", rk.id.Rank()), slog.Uint64("epoch", rk.epoch))
	}
	req.in.log.LogAttrs(ctx, level, text, append(attrs,
		res.attrs(req.in.hash(), req.in.log.Enabled(
			ctx, slog.LevelDebug))...)...) //nolint:sloglint // text is a constant of each caller
}
