package ingress

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/dpserve/dpserve/engine/openai"
)

// stream is the relay's view of a streamed answer: the bytes read and not yet passed on, and what their events said.
type stream struct {
	buf      []byte
	filled   int // bytes in buf
	looked   int // bytes of buf whose events are looked at and may pass
	searched int // bytes behind looked without the end of an event
	watcher  openai.Watcher
	tokens   int       // chunks with choices
	fresh    int       // of them in this read
	last     time.Time // of the last token
	long     bool      // inside an event too long to be held: it passes as it comes
	done     bool      // [DONE] has come
	failed   bool      // an error event below 500 has passed
	fault    openai.EngineError
}

// reset prepares for an answer with the given number of choices.
func (s *stream) reset(choices int) {
	if s.buf == nil {
		s.buf = make([]byte, relayBuffer)
	}
	s.filled, s.looked, s.searched, s.tokens, s.fresh = 0, 0, 0, 0, 0
	s.long, s.done, s.failed, s.last, s.fault = false, false, false, time.Time{}, openai.EngineError{}
	s.watcher.Reset(choices)
}

// release drops a buffer that has grown: most answers need none of it.
func (s *stream) release() {
	if len(s.buf) > 4*relayBuffer {
		s.buf = nil
	}
	s.tokens = 0
}

func (s *stream) grow() {
	b := make([]byte, 2*len(s.buf))
	copy(b, s.buf[:s.filled])
	s.buf = b
}

// passed drops the first n bytes, which have gone to the client.
func (s *stream) passed(n int) {
	copy(s.buf, s.buf[n:s.filled])
	s.filled -= n
	s.looked -= n
}

// space makes room for the next read: a half event waits for its end, up to MaxEvent.
func (s *stream) space() []byte {
	if s.filled == len(s.buf) {
		s.grow()
	}
	return s.buf[s.filled:]
}

// half says that the bytes behind looked are too many for an event to wait for its end.
func (s *stream) half() bool { return s.filled-s.looked >= openai.MaxEvent }

// verdict is what an event means for the stream.
type verdict uint8

const (
	more    verdict = iota // nothing to decide: read on
	opened                 // the first byte: header and everything held may go
	lost                   // the stream cannot end well
	refused                // before the first byte: an error event, to be treated as an HTTP answer
	aborted                // before the first byte: the engine gave up
	nothing                // before the first byte: the stream is over
	over                   // [DONE] of a complete stream
)

// look judges the events that are whole. It stops at the first that decides something: an event that opens the stream or
// ends it well is then within looked, one that breaks it is not.
func (s *stream) look(begun bool) verdict {
	s.fresh = 0
	for {
		n := s.next()
		if n < 0 {
			return more
		}
		event := s.buf[s.looked : s.looked+n]
		if v := s.judge(s.watcher.Event(event), event, begun); v != more {
			return v
		}
		s.looked += n
	}
}

// next is the length of the next whole event; -1 if there is none yet.
func (s *stream) next() int {
	rest := s.buf[s.looked:s.filled]
	n := openai.EventEnd(rest, s.searched)
	s.searched = len(rest)
	if n >= 0 {
		s.searched = 0
	}
	return n
}

// judge says what one event does to the stream (CONTRACTS 9).
func (s *stream) judge(kind openai.EventKind, event []byte, begun bool) verdict {
	switch kind {
	case openai.EventError:
		return s.onError(event, begun)
	case openai.EventAbort:
		if begun {
			return lost
		}
		return aborted
	case openai.EventDone:
		return s.onDone(len(event), begun)
	case openai.EventOther:
		return more
	case openai.EventEmpty:
		s.token()
		return more
	default:
		s.token()
	}
	if !begun {
		s.looked += len(event)
		return opened
	}
	return more
}

func (s *stream) token() {
	s.tokens++
	s.fresh++
}

// onError passes an error below 500 that comes after the first byte; everything else is not the client's to see.
func (s *stream) onError(event []byte, begun bool) verdict {
	s.fault = openai.ParseError(openai.EventData(event))
	switch {
	case !begun:
		return refused
	case s.fault.Status == 0 || s.fault.Status >= http.StatusInternalServerError:
		return lost
	}
	s.failed = true
	return more
}

// onDone lets [DONE] pass only behind a complete stream: by itself it proves nothing.
func (s *stream) onDone(n int, begun bool) verdict {
	switch {
	case !begun:
		return nothing
	case !s.failed && !s.watcher.Complete():
		return lost
	}
	s.looked += n
	s.done = true
	return over
}

// ended judges a stream whose body has ended cleanly. What is left without a blank line is an event too.
func (s *stream) ended(begun bool) verdict {
	if rest := s.buf[s.looked:s.filled]; len(rest) > 0 && !s.long {
		if v := s.judge(s.watcher.Event(rest), rest, begun); v != more {
			return v
		}
	}
	s.looked = s.filled
	switch {
	case !begun:
		return nothing
	case s.failed || s.watcher.Complete():
		return over
	default:
		return lost
	}
}

// examine looks at what a read has brought.
func (s *stream) examine(begun bool) verdict {
	if s.long {
		if v := s.overlong(begun); v != more || s.long {
			return v
		}
	}
	if v := s.look(begun); v != more {
		return v
	}
	switch {
	case s.half():
		return s.overlong(begun)
	case !begun && s.looked > maxHeld:
		return opened // too many role-only chunks to hold: the stream begins without content
	}
	return more
}

// overlong lets an event pass that is too long to be held, as far as it has come. Its end is found by what follows; a few
// bytes stay, because the blank line may be cut in two.
func (s *stream) overlong(begun bool) verdict {
	if !s.long {
		from, event := s.looked, s.buf[s.looked:s.filled]
		if v := s.judge(s.watcher.Event(event), event, begun); v != more && v != opened {
			return v
		}
		s.looked, s.long = from, true
		s.watcher.Blind()
	}
	if n := openai.EventEnd(s.buf[s.looked:s.filled], 0); n >= 0 {
		s.looked, s.long, s.searched = s.looked+n, false, 0
	} else {
		s.looked = max(s.looked, s.filled-len("\n\r\n"))
	}
	if !begun {
		return opened
	}
	return more
}

// relayStream is the relay loop: one read of the engine, a look at its whole events, one write and flush to the client.
// Backpressure is the blocked write; the guard's clock runs only while the engine is waited for.
func (c *call) relayStream(ctx context.Context, resp *http.Response) result {
	s := &c.stream
	s.reset(c.scan.Choices)
	for {
		n, err := c.readToken(resp.Body, s.space())
		now := time.Now()
		s.filled += n
		v := c.inspect(now, err)
		if v == opened {
			c.open(resp)
			s.watcher.Begun()
			v = c.inspect(now, err) // what came behind the first content in the same read
		}
		if err := c.forward(now); err != nil {
			return c.unwritten(ctx, err)
		}
		switch {
		case v != more:
			return c.close(ctx, resp, v)
		case err != nil:
			return c.interrupted(ctx, err)
		}
	}
}

// inspect looks at what a read has brought.
func (c *call) inspect(now time.Time, err error) verdict {
	s, begun := &c.stream, c.status != 0
	v := s.examine(begun)
	if v == more && errors.Is(err, io.EOF) {
		v = s.ended(begun)
	}
	c.note(now)
	return v
}

// note does the accounts of this read's tokens.
func (c *call) note(now time.Time) {
	s := &c.stream
	if s.fresh == 0 {
		return
	}
	if s.last.IsZero() {
		c.firstTokenSeen(now)
	} else if c.status != 0 && now.After(s.last) {
		c.entry.lane.meter.Load().ITL(c.route.String(), now.Sub(s.last))
	}
	s.last = now
	c.tokensSeen(s.fresh, now)
	s.fresh = 0
}

// open sends the header of a stream.
func (c *call) open(resp *http.Response) { c.begin(resp.StatusCode, resp.Header, -1) }

// forward writes and flushes what may pass.
func (c *call) forward(now time.Time) error {
	s := &c.stream
	if c.status == 0 || s.looked == 0 {
		return nil
	}
	pass := s.buf[:s.looked]
	if s.watcher.Finishing() {
		c.readUsage(pass)
	}
	if err := c.write(pass, now); err != nil {
		return err
	}
	if err := c.flush(); err != nil {
		return err
	}
	s.passed(s.looked)
	return nil
}

// readUsage keeps the last usage of the stream's end.
func (c *call) readUsage(events []byte) {
	for len(events) > 0 {
		n := openai.EventEnd(events, 0)
		if n < 0 {
			n = len(events)
		}
		if u, ok := openai.ParseUsage(openai.EventData(events[:n])); ok {
			c.usage = u
		}
		events = events[n:]
	}
}

// readToken reads under the clock of the phase: first token, or the next one. TRAPS 25: an empty delta is a token.
func (c *call) readToken(body io.Reader, buf []byte) (int, error) {
	if c.stream.last.IsZero() {
		return c.read(body, buf, time.Now(), c.firstTokenDue(), errFirstToken)
	}
	now := time.Now()
	return c.read(body, buf, now, now.Add(c.entry.between), errStalled)
}

// close ends a stream on which something was decided.
func (c *call) close(ctx context.Context, resp *http.Response, v verdict) result {
	s := &c.stream
	switch v {
	case over:
		c.tail(resp.Body)
		if s.failed {
			return result{cause: causeErrorEvent, engine: s.fault, status: s.fault.Status}
		}
		return result{cause: causeOK}
	case lost:
		return c.breakOff(result{cause: c.lostStream(), engine: s.fault})
	case refused:
		return c.asStatus(ctx)
	case aborted:
		return result{cause: causeAborted}
	default:
		return result{cause: causeEmpty}
	}
}

// asStatus treats a first event that is an error as an HTTP answer with its code. What passes on is a real status with the
// event's JSON; the [DONE] behind it is dropped.
func (c *call) asStatus(ctx context.Context) result {
	s := &c.stream
	status := s.fault.Status
	if status == 0 {
		status = http.StatusInternalServerError
	}
	res := result{cause: statusCause(status, &s.fault), engine: s.fault, status: status}
	if res.cause != causePassed && !c.passes(&res) {
		return res
	}
	n := openai.EventEnd(s.buf[s.looked:s.filled], 0)
	if n < 0 {
		n = s.filled - s.looked
	}
	body := openai.EventData(s.buf[s.looked : s.looked+n])
	return c.passOn(ctx, status, http.Header{"Content-Type": {"application/json"}}, body, res)
}

// interrupted ends a stream whose body broke.
func (c *call) interrupted(ctx context.Context, err error) result {
	res := c.broke(ctx, err, c.status != 0)
	if c.status == 0 {
		return res
	}
	if res.cause == causeClientGone {
		c.cut = true
		return res
	}
	return c.breakOff(res)
}

// breakOff ends a stream after its first byte: an error event in the route's shape, no [DONE], no invented finish_reason, and
// a cut connection, so that nobody takes it for a whole one (TRAPS 1).
func (c *call) breakOff(res result) result {
	c.cut = true
	code, message := brokenOff(res.cause)
	event := openai.ErrorEvent(nil, c.route, openai.Status(code), "", code, message)
	if err := c.write(event, time.Now()); err != nil {
		return res
	}
	if c.flush() != nil {
		return res
	}
	return res
}

// tail reads the end of a body behind [DONE], so that its connection can be used again. The client has everything by then.
func (c *call) tail(body io.Reader) {
	s := &c.stream
	for range 2 {
		now := time.Now()
		if _, err := c.read(body, s.buf, now, now.Add(c.in.timers.Tail), errTail); err != nil {
			return
		}
	}
}
