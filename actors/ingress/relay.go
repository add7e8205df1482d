package ingress

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/engine/openai"
)

// relayStream is the relay loop: one read of the engine, an inspection of its complete events, one write and
// flush to the client. Backpressure is the blocked write. The phase timer runs only while the loop waits for
// the engine.
func (req *request) relayStream(ctx context.Context, resp *http.Response) result {
	s := &req.stream
	s.reset(req.scan.Choices)
	req.watchGaps()
	if req.app.app.Engine.Family == app.FamilyOpenAI {
		// some engines of this family ignore n or send no finish_reason: a clean end is a complete answer
		s.watcher.Blind()
	}
	for {
		n, err := req.readToken(resp.Body, s.readSpace())
		now := time.Now()
		s.filled += n
		v := req.inspectRead(now, err)
		if !req.mayServe() {
			return req.endUnserved()
		}
		if v == actionCommit {
			req.openStream(resp)
			s.watcher.Begun()
			v = req.inspectRead(now, err) // events after the first content in the same read
		}
		if err := req.forward(now); err != nil {
			return req.writeFailure(ctx, err)
		}
		switch {
		case v != actionContinue:
			return req.endStream(ctx, resp, v)
		case err != nil:
			return req.endInterrupted(ctx, err)
		}
		req.reportProgress(now)
	}
}

// inspectRead inspects what a read has brought.
func (req *request) inspectRead(now time.Time, err error) streamAction {
	s, begun := &req.stream, req.status != 0
	v := s.inspectRead(begun)
	if v == actionContinue && errors.Is(err, io.EOF) {
		v = s.endOfBody(begun)
	}
	req.recordRead(now)
	return v
}

// recordRead counts the tokens of this read.
func (req *request) recordRead(now time.Time) {
	s := &req.stream
	if s.newTokens == 0 {
		return
	}
	if !s.lastToken.IsZero() && req.status != 0 && now.After(s.lastToken) {
		req.app.router.metrics.Load().ITL(req.route.String(), now.Sub(s.lastToken))
	}
	s.lastToken = now
	req.countOutput(s.newTokens, now)
	s.newTokens = 0
}

// unbuffered tells a proxy in front of dpserve, such as nginx, to pass tokens on without buffering. All
// answers share it.
var unbuffered = []string{"no"}

// openStream sends the header of a stream.
func (req *request) openStream(resp *http.Response) {
	if _, ok := resp.Header["X-Accel-Buffering"]; !ok {
		req.w.Header()["X-Accel-Buffering"] = unbuffered
	}
	req.sendHeader(resp.StatusCode, resp.Header, -1)
}

// forward writes and flushes the inspected events.
func (req *request) forward(now time.Time) error {
	s := &req.stream
	if req.status == 0 || s.inspected == 0 {
		return nil
	}
	pass := s.buf[:s.inspected]
	if s.watcher.Finishing() {
		req.readUsage(pass)
	}
	conn := startGather(req.r, len(pass))
	err := req.writeClient(pass, now)
	if err == nil {
		err = req.flush()
	}
	if sent := conn.sendGathered(); err == nil {
		err = sent
	}
	if err == nil {
		s.dropSent(s.inspected)
	}
	return err
}

// readUsage keeps the last usage of the stream.
func (req *request) readUsage(events []byte) {
	for len(events) > 0 {
		n := openai.EventEnd(events, 0)
		if n < 0 {
			n = len(events)
		}
		if u, ok := openai.ParseUsage(openai.EventData(events[:n])); ok {
			req.usage = u
		}
		events = events[n:]
	}
}

// readToken reads under the deadline of the phase: first token, or the next one. An empty delta counts as a
// token.
func (req *request) readToken(body io.Reader, buf []byte) (int, error) {
	if req.stream.lastToken.IsZero() {
		return req.readEngine(body, buf, time.Now(), req.firstTokenDue(), errFirstToken)
	}
	return req.readEngineGap(body, buf)
}

// endStream ends a stream with the given action.
func (req *request) endStream(ctx context.Context, resp *http.Response, v streamAction) result {
	s := &req.stream
	switch v {
	case actionFinish:
		req.drainBody(resp.Body)
		if s.passedError {
			return result{cause: causeErrorEvent, engine: s.engineError, status: s.engineError.Status}
		}
		return result{cause: causeOK}
	case actionFail:
		return req.breakStream(result{cause: req.lostStreamCause(), engine: s.engineError})
	case actionReject:
		return req.rejectStream(ctx)
	case actionAborted:
		return result{cause: causeAborted}
	default:
		return result{cause: causeEmpty}
	}
}

// rejectStream treats an error as first event like an HTTP answer with its code. The client receives a real
// status with the event's JSON; the [DONE] after it is dropped.
func (req *request) rejectStream(ctx context.Context) result {
	s := &req.stream
	status := s.engineError.Status
	if status == 0 {
		status = http.StatusInternalServerError
	}
	res := result{cause: statusCause(status, &s.engineError), engine: s.engineError, status: status}
	if res.cause != causePassed && !req.isBestAnswer(&res) {
		return res
	}
	n := openai.EventEnd(s.buf[s.inspected:s.filled], 0)
	if n < 0 {
		n = s.filled - s.inspected
	}
	body := openai.EventData(s.buf[s.inspected : s.inspected+n])
	return req.sendWhole(ctx, status, http.Header{"Content-Type": {"application/json"}}, body, res)
}

// endInterrupted ends a stream whose body broke off.
func (req *request) endInterrupted(ctx context.Context, err error) result {
	res := req.readFailure(ctx, err, req.status != 0)
	if req.status == 0 {
		return res
	}
	if res.cause == causeClientGone {
		req.cutConn = true
		return res
	}
	return req.breakStream(res)
}

// mayServe reports whether the answer of a rank of this node may be sent on: a node that was suspended and
// lost its lease must not continue its streams. The data ports of other nodes check for themselves.
func (req *request) mayServe() bool {
	return req.in.serves == nil || !req.attempt.rank.local || req.in.serves()
}

// endUnserved ends an attempt on a rank that may no longer serve.
func (req *request) endUnserved() result {
	res := result{cause: causeUnitLost}
	if req.status == 0 {
		return res
	}
	return req.breakStream(res)
}

// breakStream ends a stream after its first byte: it sends an error event in the route's shape, no [DONE] and
// no invented finish_reason, and cuts the connection, so that the client does not take the stream for a
// complete one.
func (req *request) breakStream(res result) result {
	req.cutConn = true
	code, message := streamError(res.cause)
	event := openai.ErrorEvent(nil, req.route, openai.Status(code), "", code, message)
	if err := req.writeClient(event, time.Now()); err != nil {
		return res
	}
	if req.flush() != nil {
		return res
	}
	return res
}

// drainBody reads the end of a body after [DONE], so that its connection can be reused. The client already
// has everything.
func (req *request) drainBody(body io.Reader) {
	s := &req.stream
	for range 2 {
		now := time.Now()
		if _, err := req.readEngine(body, s.buf, now, now.Add(req.in.timers.Tail), errTail); err != nil {
			return
		}
	}
}
