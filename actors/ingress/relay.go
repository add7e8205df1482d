package ingress

import (
	"bytes"
	"context"
	"errors"
	"hash/maphash"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/continuation"
	"github.com/dpserve/dpserve/internal/engine/openai"
)

// relay is a request that an engine answers: it sends the answer to the client.
type relay struct{ *request }

// answer sends the engine's answer to the client.
func (r relay) answer(ctx context.Context, resp *http.Response) result {
	switch {
	case resp.StatusCode >= http.StatusBadRequest:
		return r.relayError(ctx, resp)
	case resp.StatusCode >= http.StatusMultipleChoices && !r.route.Again():
		resp.Header.Del("Location") // an internal address, here too
		return r.relayWhole(ctx, resp)
	case resp.StatusCode >= http.StatusMultipleChoices:
		// Its Location is an internal address, to which clients would send the prompt.
		return result{cause: dispatch.Redirected, status: resp.StatusCode}
	case isStream(resp.Header):
		return r.relayStream(ctx, resp)
	case r.kept.isResumed, r.isOpen:
		return result{cause: dispatch.NotContinued, status: resp.StatusCode}
	}
	r.timer.alive.every = 0
	switch {
	case resp.ContentLength < 0 && !r.route.Generates():
		return r.relayFlow(ctx, resp)
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
	s.watcher.Follow(r.route)
	if !r.kept.isResumed {
		r.beginKeeping()
	}
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
		if v == actionAborted && !r.isEnding(nil) {
			v = actionCommit
		}
		if v == actionCommit {
			if why := r.begins(); why != dispatch.OK {
				return result{cause: why}
			}
			if s.begun = true; r.kept.isResumed {
				r.releaseBody()
				r.countContinued("continued")
			} else {
				r.keepBody()
				r.noteResponse(s.buf[:s.inspected], true)
				r.openStream(resp)
			}
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
	s := &r.stream
	v := s.inspectRead(s.begun)
	if v == actionContinue && errors.Is(err, io.EOF) {
		v = s.endOfBody(s.begun)
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
	if !s.lastToken.IsZero() && s.begun && now.After(s.lastToken) {
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
	if !s.begun || s.inspected == 0 {
		return nil
	}
	if s.watcher.Finishing() {
		r.readUsage(s.buf[:s.inspected])
	}
	pass, err := r.passEvents(s.buf[:s.inspected])
	if err != nil || len(pass) == 0 {
		s.dropSent(s.inspected)
		return err
	}
	conn := startGather(r.r, len(pass))
	err = r.writeClient(pass, now)
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
			return result{cause: dispatch.ErrorEvent, engine: s.engineError, status: s.engineError.Status}
		}
		return result{cause: dispatch.OK}
	case actionFail:
		return result{cause: r.lostStreamCause(), engine: s.engineError}
	case actionReject:
		return r.rejectStream(ctx)
	case actionAborted:
		return result{cause: dispatch.Aborted}
	default:
		return result{cause: dispatch.Empty}
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
	header := http.Header{"Content-Type": {"application/json"}}
	n := openai.EventEnd(s.buf[s.inspected:s.filled], 0)
	if n < 0 {
		n = s.filled - s.inspected
	}
	body := openai.EventData(s.buf[s.inspected : s.inspected+n])
	res := r.judge(status, &s.engineError)
	if !r.passes(&res, header, body) {
		return res
	}
	return r.sendWhole(ctx, status, header, body, res)
}

// endInterrupted ends a stream whose body broke off.
func (r relay) endInterrupted(ctx context.Context, err error) result {
	res := r.readFailure(ctx, err, r.stream.begun)
	switch {
	case r.stream.passedError: // the client knows already that the answer has failed
		r.cutConn = true
		return result{cause: dispatch.ErrorEvent, engine: r.stream.engineError, err: err}
	case res.cause == dispatch.ClientGone && r.stream.begun:
		r.cutConn = true
	}
	return res
}

// breakStream ends a stream after its first byte: it sends an error event in the route's shape, no [DONE] and
// no invented finish_reason, and cuts the connection, so that the client does not take the stream for a
// complete one.
func (r relay) breakStream(why dispatch.Cause) {
	code, message := streamError(why)
	event := openai.ErrorEvent(nil, r.route, openai.Status(code), "", code, message)
	_ = r.endWithEvent(event) // the connection is cut in any case
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
	now := time.Now()
	r.firstByte, r.status = now, status
	if r.isOpen {
		r.releaseBody()
		return
	}
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
	r.timer.alive.last = now
	if !r.pace.beginWrite(now, len(b), r.in.timers.SlowReader) {
		return errSlowReader
	}
	_, err := r.w.Write(b) //nolint:gosec // JSON or events of the engine's, and no content type of HTML
	return err
}

// writeFailure returns the result of an attempt whose answer could not be written.
func (r relay) writeFailure(ctx context.Context, err error) result {
	if errors.Is(err, continuation.ErrAnotherAnswer) {
		return result{cause: dispatch.NotContinued, err: err}
	}
	r.cutConn = true
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return result{cause: dispatch.SlowReader, err: err}
	case ctx.Err() != nil && contextCause(ctx) == dispatch.Drained:
		return result{cause: dispatch.Drained, err: err}
	default:
		return result{cause: dispatch.ClientGone, err: err}
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
	r.timer.watchGaps(gapWatch{
		router: r.app.router, rank: r.attempt.rank, every: r.app.between, most: r.app.firstToken,
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
	res := r.judge(resp.StatusCode, &e)
	if !r.passes(&res, resp.Header, body) {
		return res
	}
	if !whole && !r.isOpen {
		return r.relayRest(ctx, resp, body, res)
	}
	return r.sendWhole(ctx, resp.StatusCode, resp.Header, body, res)
}

// judge is what an engine's error means.
func (r relay) judge(status int, e *openai.EngineError) result {
	res := judgeAnswer(status, e, r.rankFault(r.app.router, r.attempt.rank))
	if !r.route.Again() && (res.cause == dispatch.EngineError || res.cause == dispatch.Timeout) {
		res.cause = dispatch.Passed
	}
	return res
}

// rankFault reports whether a refusal of the model, the key or the route is the rank's own fault: another one
// of its pool has answered the model well of late, and the request names no rank.
func (r relay) rankFault(ar *appRouter, rk *rank) bool {
	return r.route.IsBasic() && !r.prompt.hasDirect &&
		ar.estimates.answers.hasSibling(r.scan.Model, rk.ref(), r.in.clock())
}

// judgeAnswer is what an engine's error means. A message that says no more than its status tells no failure
// from another.
func judgeAnswer(status int, e *openai.EngineError, isRanks bool) result {
	res := result{engine: *e, status: status, cause: dispatch.Classify(dispatch.Answer{
		Status: status, Type: e.Type, Text: e.Message, IsBare: e.IsBare, IsDead: e.IsDead(), IsRanks: isRanks,
	})}
	if e.Message != "" && !strings.EqualFold(e.Message, http.StatusText(status)) {
		res.text = maphash.String(restrictionSeed, e.Message) | 1
	}
	return res
}

// passes reports whether the client gets the engine's error now. If not, its words are kept: it may get them
// when no rank is left to ask.
func (r relay) passes(res *result, header http.Header, body []byte) bool {
	if r.mayRelay(r.eventOf(dispatch.EvAnswered, res)) {
		r.app.router.markFirstByte(&r.attempt)
		return true
	}
	r.attempt.busyFor = readRetryAfter(header)
	if res.cause.Row().Words {
		r.ends.keepWords(heldWords{*res, header, bytes.Clone(body)})
	}
	return false
}

// begins reports whether the client may get the content that begins now; OK: it may.
func (r relay) begins() dispatch.Cause {
	if !r.app.router.markFirstByte(&r.attempt) {
		return dispatch.UnitLost
	}
	ok := result{cause: dispatch.OK}
	switch {
	case r.mayRelay(r.eventOf(dispatch.EvContent, &ok)):
	case r.split.isUnderWay():
		return dispatch.GivenUp
	default:
		return dispatch.StoodStill
	}
	r.app.router.estimates.answers.note(r.scan.Model, r.attempt.rank.ref(), r.in.clock())
	return dispatch.OK
}

// sendWords sends what an engine has said before.
func (r relay) sendWords(ctx context.Context, w *heldWords) result {
	h := w.header
	if w.cause == dispatch.Busy && len(h["Retry-After"]) == 0 {
		h = h.Clone()
		h["Retry-After"] = []string{strconv.Itoa(r.app.router.retryAfter())}
	}
	r.sendsWords = true
	return r.sendWhole(ctx, w.status, h, w.body, w.result)
}

// sendWhole sends an answer that is completely in memory. Where the client has the header of a stream, it is
// an error.
func (r relay) sendWhole(ctx context.Context, status int, header http.Header, body []byte,
	res result,
) result {
	var err error
	if r.isOpen {
		err = r.sendErrorEvent(status, body)
	} else {
		r.sendHeader(status, header, len(body))
		err = r.writeClient(body, r.firstByte)
	}
	if err != nil {
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
	case whole && len(body) == 0 && r.route.Generates():
		return result{cause: dispatch.Empty, status: resp.StatusCode}
	case whole && r.route.Generates() && openai.Aborted(body) && r.isEnding(body):
		return result{cause: dispatch.Aborted, status: resp.StatusCode}
	}
	if why := r.begins(); why != dispatch.OK {
		return result{cause: why}
	}
	if !whole {
		return r.relayRest(ctx, resp, body, result{cause: dispatch.OK})
	}
	r.noteResponse(body, false)
	if u, ok := openai.ParseUsage(body); ok {
		r.usage = u
	}
	return r.sendWhole(ctx, resp.StatusCode, resp.Header, body, result{cause: dispatch.OK})
}

// relayFlow relays an answer of no announced length that is no stream of events, such as sound, as it comes.
func (r relay) relayFlow(ctx context.Context, resp *http.Response) result {
	s := &r.stream
	s.reset(0)
	n, err := r.readEngine(resp.Body, s.buf, time.Now(), r.firstTokenDue(), errFirstToken)
	if err != nil && !errors.Is(err, io.EOF) {
		return r.readFailure(ctx, err, false)
	}
	if why := r.begins(); why != dispatch.OK {
		return result{cause: why}
	}
	ok := result{cause: dispatch.OK}
	if err != nil {
		return r.sendWhole(ctx, resp.StatusCode, resp.Header, s.buf[:n], ok)
	}
	return r.relayRest(ctx, resp, s.buf[:n], ok)
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
func (r relay) relayRest(ctx context.Context, resp *http.Response, head []byte, res result) result {
	r.timer.alive.every = 0
	r.sendHeader(resp.StatusCode, resp.Header, int(resp.ContentLength))
	r.watchGaps()
	for b := head; ; {
		now := time.Now()
		if err := r.writeClient(b, now); err != nil {
			return r.writeFailure(ctx, err)
		}
		if resp.ContentLength < 0 {
			_ = r.flush() // the next write fails as well
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
		return res
	}
}

// readFailure returns the result of an attempt whose answer could not be read to its end.
func (r relay) readFailure(ctx context.Context, err error, begun bool) result {
	res := failedRead(ctx, err, begun)
	if res.cause == dispatch.UpstreamLost {
		res.cause = r.lostStreamCause()
	}
	return res
}

// isEnding reports whether an answer that the engine gave up without a token is that of a rank which ends:
// its engine gives up all of its requests then. Any other one was given up because somebody wanted that,
// and goes to the client.
func (r relay) isEnding(body []byte) bool {
	isLost, _ := r.app.router.lossOf(r.attempt.rank)
	u, ok := openai.ParseUsage(body)
	return (isLost || r.app.router.isDraining(r.attempt.rank)) && (!ok || u.CompletionTokens == 0)
}

// lostStreamCause distinguishes a drained rank from a failed one.
func (r relay) lostStreamCause() dispatch.Cause {
	if r.app.router.isDraining(r.attempt.rank) {
		return dispatch.Drained
	}
	return dispatch.UpstreamLost
}

// closeBody ignores an error: the outcome is decided, and the connection is not used again.
func closeBody(resp *http.Response) { _ = resp.Body.Close() }

// countOutput counts output tokens of the stream.
func (r relay) countOutput(n int, now time.Time) {
	if r.attempt.firstToken.IsZero() {
		r.attempt.firstToken = now
		heldRequest(r).noteFirstToken()
	}
	r.in.tokens.Add(uint64(n))
	r.countedTokens += n
}

// reportProgress tells the rank that prefill is done, and later at intervals how many tokens the stream has.
// It runs after the write to the client, because a message wakes its receiver and the client should not wait
// for that. A stream that has ended needs no report: Done contains everything.
func (r relay) reportProgress(now time.Time) {
	a := &r.attempt
	switch {
	case a.firstToken.IsZero(), r.place.rk != nil, now.Sub(a.reportedAt) < progressEvery:
		return
	case a.reportedAt.IsZero():
		a.rank.Mailbox.Send(&msg.FirstToken{TicketID: a.ticket.ID, At: a.firstToken})
	default:
		a.rank.Mailbox.Send(&msg.Progress{TicketID: a.ticket.ID, Out: r.stream.tokens})
	}
	a.reportedAt = now
}
