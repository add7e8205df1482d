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

// relay sends the engine's answer to the client.
func (req *request) relay(ctx context.Context, resp *http.Response) result {
	switch {
	case resp.StatusCode >= http.StatusBadRequest:
		return req.relayError(ctx, resp)
	case resp.StatusCode >= http.StatusMultipleChoices:
		// Its Location is an internal address, to which clients would send the prompt.
		return result{cause: causeStatus, status: resp.StatusCode}
	case isStream(resp.Header):
		return req.relayStream(ctx, resp)
	default:
		return req.relayWhole(ctx, resp)
	}
}

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
	req.timer.watchGaps(gapWatch{
		router: req.app.router, rank: a.rank, ticket: a.ticket.ID,
		limit: req.app.between, maxGap: req.app.firstToken,
	})
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
	res result,
) result {
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
	req.sendHeader(resp.StatusCode, resp.Header, int(resp.ContentLength))
	req.watchGaps()
	for b := head; ; {
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

// firstTokenDue is the deadline of the attempt's first token. An answer that is not streamed has no visible
// first token: its deadline is that of a stream with the same number of tokens.
func (req *request) firstTokenDue() time.Time {
	d := req.app.firstToken
	if req.route.Generates() && !req.scan.Stream {
		n := req.scan.MaxTokens
		if n < 0 || n > unknownTokens {
			n = unknownTokens
		}
		d += time.Duration(n) * req.app.between
	}
	return req.attempt.start.Add(d)
}

// askFailure returns the result of an attempt that brought no byte of an answer.
func (req *request) askFailure(ctx context.Context, err error) result {
	switch {
	case ctx.Err() != nil:
		return result{cause: contextCause(ctx), err: err}
	case errors.Is(err, rankleg.ErrUnreachable):
		return result{cause: causeUnreachable, err: err}
	case errors.Is(err, rankleg.ErrFirstToken):
		return result{cause: causeFirstToken, err: err}
	case rankleg.IsRefused(err):
		return result{cause: causeRefused, err: err}
	case rankleg.IsMalformed(err):
		return result{cause: causeMalformed, err: err}
	default:
		return result{cause: causeReset, err: err}
	}
}

// readFailure returns the result of an attempt whose answer could not be read to its end.
func (req *request) readFailure(ctx context.Context, err error, begun bool) result {
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
		return result{cause: req.lostStreamCause(), err: err}
	default:
		return result{cause: causeEmpty, err: err}
	}
}

// lostStreamCause distinguishes a drained rank from a failed one.
func (req *request) lostStreamCause() cause {
	if req.app.router.isDraining(req.attempt.rank) {
		return causeDrained
	}
	return causeUpstreamLost
}

func closeBody(resp *http.Response) {
	if err := resp.Body.Close(); err != nil {
		return // the outcome is decided, and the connection is not used again
	}
}

// countOutput counts output tokens of the stream.
func (req *request) countOutput(n int, now time.Time) {
	if req.attempt.firstToken.IsZero() {
		req.attempt.firstToken = now
	}
	req.in.tokens.Add(uint64(n)) //nolint:gosec // a count
	req.countedTokens += n
}

// reportProgress tells the rank that prefill is done, and later at intervals how many tokens the stream has.
// It runs after the write to the client, because a message wakes its receiver and the client should not wait
// for that. A stream that has ended needs no report: Done contains everything.
func (req *request) reportProgress(now time.Time) {
	a := &req.attempt
	switch {
	case a.firstToken.IsZero() || now.Sub(a.reportedAt) < progressEvery:
		return
	case a.reportedAt.IsZero():
		a.rank.Mailbox.Send(&msg.FirstToken{TicketID: a.ticket.ID, At: a.firstToken})
	default:
		a.rank.Mailbox.Send(&msg.Progress{TicketID: a.ticket.ID, Out: req.stream.tokens})
	}
	a.reportedAt = now
}

// returnTicket returns the ticket to the rank, exactly once, with what the attempt shows about the engine.
func (req *request) returnTicket(res *result) {
	a, what := &req.attempt, causePolicies[res.cause]
	var first time.Duration
	if !a.firstToken.IsZero() {
		first = a.firstToken.Sub(a.start)
	}
	a.rank.Mailbox.Send(&msg.Done{
		TicketID: a.ticket.ID, Outcome: what.done, Cause: what.name,
		PromptTokens: req.usage.PromptTokens, CachedTokens: req.usage.CachedTokens,
		HasCached: req.usage.HasCached, CompletionTokens: req.outputTokens(),
		FirstToken: first, Trip: req.countsToTrip(res), Busy: what.busy, Probe: what.probe,
	})
	req.app.router.estimates.recordServiceTime(time.Since(a.start))
	req.recordTokens()
}

// outputTokens is the engine's count of output tokens, or the number of chunks if that is larger.
func (req *request) outputTokens() int { return max(req.usage.CompletionTokens, req.stream.tokens) }

// recordTokens adds the tokens to the metrics and updates the estimate of bytes per token.
func (req *request) recordTokens() {
	n := req.outputTokens()
	req.in.tokens.Add(uint64(max(n-req.countedTokens, 0)))
	req.countedTokens = max(n, req.countedTokens)
	if req.usage.PromptTokens == 0 && n == 0 {
		return
	}
	req.app.router.metrics.Load().Tokens(req.usage.PromptTokens, req.usage.CachedTokens, n)
	if req.query.Estimated {
		req.app.router.estimates.tokens[req.route].ObservePrompt(&req.scan, req.usage.PromptTokens)
	}
}
