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

// sendHeader sends status and header: from here on the attempt is the last one.
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

// writeClient passes bytes on. The error's cause is the client's: it left, or it does not read.
func (req *request) writeClient(b []byte, now time.Time) error {
	req.extendWriteDeadline(now)
	if !req.pace.beginWrite(now, len(b), req.in.timers.SlowReader) {
		return errSlowReader
	}
	_, err := req.w.Write(b)
	return err
}

// writeFailure says what a failed write means.
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

// isStream says that an answer comes as server-sent events.
func isStream(h http.Header) bool {
	v := h["Content-Type"]
	return len(v) > 0 && strings.HasPrefix(v[0], "text/event-stream")
}

// readEngine fills buf from the engine under the phase timer, which is armed for as long as the read blocks.
func (req *request) readEngine(body io.Reader, buf []byte, now, due time.Time, cause error) (int, error) {
	req.pace.endWrite(now)
	req.timer.arm(now, due, cause)
	n, err := body.Read(buf)
	req.timer.pause()
	return n, err
}

// watchGaps says whose answer readGap reads.
func (req *request) watchGaps() {
	a := &req.attempt
	req.timer.watchGaps(gapWatch{router: req.app.router, rank: a.rank, ticket: a.ticket.ID, limit: req.app.between, maxGap: req.app.firstToken})
}

// readEngineGap fills buf from an engine that was heard before: the phase timer's clock is that of the gap.
func (req *request) readEngineGap(body io.Reader, buf []byte) (int, error) {
	now := time.Now()
	req.pace.endWrite(now)
	req.timer.armGap(now)
	n, err := body.Read(buf)
	req.timer.pause()
	return n, err
}

// relayError handles an answer of 400 and above: tried again elsewhere, or passed on byte for byte.
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

// isBestAnswer says that the engine's own 408 or 429 is the best answer there is left: it tells the client what to do.
func (req *request) isBestAnswer(res *result) bool {
	if res.status >= http.StatusInternalServerError || res.cause != causeStatus {
		return false
	}
	return req.attempts+1 >= req.maxAttempts()
}

// sendWhole sends a whole answer.
func (req *request) sendWhole(ctx context.Context, status int, header http.Header, body []byte, res result) result {
	if !req.mayServe() {
		return req.endUnserved()
	}
	req.sendHeader(status, header, len(body))
	if err := req.writeClient(body, req.firstByte); err != nil {
		return req.writeFailure(ctx, err)
	}
	return res
}

// relayWhole handles an answer that is not streamed: read whole up to maxWhole before its header goes out, so that a broken
// one can be tried again.
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

// readWhole reads an answer into the call's buffer. whole is false if it is longer than maxWhole.
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

// relayRest streams an answer that is too long to be held: it has begun.
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
			req.cutConn = true // no event can be put into a JSON body: the cut tells
			return req.readFailure(ctx, err, true)
		}
		if err := req.writeClient(b, time.Now()); err != nil {
			return req.writeFailure(ctx, err)
		}
		return result{cause: causeOK}
	}
}
