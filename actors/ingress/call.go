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

// call is one inference request from its header to its last byte. Its memory is used again: everything is reset in
// release, also after a panic.
type call struct {
	in     *Ingress
	w      http.ResponseWriter
	rc     *http.ResponseController
	flush  func() error
	r      *http.Request
	route  openai.Route
	start  time.Time
	id     string
	ids    []string    // {id}: the header value
	body   *bodyBuffer // nil before it is read, and after letGo
	scan   openai.Body
	splice *bodyBuffer // body without the fields that only dpserve may set; nil if it has none
	send   []byte      // what goes to the engine
	header http.Header

	entry   *entry
	prompt  prompt
	memory  *promptMemory // of prompt; nil before prepare, and after letGo
	query   routing.Request
	choice  routing.Decision
	due     time.Time // of x-dpserve-timeout-ms; zero: none
	tried   []*rank   // each failed once
	died    *rank     // died while it had this request; nil: none
	waiter  *waiter
	waitDue time.Time // end of queue_s, from the first wait on
	rejoin  bool      // was the head of the queue already
	tripped bool      // a failure of it has counted towards a rank's trip

	attempt  attempt
	attempts int
	settled  bool // no engine connection may still read the body
	guard    guard
	stream   stream

	reader  readerPace
	written time.Time // when the write deadline was set last
	status  int       // sent, 0 while nothing is
	begun   time.Time // first byte
	cut     bool      // the connection must not end cleanly
	usage   openai.Usage
	counted int // generated tokens already in Totals
}

func newCall(in *Ingress) *call {
	c := &call{in: in, waiter: newWaiter(), ids: make([]string, 1)}
	return c
}

// serve answers one inference request in its scope.
func (in *Ingress) serve(w http.ResponseWriter, r *http.Request, s *scope, route openai.Route) {
	in.serveWith(w, r, s, route, nil)
}

// serveWith is serve with what the router's own API asks of a call beyond headers; nil: nothing.
func (in *Ingress) serveWith(w http.ResponseWriter, r *http.Request, s *scope, route openai.Route, demand func(*call)) {
	c, _ := in.calls.Get().(*call)
	in.inflight.Add(1)
	c.w, c.r, c.route, c.start, c.settled = w, r, route, time.Now(), true
	c.rc = http.NewResponseController(w)
	c.flush = flusher(w)
	cut, whole, rc := false, false, c.rc
	defer func() {
		in.inflight.Add(-1)
		c.settled = c.settled && whole // after a panic nobody knows who still reads the buffers
		c.release()
		if cut { // the client must not take a broken stream for a whole one
			if !r.ProtoAtLeast(1, 1) {
				_ = rc.SetWriteDeadline(resetAtClose) // an answer that goes to no connection has none
			}
			panic(http.ErrAbortHandler)
		}
	}()
	if demand != nil {
		demand(c)
	}
	if f := c.run(s); f != nil {
		c.refuse(f)
	}
	cut, whole = c.cut, true
}

// release resets the call and gives it back.
func (c *call) release() {
	in := c.in
	c.guard.end()
	c.letGo()
	c.ids = make([]string, 1) // the old one is in the engine's and the client's header
	clear(c.tried)
	c.w, c.rc, c.flush, c.r, c.header, c.entry = nil, nil, nil, nil, nil, nil
	c.query = routing.Request{Tried: c.query.Tried[:0]}
	c.prompt = prompt{}
	c.due, c.waitDue, c.written, c.begun = time.Time{}, time.Time{}, time.Time{}, time.Time{}
	c.died, c.tripped = nil, false
	c.tried, c.rejoin, c.attempts, c.status, c.cut, c.counted, c.id = c.tried[:0], false, 0, 0, false, 0, ""
	c.usage, c.reader = openai.Usage{}, readerPace{}
	c.attempt = attempt{}
	c.stream.release()
	in.calls.Put(c)
}

// letGo gives the body back, with everything that was made of it or points into it: the answer begins, so no other attempt is made,
// or the request is over. A stream may go on for minutes, and needs none of it. Safe to call twice.
func (c *call) letGo() {
	in := c.in
	in.bodies.give(c.body, c.settled)
	in.bodies.give(c.splice, c.settled)
	c.body, c.splice, c.send = nil, nil, nil
	c.scan.Forget()
	c.query.Text, c.query.Blocks, c.query.Hits = nil, nil, nil
	if c.memory != nil {
		*c.memory = c.prompt.giveMemory()
		in.prompts.Put(c.memory)
		c.memory = nil
	}
}

// run takes the request to its answer, or to what is to be answered instead.
func (c *call) run(s *scope) *failure {
	c.armWrite(c.start)
	c.identify()
	f := c.in.memory.refuse(c.start)
	if f == nil {
		f = c.readBody()
	}
	if f != nil {
		abandonBody(c.w, c.r)
		return f
	}
	if err := c.scan.Scan(c.route, c.body.b); err != nil {
		return badBody(err)
	}
	if f := c.find(s); f != nil {
		return f
	}
	if f := c.options(); f != nil {
		return f
	}
	if f := c.prepare(); f != nil {
		return f
	}
	c.entry.lane.budget.request(c.in.clock())
	return c.dispatch()
}

// identify gives the request its id, and the answer too.
func (c *call) identify() {
	c.id = c.in.identify(c.r)
	c.ids[0] = c.id
	c.w.Header()[headerRequestID] = c.ids
}

// identify takes the client's x-request-id if it can stand in a log line, else makes one.
func (in *Ingress) identify(r *http.Request) string {
	if ids := r.Header[headerRequestID]; len(ids) == 1 && validRequestID(ids[0]) {
		return ids[0]
	}
	return newRequestID(mix(in.requestID()))
}

// find picks the application by the body's model; without one it must be the only application there is.
func (c *call) find(s *scope) *failure {
	if !c.scan.HasModel {
		c.entry = s.only
		switch {
		case c.entry != nil:
			return nil
		case len(s.apps) == 0:
			return unknownModel(nil, s)
		}
		f := fail(openai.CodeInvalidRequest, "the body names no model; add \"model\": one of "+list(s.names))
		f.param = "model"
		return f
	}
	if c.entry = s.models[string(c.scan.Model)]; c.entry == nil {
		return unknownModel(c.scan.Model, s)
	}
	return nil
}

// options reads those of dpserve's own request headers that do not concern the routing.
func (c *call) options() *failure {
	if v := c.r.Header[headerTimeout]; len(v) > 0 {
		d, ok := parseTimeout(v[0])
		if !ok {
			return fail(openai.CodeInvalidRequest, "x-dpserve-timeout-ms must be a whole number of milliseconds from 1 to 86400000")
		}
		c.due = c.start.Add(d)
	}
	return nil
}

// prepare makes what goes to the Router and to the engine, once for all attempts.
func (c *call) prepare() *failure {
	if c.memory, _ = c.in.prompts.Get().(*promptMemory); c.memory == nil {
		c.memory = &promptMemory{}
	}
	c.prompt.promptMemory = *c.memory
	if f := c.prompt.fromBody(c.r.Context(), c.entry.lane, c.route, &c.scan, c.body.b, c.r.Header); f != nil {
		return f
	}
	c.waiter.tokens = int64(c.prompt.tokens)
	c.send = c.body.b
	if len(c.scan.Strip) > 0 {
		if c.splice = c.in.bodies.take(len(c.body.b)); c.splice == nil {
			return noBodyMemory()
		}
		c.splice.b = c.scan.Spliced(c.splice.b, c.body.b)
		c.send = c.splice.b
	}
	c.header = engineHeader(c.r.Header, c.ids)
	return nil
}

// dispatch tries ranks until one has answered; nil if the client has its answer.
func (c *call) dispatch() *failure {
	ctx := c.r.Context()
	if !c.due.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, c.due, errDeadline)
		defer cancel()
	}
	var last *result
	for {
		rk, f := c.pick(ctx, last)
		if f != nil {
			return f
		}
		res := c.try(ctx, rk)
		if c.status != 0 || c.cut {
			c.finish(&res)
			return nil
		}
		if f := c.judge(ctx, rk, &res); f != nil {
			return f
		}
		if res.cause != causeFull && res.cause != causeUnreachable {
			last = &res
		}
	}
}

// judge decides whether another rank is tried: nil means yes.
func (c *call) judge(ctx context.Context, rk *rank, res *result) *failure {
	what, l := rows[res.cause], c.entry.lane
	if !what.retry {
		return c.giveUp(res, "free")
	}
	c.rejoin = true // it had its turn: no later request overtakes it
	switch res.cause {
	case causeFull:
		return nil // no attempt: the view was wrong
	case causeUnreachable:
		l.meter.Load().Attempt(what.name, "free")
		l.doubt(rk.node)
		return nil // no attempt: nobody was asked
	default:
	}
	c.attempts++
	c.tried = append(c.tried, rk)
	if what.death && (res.cause != causeUnitLost || l.hasFailed(rk)) && c.killedAgain(rk) {
		f := c.giveUp(res, "free")
		f.message, f.cause = "two ranks died while they had this request; it is not sent to a third one", "killed_two_ranks"
		return f
	}
	budget := "free"
	if !what.free && !l.isLost(rk) {
		budget = "drawn"
	}
	if c.attempts >= c.maxAttempts() && !c.unitLost(ctx, rk, res.cause) {
		return c.giveUp(res, budget)
	}
	if budget == "drawn" && !l.budget.draw(c.in.clock()) {
		return c.giveUp(res, "empty")
	}
	l.meter.Load().Attempt(what.name, budget)
	l.meter.Load().Retry(what.name, budget)
	c.log(slog.LevelDebug, "attempt failed, trying another rank", res) //nolint:contextcheck // the line is the request's
	return nil
}

// killedAgain notes that rk died while it had the request, and says whether another rank had died so before: the request itself may be
// what kills them, and would take the rest of the application along. Ranks of one lockstep unit die as one.
func (c *call) killedAgain(rk *rank) bool {
	before := c.died
	c.died = rk
	return before != nil && (before.unit != rk.unit || before.epoch != rk.epoch)
}

// maxAttempts is the policy's number of attempts of a request, if it has one (cache-aware), else the application's.
func (c *call) maxAttempts() int {
	if n := c.entry.lane.reads().needs.AttemptsPerRequest; n > 0 {
		return n
	}
	return c.entry.attempts
}

func (c *call) giveUp(res *result, budget string) *failure {
	c.entry.lane.meter.Load().Attempt(rows[res.cause].name, budget)
	return final(res)
}

// armWrite gives a slow reader its time, at most once a second: the deadline is coarse, because setting it costs a
// lock and a timer in the network poller. It stays when the
// request is over and is renewed by the next one on the connection, so that the last flush has one too.
func (c *call) armWrite(now time.Time) {
	if now.Sub(c.written) < time.Second {
		return
	}
	c.written = now
	if c.rc.SetWriteDeadline(now.Add(c.in.timers.SlowReader)) != nil {
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
	f := fail(openai.CodeInvalidRequest, err.Error())
	if e, ok := asBodyError(err); ok {
		f.code, f.param, f.status = e.Code, e.Param, openai.Status(e.Code)
	}
	return f
}

// maxNameShown bounds what an error repeats of a client's text.
const maxNameShown = 100

func unknownModel(model []byte, s *scope) *failure {
	shown := string(bytes.ToValidUTF8(model[:min(len(model), maxNameShown)], []byte("?")))
	f := fail(openai.CodeModelNotFound, "the model `"+shown+"` does not exist; there are: "+list(s.names))
	if len(s.apps) == 0 {
		f.message = "the model `" + shown + "` does not exist: no application is deployed here; deploy one with `dpserve deploy FILE`"
	}
	f.param = "model"
	return f
}
