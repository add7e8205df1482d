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

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
)

// relay is a request that an engine answers: it sends the answer to the client.
type relay struct{ *request }

// answer sends the engine's answer to the client.
func (r relay) answer(ctx context.Context, resp *http.Response) result {
	switch {
	case resp.StatusCode >= http.StatusBadRequest:
		return r.relayError(ctx, resp)
	case resp.StatusCode >= http.StatusMultipleChoices:
		// Its Location is an internal address, to which clients would send the prompt.
		return result{cause: causeStatus, status: resp.StatusCode}
	case isStream(resp.Header):
		return r.relayStream(ctx, resp)
	default:
		return r.relayWhole(ctx, resp)
	}
}

// relayStream is the relay loop: one read of the engine, an inspection of its complete events, one write and
// flush to the client. Backpressure is the blocked write. The phase timer runs only while the loop waits for
// the engine.
func (r relay) relayStream(ctx context.Context, resp *http.Response) result {
	s := &r.stream
	s.reset(r.scan.Choices)
	r.watchGaps()
	if r.app.app.Engine.Family == app.FamilyOpenAI {
		// some engines of this family ignore n or send no finish_reason: a clean end is a complete answer
		s.watcher.Blind()
	}
	for {
		n, err := r.readToken(resp.Body, s.readSpace())
		now := time.Now()
		s.filled += n
		v := r.inspectRead(now, err)
		if v == actionCommit {
			if why := r.split.begins(); why != causeOK {
				return result{cause: why}
			}
			r.openStream(resp)
			s.watcher.Begun()
			v = r.inspectRead(now, err) // events after the first content in the same read
		}
		if err := r.forward(now); err != nil {
			return r.writeFailure(ctx, err)
		}
		switch {
		case v != actionContinue:
			return r.endStream(ctx, resp, v)
		case err != nil:
			return r.endInterrupted(ctx, err)
		}
		r.reportProgress(now)
	}
}

// inspectRead inspects what a read has brought.
func (r relay) inspectRead(now time.Time, err error) streamAction {
	s, begun := &r.stream, r.status != 0
	v := s.inspectRead(begun)
	if v == actionContinue && errors.Is(err, io.EOF) {
		v = s.endOfBody(begun)
	}
	r.recordRead(now)
	return v
}

// recordRead counts the tokens of this read.
func (r relay) recordRead(now time.Time) {
	s := &r.stream
	if s.newTokens == 0 {
		return
	}
	if !s.lastToken.IsZero() && r.status != 0 && now.After(s.lastToken) {
		r.app.router.metrics.Load().ITL(r.route.String(), now.Sub(s.lastToken))
	}
	s.lastToken = now
	r.countOutput(s.newTokens, now)
	s.newTokens = 0
}

// unbuffered tells a proxy in front of dpserve, such as nginx, to pass tokens on without buffering. All
// answers share it.
var unbuffered = []string{"no"}

// openStream sends the header of a stream.
func (r relay) openStream(resp *http.Response) {
	if _, ok := resp.Header["X-Accel-Buffering"]; !ok {
		r.w.Header()["X-Accel-Buffering"] = unbuffered
	}
	r.sendHeader(resp.StatusCode, resp.Header, -1)
}

// forward writes and flushes the inspected events.
func (r relay) forward(now time.Time) error {
	s := &r.stream
	if r.status == 0 || s.inspected == 0 {
		return nil
	}
	pass := s.buf[:s.inspected]
	if s.watcher.Finishing() {
		r.readUsage(pass)
	}
	conn := startGather(r.r, len(pass))
	err := r.writeClient(pass, now)
	if err == nil {
		err = r.flush()
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
func (r relay) readUsage(events []byte) {
	for len(events) > 0 {
		n := openai.EventEnd(events, 0)
		if n < 0 {
			n = len(events)
		}
		if u, ok := openai.ParseUsage(openai.EventData(events[:n])); ok {
			r.usage = u
		}
		events = events[n:]
	}
}

// readToken reads under the deadline of the phase: first token, or the next one. An empty delta counts as a
// token.
func (r relay) readToken(body io.Reader, buf []byte) (int, error) {
	if r.stream.lastToken.IsZero() {
		return r.readEngine(body, buf, time.Now(), r.firstTokenDue(), errFirstToken)
	}
	return r.readEngineGap(body, buf)
}

// endStream ends a stream with the given action.
func (r relay) endStream(ctx context.Context, resp *http.Response, v streamAction) result {
	s := &r.stream
	switch v {
	case actionFinish:
		r.drainBody(resp.Body)
		if s.passedError {
			return result{cause: causeErrorEvent, engine: s.engineError, status: s.engineError.Status}
		}
		return result{cause: causeOK}
	case actionFail:
		return r.breakStream(result{cause: r.lostStreamCause(), engine: s.engineError})
	case actionReject:
		return r.rejectStream(ctx)
	case actionAborted:
		return result{cause: causeAborted}
	default:
		return result{cause: causeEmpty}
	}
}

// rejectStream treats an error as first event like an HTTP answer with its code. The client receives a real
// status with the event's JSON; the [DONE] after it is dropped.
func (r relay) rejectStream(ctx context.Context) result {
	s := &r.stream
	status := s.engineError.Status
	if status == 0 {
		status = http.StatusInternalServerError
	}
	res := result{cause: statusCause(status, &s.engineError), engine: s.engineError, status: status}
	if !r.passes(&res) {
		return res
	}
	n := openai.EventEnd(s.buf[s.inspected:s.filled], 0)
	if n < 0 {
		n = s.filled - s.inspected
	}
	body := openai.EventData(s.buf[s.inspected : s.inspected+n])
	return r.sendWhole(ctx, status, http.Header{"Content-Type": {"application/json"}}, body, res)
}

// endInterrupted ends a stream whose body broke off.
func (r relay) endInterrupted(ctx context.Context, err error) result {
	res := r.readFailure(ctx, err, r.status != 0)
	if r.status == 0 {
		return res
	}
	if res.cause == causeClientGone {
		r.cutConn = true
		return res
	}
	return r.breakStream(res)
}

// breakStream ends a stream after its first byte: it sends an error event in the route's shape, no [DONE] and
// no invented finish_reason, and cuts the connection, so that the client does not take the stream for a
// complete one.
func (r relay) breakStream(res result) result {
	r.cutConn = true
	code, message := streamError(res.cause)
	event := openai.ErrorEvent(nil, r.route, openai.Status(code), "", code, message)
	if r.writeClient(event, time.Now()) == nil {
		_ = r.flush() // the connection is cut in any case
	}
	return res
}

// drainBody reads the end of a body after [DONE], so that its connection can be reused. The client already
// has everything.
func (r relay) drainBody(body io.Reader) {
	s := &r.stream
	for range 2 {
		now := time.Now()
		if _, err := r.readEngine(body, s.buf, now, now.Add(r.in.timers.Tail), errTail); err != nil {
			return
		}
	}
}

// sendHeader sends status and header to the client. No other attempt follows after it.
func (r relay) sendHeader(status int, engine http.Header, length int) {
	r.app.router.markFirstByte(&r.attempt)
	now := time.Now()
	r.firstByte, r.status = now, status
	h := r.w.Header()
	clientHeader(h, engine)
	r.setOwnHeaders(h, r.attempt.rank)
	if length >= 0 {
		h["Content-Length"] = []string{strconv.Itoa(length)}
	}
	r.extendWriteDeadline(now)
	r.releaseBody()
	r.w.WriteHeader(status)
}

// writeClient writes bytes to the client. An error means that the client has left or does not read.
func (r relay) writeClient(b []byte, now time.Time) error {
	r.extendWriteDeadline(now)
	if !r.pace.beginWrite(now, len(b), r.in.timers.SlowReader) {
		return errSlowReader
	}
	_, err := r.w.Write(b)
	return err
}

// writeFailure returns the result of an attempt whose answer could not be written.
func (r relay) writeFailure(ctx context.Context, err error) result {
	r.cutConn = true
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
func (r relay) readEngine(body io.Reader, buf []byte, now, due time.Time, cause error) (int, error) {
	r.pace.endWrite(now)
	r.timer.arm(now, due, cause)
	defer r.timer.pause()
	return body.Read(buf)
}

// watchGaps configures the phase timer for readEngineGap.
func (r relay) watchGaps() {
	a := &r.attempt
	r.timer.watchGaps(gapWatch{
		router: r.app.router, rank: a.rank, ticket: a.ticket.ID,
		limit: r.app.between, maxGap: r.app.firstToken,
	})
}

// readEngineGap reads from an engine that has already sent output: the phase timer measures the gap since
// then.
func (r relay) readEngineGap(body io.Reader, buf []byte) (int, error) {
	now := time.Now()
	r.pace.endWrite(now)
	r.timer.armGap(now)
	defer r.timer.pause()
	return body.Read(buf)
}

// relayError handles an answer with status 400 or above: it is retried on another rank, or relayed byte for
// byte.
func (r relay) relayError(ctx context.Context, resp *http.Response) result {
	body, whole, err := r.readWhole(resp)
	if err != nil {
		return r.readFailure(ctx, err, false)
	}
	e := openai.ParseError(body)
	res := result{cause: statusCause(resp.StatusCode, &e), engine: e, status: resp.StatusCode}
	if !r.passes(&res) {
		return res
	}
	if !whole {
		return r.relayRest(ctx, resp, body)
	}
	return r.sendWhole(ctx, resp.StatusCode, resp.Header, body, res)
}

// passes reports whether the client gets the engine's error as it is.
func (r relay) passes(res *result) bool {
	if r.split.isUnderWay() {
		return res.cause == causePassed && r.split.passesRejection()
	}
	return res.cause == causePassed || r.isBestAnswer(res)
}

// isBestAnswer reports whether the engine's own 408 or 429 is the best answer left, because it tells the
// client what to do.
func (r relay) isBestAnswer(res *result) bool {
	if res.status >= http.StatusInternalServerError || res.cause != causeStatus {
		return false
	}
	return r.attempts+1 >= r.maxAttempts()
}

// sendWhole sends an answer that is completely in memory.
func (r relay) sendWhole(ctx context.Context, status int, header http.Header, body []byte,
	res result,
) result {
	r.sendHeader(status, header, len(body))
	if err := r.writeClient(body, r.firstByte); err != nil {
		return r.writeFailure(ctx, err)
	}
	return res
}

// relayWhole handles an answer that is not streamed. It reads up to maxWhole bytes before it sends the
// header, so that a broken answer can be retried.
func (r relay) relayWhole(ctx context.Context, resp *http.Response) result {
	body, whole, err := r.readWhole(resp)
	switch {
	case err != nil:
		return r.readFailure(ctx, err, false)
	case whole && len(body) == 0:
		return result{cause: causeEmpty, status: resp.StatusCode}
	case whole && r.route.Generates() && openai.Aborted(body):
		return result{cause: causeAborted, status: resp.StatusCode}
	}
	if why := r.split.begins(); why != causeOK {
		return result{cause: why}
	}
	if !whole {
		return r.relayRest(ctx, resp, body)
	}
	if u, ok := openai.ParseUsage(body); ok {
		r.usage = u
	}
	return r.sendWhole(ctx, resp.StatusCode, resp.Header, body, result{cause: causeOK})
}

// readWhole reads an answer into the stream's buffer. whole is false if the answer is longer than maxWhole.
func (r relay) readWhole(resp *http.Response) (body []byte, whole bool, err error) {
	s := &r.stream
	s.reset(0)
	if n := resp.ContentLength; n > int64(len(s.buf)) && n < maxWhole {
		s.buf = make([]byte, n+1)
	}
	due := r.firstTokenDue()
	for s.filled <= maxWhole {
		n, err := r.readEngine(resp.Body, s.readSpace(), time.Now(), due, errFirstToken)
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
func (r relay) relayRest(ctx context.Context, resp *http.Response, head []byte) result {
	r.sendHeader(resp.StatusCode, resp.Header, int(resp.ContentLength))
	r.watchGaps()
	for b := head; ; {
		now := time.Now()
		if err := r.writeClient(b, now); err != nil {
			return r.writeFailure(ctx, err)
		}
		n, err := r.readEngineGap(resp.Body, r.stream.buf)
		if b = r.stream.buf[:n]; err == nil {
			continue
		}
		if !errors.Is(err, io.EOF) {
			r.cutConn = true // a JSON body can hold no error event: only the cut shows the failure
			return r.readFailure(ctx, err, true)
		}
		if err := r.writeClient(b, time.Now()); err != nil {
			return r.writeFailure(ctx, err)
		}
		return result{cause: causeOK}
	}
}

// readFailure returns the result of an attempt whose answer could not be read to its end.
func (r relay) readFailure(ctx context.Context, err error, begun bool) result {
	switch {
	case ctx.Err() != nil:
		why := contextCause(ctx)
		if (why == causeStalled || why == causeSilent) && !begun {
			why = causeFirstToken // the engine sent an empty delta and then nothing
		}
		return result{cause: why, err: err}
	case errors.Is(err, rankleg.ErrUnreachable):
		return result{cause: causeUnreachable, err: err}
	case errors.Is(err, rankleg.ErrNoLease):
		return result{cause: causeUnitLost}
	case begun:
		return result{cause: r.lostStreamCause(), err: err}
	default:
		return result{cause: causeEmpty, err: err}
	}
}

// lostStreamCause distinguishes a drained rank from a failed one.
func (r relay) lostStreamCause() cause {
	if r.app.router.isDraining(r.attempt.rank) {
		return causeDrained
	}
	return causeUpstreamLost
}

// closeBody ignores an error: the outcome is decided, and the connection is not used again.
func closeBody(resp *http.Response) { _ = resp.Body.Close() }

// countOutput counts output tokens of the stream.
func (r relay) countOutput(n int, now time.Time) {
	if r.attempt.firstToken.IsZero() {
		r.attempt.firstToken = now
	}
	r.in.tokens.Add(uint64(n)) //nolint:gosec // a count
	r.countedTokens += n
}

// reportProgress tells the rank that prefill is done, and later at intervals how many tokens the stream has.
// It runs after the write to the client, because a message wakes its receiver and the client should not wait
// for that. A stream that has ended needs no report: Done contains everything.
func (r relay) reportProgress(now time.Time) {
	a := &r.attempt
	switch {
	case a.firstToken.IsZero() || now.Sub(a.reportedAt) < progressEvery:
		return
	case a.reportedAt.IsZero():
		a.rank.Mailbox.Send(&msg.FirstToken{TicketID: a.ticket.ID, At: a.firstToken})
	default:
		a.rank.Mailbox.Send(&msg.Progress{TicketID: a.ticket.ID, Out: r.stream.tokens})
	}
	a.reportedAt = now
}
