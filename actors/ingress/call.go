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

// request is one inference request from its header to its last byte. Its memory is used again: everything is
// reset in release, also after a panic.
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

// serve answers one inference request of a route scope.
func (in *Ingress) serve(w http.ResponseWriter, r *http.Request, s *routeScope, route openai.Route) {
	in.serveWith(w, r, s, route, nil)
}

// serveWith is serve with a function that sets what the router's own API asks for beyond headers; nil:
// nothing.
func (in *Ingress) serveWith(w http.ResponseWriter, r *http.Request, s *routeScope, route openai.Route,
	demand func(*request)) {
	req, _ := in.requestPool.Get().(*request)
	in.inflight.Add(1)
	req.w, req.r, req.route, req.start, req.bodySettled = w, r, route, time.Now(), true
	req.rc = http.NewResponseController(w)
	req.flush = flusher(w)
	cut, whole, rc := false, false, req.rc
	defer func() {
		in.inflight.Add(-1)
		// after a panic an engine connection may still read the buffers
		req.bodySettled = req.bodySettled && whole
		req.release()
		if cut { // the client must not take a broken stream for a complete one
			if !r.ProtoAtLeast(1, 1) {
				_ = rc.SetWriteDeadline(resetAtClose) // only network connections have deadlines
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

// release resets the request and returns it to the pool.
func (req *request) release() {
	in := req.in
	req.timer.detach()
	req.releaseBody()
	req.idHeader = make([]string, 1) // the old one is shared with the engine's and the client's header
	clear(req.tried)
	req.w, req.rc, req.flush, req.r, req.header, req.app = nil, nil, nil, nil, nil, nil
	req.query = routing.Request{Tried: req.query.Tried[:0]}
	req.prompt = prompt{}
	req.deadline, req.queueDeadline, req.deadlineSet, req.firstByte = time.Time{}, time.Time{}, time.Time{},
		time.Time{}
	req.diedOn, req.countedTrip = nil, false
	req.tried, req.hadTurn, req.attempts, req.status, req.cutConn, req.countedTokens, req.id = req.tried[:0],
		false, 0, 0, false, 0, ""
	req.usage, req.pace = openai.Usage{}, readerPace{}
	req.attempt = attempt{}
	req.stream.release()
	in.requestPool.Put(req)
}

// releaseBody returns the body to the pool, with the memory of the prompt. The ingress calls it when the
// answer begins, because no other attempt follows, and when the request ends. A stream can last minutes and
// needs none of this memory. Safe to call twice.
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

// handle answers the request, or returns the failure to answer with.
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

// setID sets the request id, also in the answer's header.
func (req *request) setID() {
	req.id = req.in.requestIDOf(req.r)
	req.idHeader[0] = req.id
	req.w.Header()[headerRequestID] = req.idHeader
}

// requestIDOf returns the client's x-request-id if it is valid, otherwise a new id.
func (in *Ingress) requestIDOf(r *http.Request) string {
	if ids := r.Header[headerRequestID]; len(ids) == 1 && validRequestID(ids[0]) {
		return ids[0]
	}
	return newRequestID(mix(in.requestID()))
}

// findApp finds the application by the body's model. A body without a model is valid if the scope has exactly
// one application.
func (req *request) findApp(s *routeScope) *failure {
	if !req.scan.HasModel {
		req.app = s.only
		switch {
		case req.app != nil:
			return nil
		case len(s.apps) == 0:
			return unknownModel(nil, s)
		}
		f := newFailure(openai.CodeInvalidRequest,
			"the body names no model; add \"model\": one of "+joinNames(s.names))
		f.param = "model"
		return f
	}
	if req.app = s.models[string(req.scan.Model)]; req.app == nil {
		return unknownModel(req.scan.Model, s)
	}
	return nil
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

// prepare makes the input of the Router and the body for the engine, once for all attempts.
func (req *request) prepare() *failure {
	if req.promptMem, _ = req.in.promptPool.Get().(*promptMemory); req.promptMem == nil {
		req.promptMem = &promptMemory{}
	}
	req.prompt.promptMemory = *req.promptMem
	if f := req.prompt.fromBody(req.r.Context(), req.app.router, req.route, &req.scan, req.body.b,
		req.r.Header); f != nil {
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

// dispatch tries ranks until one has answered. It returns nil if the client has its answer.
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
	req.hadTurn = true // no later request may overtake it
	switch res.cause {
	case causeFull:
		return nil // not an attempt: the Router's view was outdated
	case causeUnreachable:
		ar.metrics.Load().Attempt(what.name, "free")
		ar.suspectNode(rk.node)
		return nil // not an attempt: no engine was asked
	default:
	}
	req.attempts++
	req.tried = append(req.tried, rk)
	if what.death && (res.cause != causeUnitLost || ar.hasFailed(rk)) && req.killedTwoRanks(rk) {
		f := req.giveUp(res, "free")
		f.message, f.cause = "two ranks died while they had this request; it is not sent to a third one",
			"killed_two_ranks"
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
	req.logLine(slog.LevelDebug, "attempt failed, trying another rank",
		res) //nolint:contextcheck // the line is the request's
	return nil
}

// killedTwoRanks records that rk died while it had the request, and reports whether a rank of another unit
// had died with it before. Then the request itself may kill engines, and further attempts could take down the
// whole application. Ranks of one lockstep unit die together and count as one.
func (req *request) killedTwoRanks(rk *rank) bool {
	before := req.diedOn
	req.diedOn = rk
	return before != nil && (before.unit != rk.unit || before.epoch != rk.epoch)
}

// maxAttempts is the policy's number of attempts per request if it has one (cache-aware), otherwise the
// application's.
func (req *request) maxAttempts() int {
	if n := req.app.router.inputs().needs.AttemptsPerRequest; n > 0 {
		return n
	}
	return req.app.attempts
}

// giveUp counts the last attempt and returns the failure for the client.
func (req *request) giveUp(res *result, budget string) *failure {
	req.app.router.metrics.Load().Attempt(causePolicies[res.cause].name, budget)
	return finalFailure(res)
}

// extendWriteDeadline gives a slow reader more time, at most once a second, because setting a deadline takes
// a lock and a timer in the network poller. The deadline remains after the request, and the next request of
// the connection renews it, so the last flush has one too.
func (req *request) extendWriteDeadline(now time.Time) {
	if now.Sub(req.deadlineSet) < time.Second {
		return
	}
	req.deadlineSet = now
	if req.rc.SetWriteDeadline(now.Add(req.in.timers.SlowReader)) != nil {
		return // not a network connection, or closed: then the write fails
	}
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
	f := newFailure(openai.CodeModelNotFound, "the model `"+shown+"` does not exist; there are: "+joinNames(
		s.names))
	if len(s.apps) == 0 {
		f.message = "the model `" + shown +
			"` does not exist: no application is deployed here; deploy one with `dpserve deploy FILE`"
	}
	f.param = "model"
	return f
}
