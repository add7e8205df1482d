package ingress

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/engine/openai"
)

// relayStream is the relay loop: one read of the engine, a look at its whole events, one write and flush to the client.
// Backpressure is the blocked write; the guard's clock runs only while the engine is waited for.
func (c *call) relayStream(ctx context.Context, resp *http.Response) result {
	s := &c.stream
	s.reset(c.scan.Choices)
	c.watchGaps()
	if c.entry.app.Engine.Family == app.FamilyOpenAI {
		s.watcher.Blind() // some engines of this family ignore n, or end without a finish_reason: a clean end is a whole answer
	}
	for {
		n, err := c.readToken(resp.Body, s.space())
		now := time.Now()
		s.filled += n
		v := c.inspect(now, err)
		if !c.served() {
			return c.unserved()
		}
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
		c.report(now)
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
	if !s.last.IsZero() && c.status != 0 && now.After(s.last) {
		c.entry.lane.meter.Load().ITL(c.route.String(), now.Sub(s.last))
	}
	s.last = now
	c.tokensSeen(s.fresh, now)
	s.fresh = 0
}

// unbuffered tells a proxy in front of dpserve, as nginx, to pass tokens on as they come. All answers share it.
var unbuffered = []string{"no"}

// open sends the header of a stream.
func (c *call) open(resp *http.Response) {
	if _, ok := resp.Header["X-Accel-Buffering"]; !ok {
		c.w.Header()["X-Accel-Buffering"] = unbuffered
	}
	c.begin(resp.StatusCode, resp.Header, -1)
}

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
	conn := gather(c.r, len(pass))
	err := c.write(pass, now)
	if err == nil {
		err = c.flush()
	}
	if sent := conn.send(); err == nil {
		err = sent
	}
	if err == nil {
		s.passed(s.looked)
	}
	return err
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

// readToken reads under the clock of the phase: first token, or the next one. An empty delta counts as a token.
func (c *call) readToken(body io.Reader, buf []byte) (int, error) {
	if c.stream.last.IsZero() {
		return c.read(body, buf, time.Now(), c.firstTokenDue(), errFirstToken)
	}
	return c.readGap(body, buf)
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

// served asks for leave to pass on what an engine of this node has said: a node that was frozen must not go on as if nothing had
// been. The data ports of other nodes ask for themselves.
func (c *call) served() bool {
	return c.in.serves == nil || !c.attempt.rank.local || c.in.serves()
}

// unserved ends an attempt at a rank that may not serve any more.
func (c *call) unserved() result {
	res := result{cause: causeUnitLost}
	if c.status == 0 {
		return res
	}
	return c.breakOff(res)
}

// breakOff ends a stream after its first byte: an error event in the route's shape, no [DONE], no invented finish_reason, and
// a cut connection, so that nobody takes it for a whole one.
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
