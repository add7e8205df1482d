package ingress

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/apikeys"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/internal/tracefile"
	"github.com/dpserve/dpserve/internal/tracing"
	"github.com/dpserve/dpserve/routing"
)

// request is one inference request from its header to its last byte. Its memory is used again: everything is
// reset in release, also after a panic.
type request struct {
	in *Ingress
	question
	rankSearch
	clientAnswer
	kept     keptAnswer
	spans    *tracing.Request // nil: traces are off, or the request is no client's
	timer    phaseTimer
	onTicket func(t *msg.Ticket) // takeTicket, bound once: an attempt allocates no closure
	split    *split              // nil: the application has one pool, or the request computes no tokens
	hold     *held               // it ends with its tickets; nil: a request of a client, or a question
	why      *inquiry            // nil: a request of a client, or a reservation
}

// question is what the client asks.
type question struct {
	r           *http.Request
	route       openai.Route
	target      string       // path and query at the engine, of a route without a fixed path
	home        responseHome // of the response that the request is about; zero: of none
	start       time.Time
	id          string
	idHeader    []string    // {id}: the header value
	body        *bodyBuffer // nil before readBody and after releaseBody
	scan        openai.Body
	stripped    *bodyBuffer // body without the fields that only dpserve may set; nil if it has none
	engineBody  []byte      // for the engine
	bodySettled bool        // no engine connection may still read the body
	rest        *restBody   // of a large body that is passed on as it comes; nil: body is whole
	header      http.Header
	deadline    time.Time // of x-dpserve-timeout-ms; zero: none

	app       *appRoute
	prompt    prompt
	promptMem *promptMemory // of prompt; nil before prepare and after releaseBody
	query     routing.Request
	record    tracefile.Request // zero: it is not recorded
}

// rankSearch is the search for a rank that answers.
type rankSearch struct {
	plan          dispatch.Plan // of one leg; a request over two ranks has another one
	choice        routing.Decision
	mate          routing.RankRef // the prefill rank that the rank must have met; zero: none
	avoid         routing.RankRef // to be picked only if there is no other
	waiter        *waiter
	queueDeadline time.Time          // end of queue_s, counted from the first wait
	picks         int                // so far
	hadTurn       bool               // was the head of the queue already
	unitDue       time.Time          // see doubtsUnit; zero: no unit was doubted
	unitLives     bool               // likewise
	failure       *failure           // why no rank was picked
	attempt       attempt            // the running one, or the last
	number        uint32             // of its leg
	ahead         []dispatch.Command // of the plan, that has left the attempt before its end
	result        result             // of the attempt
	place         uncountedPlace     // of a request without a ticket
	held          groupWait          // for a lockstep group
	ends          ends
}

// clientAnswer is what the client has received of its answer.
type clientAnswer struct {
	w             http.ResponseWriter
	rc            *http.ResponseController
	flush         func() error
	stream        stream
	pace          readerPace
	deadlineSet   time.Time // when the write deadline was last set
	status        int       // of the answer that the client gets; 0: it gets none yet
	isOpen        bool      // it has the header of a stream, so that it hears something while it waits
	firstByte     time.Time // of the answer
	sendsWords    bool      // the answer is one that was kept: its attempt counts already
	cutConn       bool      // the connection must not end cleanly
	usage         openai.Usage
	countedTokens int // generated tokens already in Totals
}

func newRequest(in *Ingress) *request {
	req := &request{in: in}
	req.waiter, req.idHeader, req.onTicket = newWaiter(), make([]string, 1), req.takeTicket
	req.timer.alive.send = req.sendKeepalive
	req.stream.rankEnds = func() bool { return req.kept.isKept && (relay{req}).isEnding(nil) }
	req.held.answered = make(chan groupAnswer, 1)
	return req
}

// release resets the request and returns it to the pool.
func (req *request) release() {
	in := req.in
	req.endRecord()
	req.timer.detach()
	req.timer.alive = keepalives{send: req.timer.alive.send}
	req.dropTicket()
	req.place.leave()
	req.split.release()
	req.split, req.spans = nil, nil
	req.releaseBody()
	req.idHeader = make([]string, 1) // the old one is shared with the engine's and the client's header
	req.r, req.header, req.app, req.id, req.deadline, req.rest = nil, nil, nil, "", time.Time{}, nil
	req.target, req.home = "", responseHome{}
	req.query = routing.Request{Tried: req.query.Tried[:0]}
	req.prompt = prompt{}
	req.resetSearch()
	req.stream.release()
	req.clientAnswer = clientAnswer{stream: req.stream}
	req.kept.release(&in.keptMemory)
	in.requestPool.Put(req)
}

// resetSearch keeps the memory.
func (req *request) resetSearch() {
	s := &req.rankSearch
	s.queueDeadline, s.unitDue = time.Time{}, time.Time{}
	s.held.id = 0
	s.picks, s.number, s.hadTurn, s.unitLives = 0, 0, false, false
	s.failure, s.ahead, s.attempt, s.result = nil, nil, attempt{}, result{}
	s.ends.reset()
}

// releaseBody returns the body to the pool, with the memory of the prompt. The ingress calls it when the
// answer begins, because no other attempt follows, and when the request ends. A stream can last minutes and
// needs none of this memory. Safe to call twice.
func (req *request) releaseBody() {
	if !req.split.needsBody() {
		req.dropBody()
	}
}

// handle answers the request, or returns the failure to answer with.
func (req *request) handle(s *routeScope) *failure {
	req.extendWriteDeadline(req.start)
	req.setID()
	f := req.in.memory.refuse(req.start)
	if f == nil {
		f = refuseEncoded(req.w, req.r)
	}
	if f != nil {
		skipBody(req.w, req.r)
		return f
	}
	if f := req.readBody(req.in, req.w, req.rc, s); f != nil {
		if f.code == openai.CodeOverloaded {
			skipBody(req.w, req.r)
		} else {
			abandonBody(req.w, req.r)
		}
		return f
	}
	if req.rest == nil {
		if err := req.scanBody(req.body.b); err != nil {
			return badBody(err)
		}
	}
	defer req.rest.end()
	if f := req.locate(s); f != nil {
		return f
	}
	if f := req.findApp(s); f != nil {
		return f
	}
	if f := req.readOptions(); f != nil {
		return f
	}
	if f := req.prepare(); f != nil {
		return f
	}
	req.app.router.retryBudget.request(req.in.clock())
	req.beginKeepalive()
	return req.dispatch()
}

// setID sets the request id, also in the answer's header.
func (req *request) setID() {
	req.id = req.in.requestIDOf(req.r)
	req.idHeader[0] = req.id
	req.w.Header()[headerRequestID] = req.idHeader
}

// findApp finds the application by the body's model. A body without a model is valid if the scope has exactly
// one application.
func (req *request) findApp(s *routeScope) *failure {
	model, key := req.scan.Model, keyOf(req.r)
	if !req.scan.HasModel {
		switch {
		case s.only != nil:
			model = []byte(s.only.app.Model.ID)
		case len(s.apps) == 0:
			return unknownModel(nil, s, key)
		default:
			f := newFailure(openai.CodeInvalidRequest,
				"the body names no model; add \"model\": one of "+joinNames(s.namesFor(key)))
			f.param = "model"
			return f
		}
	}
	if req.app = s.find(string(model), key); req.app != nil {
		return nil
	}
	if s.models[string(model)] != nil && !key.Allows(string(model)) {
		req.in.access.Refused(telemetry.KeyModel)
	}
	return unknownModel(model, s, key)
}

// readOptions reads the x-dpserve headers that do not concern routing.
func (req *request) readOptions() *failure {
	if v := req.r.Header[headerTimeout]; len(v) > 0 {
		d, ok := parseTimeout(v[0])
		if !ok {
			return newFailure(openai.CodeInvalidRequest,
				"x-dpserve-timeout-ms must be a whole number of milliseconds from 1 to 86400000")
		}
		req.deadline = req.start.Add(d)
	}
	return nil
}

// prepare makes the input of the Router and the body for the engine, once for all attempts, and again for the
// rest of an answer that broke.
func (req *request) prepare() *failure {
	if req.promptMem, _ = req.in.promptPool.Get().(*promptMemory); req.promptMem == nil {
		req.promptMem = &promptMemory{}
	}
	req.prompt.promptMemory = *req.promptMem
	ar := req.app.router
	if f := req.prompt.fromBody(req.r.Context(), ar, req.route, ar.adapterOf(req.scan.Model), &req.scan,
		req.body.b, req.r.Header); f != nil {
		return f
	}
	req.beginRecord()
	req.goHome()
	req.waiter.tokens = int64(req.prompt.tokens)
	req.header = rankleg.EngineHeader(req.r.Header, req.idHeader, req.in.via)
	if f := prepareSplit(req); f != nil {
		return f
	}
	return req.stripBody()
}

// dispatch tries ranks until one has answered. It returns nil if the client has its answer.
func (req *request) dispatch() *failure {
	ctx := req.r.Context()
	if !req.deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, req.deadline, errDeadline)
		defer cancel()
	}
	req.beginPlan()
	ev := dispatch.Event{Kind: dispatch.EvStart}
	for cmds := req.plan.Step(req.instant(), &ev); ; {
		next := req.carryOut(cmds)
		switch {
		case next == nil:
			return req.finish(ctx, dispatch.AnswerNone, dispatch.OK)
		case next.Kind == dispatch.CmdPick:
			if !req.resume(ctx) {
				ev, cmds = dispatch.Event{Kind: dispatch.EvNoRank, Number: next.Number}, nil
				break
			}
			ev, cmds = search{req}.pick(ctx, next), nil
			if req.split.isRemote() {
				return req.split.run(ctx)
			}
		case next.Kind == dispatch.CmdAsk:
			ev, cmds = req.ask(ctx, next.Number)
		case next.Kind == dispatch.CmdReserve:
			ev, cmds = holder{req}.reserve(ctx, next.Number), nil
		default:
			return req.finish(ctx, next.Answer, next.Cause)
		}
		if cmds == nil {
			cmds = req.plan.Step(req.instant(), &ev)
		}
	}
}

// beginPlan begins the plan of a request that asks one rank at a time.
func (req *request) beginPlan() {
	needs := &req.app.router.inputs().needs
	cfg := dispatch.Config{
		IsAlone: true, IsHeld: req.hold != nil, Attempts: req.app.attempts, PerRank: needs.AttemptsPerRank,
		Refusals: maxRefusals,
	}
	if n := needs.AttemptsPerRequest; n > 0 { // the policy's number (cache-aware)
		cfg.Attempts = n
	}
	req.plan.Begin(&cfg, !req.scan.Stream)
}

// instant is the time for the plan: it needs one only where another request may put wrong blocks into a cache
// while the process stands still.
func (req *request) instant() dispatch.Instant {
	if s := req.split; s != nil && s.pair.traits.HasParams {
		return s.pair.proxy.Now()
	}
	return dispatch.Instant{}
}

// carryOut carries out commands that need no wait, and returns the one that does; nil: the request is over.
func (req *request) carryOut(cmds []dispatch.Command) (next *dispatch.Command) {
	for i := range cmds {
		switch cmd := &cmds[i]; cmd.Kind {
		case dispatch.CmdRelease:
			req.returnTicket(cmd)
		case dispatch.CmdSuspect:
			req.app.router.suspectNode(req.attempt.rank.Node)
		case dispatch.CmdPardon:
			req.app.router.pardon(cmd.Rank)
		case dispatch.CmdNote:
			req.split.note(cmd.Note)
		case dispatch.CmdPick, dispatch.CmdAsk, dispatch.CmdReserve, dispatch.CmdAnswer:
			next = cmd
		default:
		}
	}
	return next
}

// finish answers the client as its plan has ended. why is for an answer of dpserve's own.
func (req *request) finish(ctx context.Context, kind dispatch.AnswerKind, why dispatch.Cause) *failure {
	if req.hold != nil {
		req.hold.answer, req.hold.why = kind, why
		return nil
	}
	if req.status != 0 || req.cutConn {
		req.endBroken(ctx, kind)
		req.finishAnswered(&req.result) //nolint:contextcheck // the line is the request's
		return nil
	}
	req.countLast(req.ends.takeUnpaid(), "free")
	last, words := req.ends.get()
	if last == nil || last.cause != why {
		last = &result{cause: why}
	}
	switch kind {
	case dispatch.AnswerWords:
		if words != nil {
			req.result = relay{req}.sendWords(ctx, words)
			req.logAnswered(&req.result) //nolint:contextcheck // the line is the request's
			return nil
		}
	case dispatch.AnswerNoRank:
		if req.failure != nil {
			return req.failure
		}
	case dispatch.AnswerNoPrefill:
		return req.split.noPrefillFailure()
	case dispatch.AnswerTwoDied:
		return twoDied(last)
	case dispatch.AnswerDeadline:
		return finalFailure(&result{cause: dispatch.Deadline})
	case dispatch.AnswerNone, dispatch.AnswerStreamLost:
		if f := req.rest.fault(); f != nil {
			return f
		}
		return finalFailure(&result{cause: contextCause(ctx)})
	case dispatch.AnswerOwn, dispatch.AnswerTickets:
	}
	return finalFailure(last)
}

// extendWriteDeadline gives a slow reader more time, at most once a second, because setting a deadline takes
// a lock and a timer in the network poller. The deadline remains after the request, and the next request of
// the connection renews it, so the last flush has one too.
func (req *request) extendWriteDeadline(now time.Time) {
	if now.Sub(req.deadlineSet) < time.Second {
		return
	}
	req.deadlineSet = now
	// fails if this is no network connection, or a closed one, whose write fails then
	_ = req.rc.SetWriteDeadline(now.Add(req.in.timers.SlowReader))
}

// flusher finds the writer whose flush reports errors. gin's writer wraps it and hides the error.
func flusher(w http.ResponseWriter) func() error {
	for {
		switch t := w.(type) {
		case interface{ FlushError() error }:
			return t.FlushError
		case interface{ Unwrap() http.ResponseWriter }:
			w = t.Unwrap()
		default:
			return http.NewResponseController(w).Flush
		}
	}
}

// maxNameShown bounds what an error repeats of a client's text.
const maxNameShown = 100

func unknownModel(model []byte, s *routeScope, key *apikeys.Key) *failure {
	shown := string(bytes.ToValidUTF8(model[:min(len(model), maxNameShown)], []byte("?")))
	names := s.namesFor(key)
	f := newFailure(openai.CodeModelNotFound, "the model `"+shown+"` does not exist; there are: "+
		joinNames(names))
	switch {
	case len(s.apps) == 0:
		f.message = "the model `" + shown +
			"` does not exist: no application is deployed here; deploy one with `dpserve deploy FILE`"
	case len(names) == 0:
		f.message = "the model `" + shown + "` does not exist; none is deployed here that this key may use"
	}
	f.param = "model"
	return f
}

// answerFailure sends an answer of dpserve's own. It writes exactly one log line.
func (req *request) answerFailure(f *failure) {
	req.countAnswer(f.status)
	req.logLine(failureLevel(f.status), "request not served", f.result(), slog.Int("code", f.status))
	if f.clientGone {
		req.cutConn = true // a client that still reads must not see an empty answer
		return
	}
	if req.isOpen {
		event := openai.ErrorEvent(nil, req.route, f.status, "", f.code, f.message)
		_ = relay{req}.endWithEvent(event) // the connection is cut in any case
		return
	}
	h := req.w.Header()
	req.setOwnHeaders(h, nil)
	if f.retryAfter > 0 {
		h["Retry-After"] = []string{strconv.Itoa(f.retryAfter)}
	}
	req.extendWriteDeadline(time.Now())
	writeError(req.w, req.route, f)
}

// finishAnswered counts and logs a request whose answer has begun.
func (req *request) finishAnswered(res *result) {
	req.app.router.metrics.Load().Attempt(res.cause.String(), "free")
	req.logAnswered(res)
}

// logAnswered logs a request that has got an answer.
func (req *request) logAnswered(res *result) {
	code := req.status
	if code < http.StatusBadRequest && (req.cutConn || res.cause == dispatch.ErrorEvent) {
		code = codeOf(res)
	}
	switch {
	case req.cutConn || res.cause == dispatch.ErrorEvent:
		req.logLine(failureLevel(code), "request failed after its first byte", res, slog.Int("code", code))
	case code >= http.StatusInternalServerError:
		req.logLine(slog.LevelWarn, "request not served", res, slog.Int("code", code))
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
	case dispatch.ClientGone, dispatch.SlowReader:
		return statusClientGone
	case dispatch.ErrorEvent:
		return res.status
	default:
		code, _ := streamError(res.cause)
		return openai.Status(code)
	}
}

// countAnswer updates metrics and totals.
func (req *request) countAnswer(code int) {
	req.in.answered.Add(1)
	req.split.countPlain(code)
	req.endSpan(code)
	if req.app == nil {
		req.in.metrics.RequestRefused(req.route.String(), code)
		return
	}
	var ttft time.Duration
	if !req.firstByte.IsZero() && req.scan.Stream {
		ttft = req.firstByte.Sub(req.start)
	}
	metrics := req.app.router.metrics.Load()
	metrics.Request(req.route.String(), code, time.Since(req.start), ttft)
	if req.scan.Stream {
		metrics.Stream(code, ttft, req.timePerToken())
	}
}

// timePerToken is the mean time per token after the first; 0 = there were no others.
func (req *request) timePerToken() time.Duration {
	n := req.outputTokens()
	if n < 2 || req.stream.lastToken.IsZero() || req.firstByte.IsZero() {
		return 0
	}
	return req.stream.lastToken.Sub(req.firstByte) / time.Duration(n-1)
}

// setOwnHeaders sets the headers that name the application and the rank.
func (req *request) setOwnHeaders(h http.Header, rk *rank) {
	h[headerRequestID] = req.idHeader
	if req.app == nil {
		return
	}
	h[headerApp] = req.app.nameValue
	req.split.setHeaders(h)
	if rk != nil {
		h[headerGroup], h[headerRank] = rk.values.group, rk.values.rank
		if req.prompt.lookedUp { // predicted at dispatch; the engine's own number is in its usage
			h[headerCached] = []string{strconv.Itoa(req.query.HitOn(rk.ID))}
		}
	}
	n := req.ends.count()
	if rk != nil && !req.sendsWords {
		n++
	}
	if h[headerAttempts] = firstAttempt; n != 1 {
		h[headerAttempts] = []string{strconv.Itoa(n)}
	}
}

// firstAttempt is the header value of most answers, which share it.
var firstAttempt = []string{"1"}

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
		slog.Int("attempt", req.ends.count()), slog.Float64(
			"dur_ms", float64(time.Since(req.start).Microseconds())/1000))
	if key := keyOf(req.r); key != nil {
		attrs = append(attrs, slog.String("key", key.Name))
	}
	if req.app != nil {
		attrs = append(attrs, slog.String("app", req.app.app.Name))
	}
	attrs = req.split.appendAttrs(attrs)
	if rk := req.attempt.rank; rk != nil {
		attrs = append(attrs, slog.String("unit", rk.Unit), slog.Int("group", rk.ID.Group()),
			slog.Int("rank", rk.ID.Rank()), slog.Uint64("epoch", rk.Epoch))
	}
	attrs = append(attrs, res.attrs(req.in.hash(), req.in.log.Enabled(ctx, slog.LevelDebug))...)
	req.in.log.LogAttrs(ctx, level, text, attrs...) //nolint:sloglint // text is a constant of each caller
}
