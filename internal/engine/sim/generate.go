package sim

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

func (s api) now() int64 { return time.Now().Unix() }

// newID is 16 hex digits, different for each call.
func (s api) newID() string {
	x := s.ids.Add(0x9E3779B97F4A7C15) // an odd step visits every value before it repeats one
	return fmt.Sprintf("%016x", (x^x>>31)*0xBF58476D1CE4E5B9)
}

// completions serves /v1/completions.
func (s api) completions(w http.ResponseWriter, r *http.Request) {
	s.generate(w, r, readCompletion, "cmpl-")
}

// chats serves /v1/chat/completions.
func (s api) chats(w http.ResponseWriter, r *http.Request) { s.generate(w, r, readChat, "chatcmpl-") }

// generate serves a generation route: read checks its body, prefix begins the ids of its requests.
func (s api) generate(w http.ResponseWriter, r *http.Request,
	read func(*fields, *settings) (*plan, *apiError), prefix string,
) {
	s.active.enter()
	defer s.active.leave()
	body, apiErr := s.body(r)
	if apiErr == nil {
		apiErr = s.earlyFailure()
	}
	if apiErr != nil {
		s.fail(w, r, apiErr)
		return
	}
	p, apiErr := read(body, s.set)
	if apiErr != nil {
		s.ranks[0].exchange.release(r.Context(), body.params)
		s.fail(w, r, apiErr)
		return
	}
	s.setRequestFields(p, r, prefix)
	s.answer(w, r, p)
}

// setRequestFields sets the fields of a plan that do not come from the body.
func (s api) setRequestFields(p *plan, r *http.Request, prefix string) {
	id := r.Header.Get("X-Request-Id")
	if id == "" || p.form != nil {
		id = s.newID()
	}
	p.id, p.created, p.rank = prefix+id, s.now(), noRank
	if rank, err := strconv.Atoi(strings.TrimSpace(r.Header.Get("X-data-parallel-rank"))); err == nil {
		p.rank = rank
	}
	if s.set.ForceIncludeUsage {
		p.includeUsage, p.contUsage = true, true
	}
}

// earlyFailure answers requests that fail before they are read: a dead core, an injected status.
func (s api) earlyFailure() *apiError {
	if s.dead.Load() {
		return internalError(msgEngineDead)
	}
	f := s.faults.hit(ModeHTTP500, ModeHTTP503)
	switch {
	case f == nil:
		return nil
	case f.Mode == ModeHTTP500:
		return internalError(msgInjected)
	}
	return &apiError{status: http.StatusServiceUnavailable, kind: kindInternal, message: msgInjected}
}

// answer runs a checked request.
func (s api) answer(w http.ResponseWriter, r *http.Request, p *plan) {
	fault := s.faults.hit(ModeBareDone, ModeErrorEvent, ModeCut, ModeAbort, ModeNoDone, ModeStall)
	if s.isStopping() || fault != nil && fault.Mode == ModeBareDone {
		s.stopped(w, r, p)
		return
	}
	late := p.late(s.cfg.firstIndex(), len(s.ranks))
	if late == nil && s.faults.hit(ModeBusy) != nil {
		late = busyError()
	}
	if late != nil {
		s.ranks[0].exchange.release(r.Context(), p.params)
		s.failLate(w, r, p, late)
		return
	}
	c := newCall(p, s.set, func(q *prompt) int { return p.room(q, s.set.Model.MaxModelLen) })
	rank := s.pick(p.rank)
	c.legs = prepareLegs(rank.exchange, c)
	fault = c.shortenToFault(fault)
	rank.load.Add(1)
	defer rank.load.Add(-1)
	rank.params(c)
	c.legs.start(r.Context())
	defer c.legs.end()
	if !rank.add(c) {
		s.failLate(w, r, p, busyError())
		return
	}
	if p.stream {
		s.stream(w, r, rank, c, fault)
		return
	}
	s.whole(w, r, rank, c, fault)
}

func (s api) isStopping() bool { return s.stopping.Load() || s.faults.is(ModeStopping) }

// stopped answers for an engine that takes no work any more: text needs its tokenizer, which is gone; ids are
// aborted at once.
func (s api) stopped(w http.ResponseWriter, r *http.Request, p *plan) {
	if p.stream && s.fromIDs(p) || p.stream && !s.isStopping() {
		s.sse(w)
		_, _ = w.Write([]byte(doneEvent))
		return
	}
	if !s.fromIDs(p) && s.isStopping() {
		s.fail(w, r, internalError(msgStopping))
		return
	}
	c := newCall(p, s.set, func(*prompt) int { return 1 })
	for i := range c.choices {
		c.choices[i].finish(em.FinishAbort)
	}
	s.writeJSON(w, http.StatusOK, c.answer(s.set))
}

func (s api) fromIDs(p *plan) bool { return !p.chat && p.prompts[0].fromIDs }

// failLate is an error that is found after the answer began: streams have sent their 200 by then.
func (s api) failLate(w http.ResponseWriter, r *http.Request, p *plan, e *apiError) {
	if !p.stream {
		s.fail(w, r, e)
		return
	}
	s.sse(w)
	_, _ = w.Write(p.appendFailure(nil, e))
}

// appendFailure appends how a stream of the plan ends that fails.
func (p *plan) appendFailure(b []byte, e *apiError) []byte {
	if _, is := p.form.(*asMessages); is {
		return appendNamed(b, "error", map[string]any{"error": e.messagesError()})
	}
	return append(e.event(b), doneEvent...)
}

func (s api) sse(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	w.WriteHeader(http.StatusOK)
	if f, ok := w.(http.Flusher); ok {
		f.Flush() // the status goes out before the first token
	}
}

// pick chooses the rank behind this port: the pinned one, else the least loaded, ties in turn.
func (s api) pick(pinned int) *rank {
	if pinned != noRank {
		return s.ranks[pinned-s.cfg.firstIndex()]
	}
	if len(s.ranks) == 1 {
		return s.ranks[0]
	}
	first := int(s.next.Add(1)) % len(s.ranks)
	best := s.ranks[first]
	for i := range s.ranks {
		if r := s.ranks[(first+i)%len(s.ranks)]; r.load.Load() < best.load.Load() {
			best = r
		}
	}
	return best
}

// whole waits for the end and answers at once.
func (s api) whole(w http.ResponseWriter, r *http.Request, rank *rank, c *call, fault *Fault) {
	if fault != nil && fault.AfterTokens == 0 && fault.Mode != ModeNoDone {
		rank.abort(c)
		s.strike(w, r, fault)
		return
	}
	for c.open.Load() > 0 {
		select {
		case <-c.bell:
		case <-r.Context().Done():
			rank.abort(c)
			return
		}
	}
	if e := c.failure(); e != nil {
		s.fail(w, r, e)
		return
	}
	if fault != nil && fault.Mode != ModeNoDone {
		s.strike(w, r, fault)
		return
	}
	s.writeJSON(w, http.StatusOK, c.answer(s.set))
}

// strike ends a call that does not stream as its fault says.
func (s api) strike(w http.ResponseWriter, r *http.Request, f *Fault) {
	switch f.Mode {
	case ModeCut:
		reset(r)
	case ModeStall:
		<-r.Context().Done()
	default:
		s.fail(w, r, codeError(f.code()))
	}
}

// maxPooledBuffer bounds what a finished stream leaves for the next one.
const maxPooledBuffer = 64 << 10

// buffers are reused by streams.
var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 4096); return &b }}

// writer is one stream on its way to the client.
type writer struct {
	set   *settings
	out   http.ResponseWriter
	flush http.Flusher
	call  *call
	fault *Fault
	buf   []byte
	sent  int // tokens, over all choices
	open  int // choices without their last chunk
	roles bool
}

// stream writes the events of a call as the engine makes them: everything that is there, then one flush.
func (s api) stream(w http.ResponseWriter, r *http.Request, rank *rank, c *call, fault *Fault) {
	buf, _ := buffers.Get().(*[]byte)
	out := &writer{set: s.set, out: w, call: c, fault: fault, buf: (*buf)[:0], open: len(c.choices)}
	out.flush, _ = w.(http.Flusher)
	defer func() {
		if cap(out.buf) <= maxPooledBuffer {
			*buf = out.buf[:0]
			buffers.Put(buf)
		}
	}()
	s.sse(w)
	for done := false; !done; {
		if out.due() {
			rank.abort(c)
			out.strike(r)
			return
		}
		select {
		case <-c.bell:
			done = out.write()
		case <-r.Context().Done():
			rank.abort(c)
			return
		}
	}
}

// write sends what is new; true = the stream is complete.
func (o *writer) write() bool {
	o.buf = o.buf[:0]
	failure := o.call.failure()
	o.chunks()
	done := o.open == 0 || failure != nil
	switch {
	case failure != nil:
		o.buf = o.call.plan.appendFailure(o.buf, failure)
	case done:
		o.ending()
	}
	o.send()
	return done
}

func (o *writer) send() {
	if len(o.buf) == 0 {
		return
	}
	_, _ = o.out.Write(o.buf) // a client that left is noticed by its context
	o.flush.Flush()
}

// chunks collects the events of all choices, as far as a fault lets them.
func (o *writer) chunks() {
	if o.call.plan.chat && o.call.plan.form == nil && !o.roles && o.anything() {
		o.roles = true
		for i := range o.call.choices {
			o.buf = o.call.choices[i].appendRole(o.buf)
		}
	}
	for i := range o.call.choices {
		ch := &o.call.choices[i]
		if ch.finished {
			continue
		}
		before := ch.sentTokens
		var done bool
		o.buf, done = ch.appendNew(o.buf, o.set, o.limit())
		o.sent += ch.sentTokens - before
		if done {
			o.open--
		}
	}
}

// anything reports whether there is a token or an end to tell.
func (o *writer) anything() bool {
	for i := range o.call.choices {
		if tokens, why := o.call.choices[i].progress(); tokens > 0 || why != 0 && o.call.failure() == nil {
			return true
		}
	}
	return false
}

// ending writes what follows the last choice.
func (o *writer) ending() {
	if o.call.plan.form != nil {
		return // the last event of the choice says that it is complete
	}
	if o.call.plan.includeUsage {
		o.buf = o.call.appendUsageEvent(o.buf, o.set)
	}
	if o.fault == nil || o.fault.Mode != ModeNoDone {
		o.buf = append(o.buf, doneEvent...)
	}
}

// limit is how many more tokens may go out before the fault strikes.
func (o *writer) limit() int {
	if !o.bounded() {
		return math.MaxInt
	}
	return o.fault.AfterTokens - o.sent
}

// bounded reports that the fault strikes after a number of tokens.
func (o *writer) bounded() bool {
	return o.fault != nil && (o.fault.Mode != ModeNoDone || o.fault.AfterTokens > 0)
}

// due reports that the fault strikes now.
func (o *writer) due() bool { return o.bounded() && o.sent >= o.fault.AfterTokens }

// strike ends the stream as its fault says.
func (o *writer) strike(r *http.Request) {
	switch o.fault.Mode {
	case ModeCut:
		reset(r)
	case ModeStall:
		<-r.Context().Done()
	case ModeNoDone:
	default:
		o.buf = o.call.plan.appendFailure(o.buf[:0], codeError(o.fault.code()))
		o.send()
	}
}
