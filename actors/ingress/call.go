package ingress

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/routing"
)

// request is one inference request from its header to its last byte. Its memory is used again: everything is reset in
// release, also after a panic.
type request struct {
	in         *Ingress
	w          http.ResponseWriter
	rc         *http.ResponseController
	flush      func() error
	r          *http.Request
	route      openai.Route
	start      time.Time
	id         string
	idHeader   []string    // {id}: the header value
	body       *bodyBuffer // nil before readBody and after releaseBody
	scan       openai.Body
	stripped   *bodyBuffer // body without the fields that only dpserve may set; nil if it has none
	engineBody []byte      // for the engine
	header     http.Header

	app           *appRoute
	prompt        prompt
	promptMem     *promptMemory // of prompt; nil before prepare and after releaseBody
	query         routing.Request
	choice        routing.Decision
	deadline      time.Time // of x-dpserve-timeout-ms; zero: none
	tried         []*rank   // one entry per failed attempt
	diedOn        *rank     // the last rank that died while it had this request; nil: none
	waiter        *waiter
	queueDeadline time.Time // end of queue_s, counted from the first wait
	hadTurn       bool      // was the head of the queue already
	countedTrip   bool      // a failure of it has counted towards a rank's trip

	attempt     attempt
	attempts    int
	bodySettled bool // no engine connection may still read the body
	timer       phaseTimer
	stream      stream

	pace          readerPace
	deadlineSet   time.Time // when the write deadline was last set
	status        int       // sent to the client; 0: nothing is sent
	firstByte     time.Time // of the answer
	cutConn       bool      // the connection must not end cleanly
	usage         openai.Usage
	countedTokens int // generated tokens already in Totals
}

func newRequest(in *Ingress) *request {
	req := &request{in: in, waiter: newWaiter(), idHeader: make([]string, 1)}
	return req
}

// serve answers one inference request in its scope.
func (in *Ingress) serve(w http.ResponseWriter, r *http.Request, s *routeScope, route openai.Route) {
	in.serveWith(w, r, s, route, nil)
}

// serveWith is serve with what the router's own API asks of a call beyond headers; nil: nothing.
func (in *Ingress) serveWith(w http.ResponseWriter, r *http.Request, s *routeScope, route openai.Route, demand func(*request)) {
	req, _ := in.requestPool.Get().(*request)
	in.inflight.Add(1)
	req.w, req.r, req.route, req.start, req.bodySettled = w, r, route, time.Now(), true
	req.rc = http.NewResponseController(w)
	req.flush = flusher(w)
	cut, whole, rc := false, false, req.rc
	defer func() {
		in.inflight.Add(-1)
		req.bodySettled = req.bodySettled && whole // after a panic nobody knows who still reads the buffers
		req.release()
		if cut { // the client must not take a broken stream for a whole one
			if !r.ProtoAtLeast(1, 1) {
				_ = rc.SetWriteDeadline(resetAtClose) // an answer that goes to no connection has none
			}
			panic(http.ErrAbortHandler)
		}
	}()
	if demand != nil {
		demand(req)
	}
	if f := req.handle(s); f != nil {
		req.answerFailure(f)
	}
	cut, whole = req.cutConn, true
}

// release resets the call and gives it back.
func (req *request) release() {
	in := req.in
	req.timer.detach()
	req.releaseBody()
	req.idHeader = make([]string, 1) // the old one is in the engine's and the client's header
	clear(req.tried)
	req.w, req.rc, req.flush, req.r, req.header, req.app = nil, nil, nil, nil, nil, nil
	req.query = routing.Request{Tried: req.query.Tried[:0]}
	req.prompt = prompt{}
	req.deadline, req.queueDeadline, req.deadlineSet, req.firstByte = time.Time{}, time.Time{}, time.Time{}, time.Time{}
	req.diedOn, req.countedTrip = nil, false
	req.tried, req.hadTurn, req.attempts, req.status, req.cutConn, req.countedTokens, req.id = req.tried[:0], false, 0, 0, false, 0, ""
	req.usage, req.pace = openai.Usage{}, readerPace{}
	req.attempt = attempt{}
	req.stream.release()
	in.requestPool.Put(req)
}

// releaseBody gives the body back, with everything that was made of it or points into it: the answer begins, so no other attempt is made,
// or the request is over. A stream may go on for minutes, and needs none of it. Safe to call twice.
func (req *request) releaseBody() {
	in := req.in
	in.bodies.give(req.body, req.bodySettled)
	in.bodies.give(req.stripped, req.bodySettled)
	req.body, req.stripped, req.engineBody = nil, nil, nil
	req.scan.Forget()
	req.query.Text, req.query.Blocks, req.query.Hits = nil, nil, nil
	if req.promptMem != nil {
		*req.promptMem = req.prompt.giveMemory()
		in.promptPool.Put(req.promptMem)
		req.promptMem = nil
	}
}

// handle takes the request to its answer, or to what is to be answered instead.
func (req *request) handle(s *routeScope) *failure {
	req.extendWriteDeadline(req.start)
	req.setID()
	f := req.in.memory.refuse(req.start)
	if f == nil {
		f = req.readBody()
	}
	if f != nil {
		abandonBody(req.w, req.r)
		return f
	}
	if err := req.scan.Scan(req.route, req.body.b); err != nil {
		return badBody(err)
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
	return req.dispatch()
}

// setID gives the request its id, and the answer too.
func (req *request) setID() {
	req.id = req.in.requestIDOf(req.r)
	req.idHeader[0] = req.id
	req.w.Header()[headerRequestID] = req.idHeader
}

// requestIDOf takes the client's x-request-id if it can stand in a log line, else makes one.
func (in *Ingress) requestIDOf(r *http.Request) string {
	if ids := r.Header[headerRequestID]; len(ids) == 1 && validRequestID(ids[0]) {
		return ids[0]
	}
	return newRequestID(mix(in.requestID()))
}

// findApp picks the application by the body's model; without one it must be the only application there is.
func (req *request) findApp(s *routeScope) *failure {
	if !req.scan.HasModel {
		req.app = s.only
		switch {
		case req.app != nil:
			return nil
		case len(s.apps) == 0:
			return unknownModel(nil, s)
		}
		f := newFailure(openai.CodeInvalidRequest, "the body names no model; add \"model\": one of "+joinNames(s.names))
		f.param = "model"
		return f
	}
	if req.app = s.models[string(req.scan.Model)]; req.app == nil {
		return unknownModel(req.scan.Model, s)
	}
	return nil
}

// readOptions reads those of dpserve's own request headers that do not concern the routing.
func (req *request) readOptions() *failure {
	if v := req.r.Header[headerTimeout]; len(v) > 0 {
		d, ok := parseTimeout(v[0])
		if !ok {
			return newFailure(openai.CodeInvalidRequest, "x-dpserve-timeout-ms must be a whole number of milliseconds from 1 to 86400000")
		}
		req.deadline = req.start.Add(d)
	}
	return nil
}

// prepare makes what goes to the Router and to the engine, once for all attempts.
func (req *request) prepare() *failure {
	if req.promptMem, _ = req.in.promptPool.Get().(*promptMemory); req.promptMem == nil {
		req.promptMem = &promptMemory{}
	}
	req.prompt.promptMemory = *req.promptMem
	if f := req.prompt.fromBody(req.r.Context(), req.app.router, req.route, &req.scan, req.body.b, req.r.Header); f != nil {
		return f
	}
	req.waiter.tokens = int64(req.prompt.tokens)
	req.engineBody = req.body.b
	if len(req.scan.Strip) > 0 {
		if req.stripped = req.in.bodies.take(len(req.body.b)); req.stripped == nil {
			return noBodyMemory()
		}
		req.stripped.b = req.scan.Spliced(req.stripped.b, req.body.b)
		req.engineBody = req.stripped.b
	}
	req.header = engineHeader(req.r.Header, req.idHeader)
	return nil
}

// dispatch tries ranks until one has answered; nil if the client has its answer.
func (req *request) dispatch() *failure {
	ctx := req.r.Context()
	if !req.deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, req.deadline, errDeadline)
		defer cancel()
	}
	var last *result
	for {
		rk, f := req.pick(ctx, last)
		if f != nil {
			return f
		}
		res := req.tryRank(ctx, rk)
		if req.status != 0 || req.cutConn {
			req.finishAnswered(&res)
			return nil
		}
		if f := req.decideRetry(ctx, rk, &res); f != nil {
			return f
		}
		if res.cause != causeFull && res.cause != causeUnreachable {
			last = &res
		}
	}
}

// decideRetry decides whether another rank is tried: nil means yes.
func (req *request) decideRetry(ctx context.Context, rk *rank, res *result) *failure {
	what, ar := causePolicies[res.cause], req.app.router
	if !what.retry {
		return req.giveUp(res, "free")
	}
	req.hadTurn = true // it had its turn: no later request overtakes it
	switch res.cause {
	case causeFull:
		return nil // no attempt: the view was wrong
	case causeUnreachable:
		ar.metrics.Load().Attempt(what.name, "free")
		ar.suspectNode(rk.node)
		return nil // no attempt: nobody was asked
	default:
	}
	req.attempts++
	req.tried = append(req.tried, rk)
	if what.death && (res.cause != causeUnitLost || ar.hasFailed(rk)) && req.killedTwoRanks(rk) {
		f := req.giveUp(res, "free")
		f.message, f.cause = "two ranks died while they had this request; it is not sent to a third one", "killed_two_ranks"
		return f
	}
	budget := "free"
	if !what.free && !ar.isLost(rk) {
		budget = "drawn"
	}
	if req.attempts >= req.maxAttempts() && !req.mergeUnitAttempts(ctx, rk, res.cause) {
		return req.giveUp(res, budget)
	}
	if budget == "drawn" && !ar.retryBudget.draw(req.in.clock()) {
		return req.giveUp(res, "empty")
	}
	ar.metrics.Load().Attempt(what.name, budget)
	ar.metrics.Load().Retry(what.name, budget)
	req.logLine(slog.LevelDebug, "attempt failed, trying another rank", res) //nolint:contextcheck // the line is the request's
	return nil
}

// killedTwoRanks notes that rk died while it had the request, and says whether another rank had died so before: the request itself may be
// what kills them, and would take the rest of the application along. Ranks of one lockstep unit die as one.
func (req *request) killedTwoRanks(rk *rank) bool {
	before := req.diedOn
	req.diedOn = rk
	return before != nil && (before.unit != rk.unit || before.epoch != rk.epoch)
}

// maxAttempts is the policy's number of attempts of a request, if it has one (cache-aware), else the application's.
func (req *request) maxAttempts() int {
	if n := req.app.router.inputs().needs.AttemptsPerRequest; n > 0 {
		return n
	}
	return req.app.attempts
}

func (req *request) giveUp(res *result, budget string) *failure {
	req.app.router.metrics.Load().Attempt(causePolicies[res.cause].name, budget)
	return finalFailure(res)
}

// extendWriteDeadline gives a slow reader its time, at most once a second: the deadline is coarse, because setting it costs a
// lock and a timer in the network poller. It stays when the
// request is over and is renewed by the next one on the connection, so that the last flush has one too.
func (req *request) extendWriteDeadline(now time.Time) {
	if now.Sub(req.deadlineSet) < time.Second {
		return
	}
	req.deadlineSet = now
	if req.rc.SetWriteDeadline(now.Add(req.in.timers.SlowReader)) != nil {
		return // not a network connection, or gone: the write will tell
	}
}

// flusher finds the flush that reports errors under gin's writer, which hides it.
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

func badBody(err error) *failure {
	f := newFailure(openai.CodeInvalidRequest, err.Error())
	if e, ok := asBodyError(err); ok {
		f.code, f.param, f.status = e.Code, e.Param, openai.Status(e.Code)
	}
	return f
}

// maxNameShown bounds what an error repeats of a client's text.
const maxNameShown = 100

func unknownModel(model []byte, s *routeScope) *failure {
	shown := string(bytes.ToValidUTF8(model[:min(len(model), maxNameShown)], []byte("?")))
	f := newFailure(openai.CodeModelNotFound, "the model `"+shown+"` does not exist; there are: "+joinNames(s.names))
	if len(s.apps) == 0 {
		f.message = "the model `" + shown + "` does not exist: no application is deployed here; deploy one with `dpserve deploy FILE`"
	}
	f.param = "model"
	return f
}
