package sim

import (
	"math"
	"net/http"
	"sync"
)

// maxPooledBuffer bounds what a finished stream leaves for the next one.
const maxPooledBuffer = 64 << 10

// buffers are reused by streams.
//
//nolint:gochecknoglobals // a pool serves all servers
var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 4096); return &b }}

// writer is one stream on its way to the client.
type writer struct {
	server *Server
	out    http.ResponseWriter
	flush  http.Flusher
	call   *call
	fault  *Fault
	buf    []byte
	sent   int // tokens, over all choices
	open   int // choices without their last chunk
	roles  bool
}

// stream writes the events of a call as the engine makes them: everything that is there, then one flush.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, rank *rank, c *call, fault *Fault) {
	buf, _ := buffers.Get().(*[]byte)
	out := &writer{server: s, out: w, call: c, fault: fault, buf: (*buf)[:0], open: len(c.choices)}
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
		o.buf = append(failure.event(o.buf), doneEvent...)
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
	if o.call.plan.chat && !o.roles && o.anything() {
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
		o.buf, done = ch.appendNew(o.buf, o.server.set, o.limit())
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
	if o.call.plan.includeUsage {
		o.buf = o.call.appendUsageEvent(o.buf, o.server.set)
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
		o.buf = append(codeError(o.fault.code()).event(o.buf[:0]), doneEvent...)
		o.send()
	}
}
