package ingress

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/engine/openai"
)

// sendHeader sends status and header to the client. No other attempt follows after it.
func (req *request) sendHeader(status int, engine http.Header, length int) {
	req.app.router.markFirstByte(&req.attempt)
	now := time.Now()
	req.firstByte, req.status = now, status
	h := req.w.Header()
	clientHeader(h, engine)
	req.setOwnHeaders(h, req.attempt.rank)
	if length >= 0 {
		h["Content-Length"] = []string{strconv.Itoa(length)}
	}
	req.extendWriteDeadline(now)
	req.releaseBody()
	req.w.WriteHeader(status)
}

// writeClient writes bytes to the client. An error means that the client has left or does not read.
func (req *request) writeClient(b []byte, now time.Time) error {
	req.extendWriteDeadline(now)
	if !req.pace.beginWrite(now, len(b), req.in.timers.SlowReader) {
		return errSlowReader
	}
	_, err := req.w.Write(b)
	return err
}

// writeFailure returns the result of an attempt whose answer could not be written.
func (req *request) writeFailure(ctx context.Context, err error) result {
	req.cutConn = true
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return result{cause: causeSlowReader, err: err}
	case ctx.Err() != nil && contextCause(ctx) == causeDrained:
		return result{cause: causeDrained, err: err}
	default:
		return result{cause: causeClientGone, err: err}
	}
}

// isStream reports whether an answer is a stream of server-sent events.
func isStream(h http.Header) bool {
	v := h["Content-Type"]
	return len(v) > 0 && strings.HasPrefix(v[0], "text/event-stream")
}

// readEngine reads from the engine into buf. The phase timer runs while the read blocks.
func (req *request) readEngine(body io.Reader, buf []byte, now, due time.Time, cause error) (int, error) {
	req.pace.endWrite(now)
	req.timer.arm(now, due, cause)
	n, err := body.Read(buf)
	req.timer.pause()
	return n, err
}

// watchGaps configures the phase timer for readEngineGap.
func (req *request) watchGaps() {
	a := &req.attempt
	req.timer.watchGaps(gapWatch{router: req.app.router, rank: a.rank, ticket: a.ticket.ID,
		limit: req.app.between, maxGap: req.app.firstToken})
}

// readEngineGap reads from an engine that has already sent output: the phase timer measures the gap since
// then.
func (req *request) readEngineGap(body io.Reader, buf []byte) (int, error) {
	now := time.Now()
	req.pace.endWrite(now)
	req.timer.armGap(now)
	n, err := body.Read(buf)
	req.timer.pause()
	return n, err
}

// relayError handles an answer with status 400 or above: it is retried on another rank, or relayed byte for
// byte.
func (req *request) relayError(ctx context.Context, resp *http.Response) result {
	body, whole, err := req.readWhole(resp)
	if err != nil {
		return req.readFailure(ctx, err, false)
	}
	e := openai.ParseError(body)
	res := result{cause: statusCause(resp.StatusCode, &e), engine: e, status: resp.StatusCode}
	if res.cause != causePassed && !req.isBestAnswer(&res) {
		return res
	}
	if !whole {
		return req.relayRest(ctx, resp, body)
	}
	return req.sendWhole(ctx, resp.StatusCode, resp.Header, body, res)
}

// isBestAnswer reports whether the engine's own 408 or 429 is the best answer left, because it tells the
// client what to do.
func (req *request) isBestAnswer(res *result) bool {
	if res.status >= http.StatusInternalServerError || res.cause != causeStatus {
		return false
	}
	return req.attempts+1 >= req.maxAttempts()
}

// sendWhole sends an answer that is completely in memory.
func (req *request) sendWhole(ctx context.Context, status int, header http.Header, body []byte,
	res result) result {
	if !req.mayServe() {
		return req.endUnserved()
	}
	req.sendHeader(status, header, len(body))
	if err := req.writeClient(body, req.firstByte); err != nil {
		return req.writeFailure(ctx, err)
	}
	return res
}

// relayWhole handles an answer that is not streamed. It reads up to maxWhole bytes before it sends the
// header, so that a broken answer can be retried.
func (req *request) relayWhole(ctx context.Context, resp *http.Response) result {
	body, whole, err := req.readWhole(resp)
	switch {
	case err != nil:
		return req.readFailure(ctx, err, false)
	case !whole:
		return req.relayRest(ctx, resp, body)
	case len(body) == 0:
		return result{cause: causeEmpty, status: resp.StatusCode}
	case req.route.Generates() && openai.Aborted(body):
		return result{cause: causeAborted, status: resp.StatusCode}
	}
	if u, ok := openai.ParseUsage(body); ok {
		req.usage = u
	}
	return req.sendWhole(ctx, resp.StatusCode, resp.Header, body, result{cause: causeOK})
}

// readWhole reads an answer into the stream's buffer. whole is false if the answer is longer than maxWhole.
func (req *request) readWhole(resp *http.Response) (body []byte, whole bool, err error) {
	s := &req.stream
	s.reset(0)
	if n := resp.ContentLength; n > int64(len(s.buf)) && n < maxWhole {
		s.buf = make([]byte, n+1)
	}
	due := req.firstTokenDue()
	for s.filled <= maxWhole {
		if s.filled == len(s.buf) {
			s.grow()
		}
		n, err := req.readEngine(resp.Body, s.buf[s.filled:], time.Now(), due, errFirstToken)
		s.filled += n
		if errors.Is(err, io.EOF) {
			return s.buf[:s.filled], s.filled <= maxWhole, nil
		}
		if err != nil {
			return nil, false, err
		}
	}
	return s.buf[:s.filled], false, nil
}

// relayRest streams an answer that is too long to be held. After its first write no retry is possible.
func (req *request) relayRest(ctx context.Context, resp *http.Response, head []byte) result {
	if !req.mayServe() {
		return req.endUnserved()
	}
	req.sendHeader(resp.StatusCode, resp.Header, int(resp.ContentLength))
	req.watchGaps()
	for b := head; ; {
		if !req.mayServe() {
			req.cutConn = true
			return result{cause: causeUnitLost}
		}
		now := time.Now()
		if err := req.writeClient(b, now); err != nil {
			return req.writeFailure(ctx, err)
		}
		n, err := req.readEngineGap(resp.Body, req.stream.buf)
		if b = req.stream.buf[:n]; err == nil {
			continue
		}
		if !errors.Is(err, io.EOF) {
			req.cutConn = true // a JSON body can hold no error event: only the cut shows the failure
			return req.readFailure(ctx, err, true)
		}
		if err := req.writeClient(b, time.Now()); err != nil {
			return req.writeFailure(ctx, err)
		}
		return result{cause: causeOK}
	}
}
