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

	"github.com/dpserve/dpserve/engine/openai"
)

// begin sends status and header: from here on the attempt is the last one.
func (c *call) begin(status int, engine http.Header, length int) {
	c.entry.lane.begun(&c.attempt)
	now := time.Now()
	c.begun, c.status = now, status
	h := c.w.Header()
	clientHeader(h, engine)
	c.ownHeaders(h, c.attempt.rank)
	if length >= 0 {
		h["Content-Length"] = []string{strconv.Itoa(length)}
	}
	c.armWrite(now)
	c.letGo()
	c.w.WriteHeader(status)
}

// write passes bytes on. The error's cause is the client's: it left, or it does not read.
func (c *call) write(b []byte, now time.Time) error {
	c.armWrite(now)
	if !c.reader.beginWrite(now, len(b), c.in.timers.SlowReader) {
		return errSlowReader
	}
	_, err := c.w.Write(b)
	return err
}

// unwritten says what a failed write means.
func (c *call) unwritten(ctx context.Context, err error) result {
	c.cut = true
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return result{cause: causeSlowReader, err: err}
	case ctx.Err() != nil && ended(ctx) == causeDrained:
		return result{cause: causeDrained, err: err}
	default:
		return result{cause: causeClientGone, err: err}
	}
}

// isStream says that an answer comes as server-sent events.
func isStream(h http.Header) bool {
	v := h["Content-Type"]
	return len(v) > 0 && strings.HasPrefix(v[0], "text/event-stream")
}

// read fills buf from the engine under the guard, which is armed for as long as the read blocks.
func (c *call) read(body io.Reader, buf []byte, now, due time.Time, cause error) (int, error) {
	c.reader.endWrite(now)
	c.guard.arm(now, due, cause)
	n, err := body.Read(buf)
	c.guard.pause()
	return n, err
}

// watchGaps says whose answer readGap reads.
func (c *call) watchGaps() {
	a := &c.attempt
	c.guard.watchGaps(gap{lane: c.entry.lane, rank: a.rank, ticket: a.ticket.ID, limit: c.entry.between, most: c.entry.firstToken})
}

// readGap fills buf from an engine that was heard before: the guard's clock is that of the gap.
func (c *call) readGap(body io.Reader, buf []byte) (int, error) {
	now := time.Now()
	c.reader.endWrite(now)
	c.guard.armGap(now)
	n, err := body.Read(buf)
	c.guard.pause()
	return n, err
}

// relayError handles an answer of 400 and above: tried again elsewhere, or passed on byte for byte.
func (c *call) relayError(ctx context.Context, resp *http.Response) result {
	body, whole, err := c.readWhole(resp)
	if err != nil {
		return c.broke(ctx, err, false)
	}
	e := openai.ParseError(body)
	res := result{cause: statusCause(resp.StatusCode, &e), engine: e, status: resp.StatusCode}
	if res.cause != causePassed && !c.passes(&res) {
		return res
	}
	if !whole {
		return c.relayRest(ctx, resp, body)
	}
	return c.passOn(ctx, resp.StatusCode, resp.Header, body, res)
}

// passes says that the engine's own 408 or 429 is the best answer there is left: it tells the client what to do.
func (c *call) passes(res *result) bool {
	if res.status >= http.StatusInternalServerError || res.cause != causeStatus {
		return false
	}
	return c.attempts+1 >= c.maxAttempts()
}

// passOn sends a whole answer.
func (c *call) passOn(ctx context.Context, status int, header http.Header, body []byte, res result) result {
	if !c.served() {
		return c.unserved()
	}
	c.begin(status, header, len(body))
	if err := c.write(body, c.begun); err != nil {
		return c.unwritten(ctx, err)
	}
	return res
}

// relayWhole handles an answer that is not streamed: read whole up to maxWhole before its header goes out, so that a broken
// one can be tried again.
func (c *call) relayWhole(ctx context.Context, resp *http.Response) result {
	body, whole, err := c.readWhole(resp)
	switch {
	case err != nil:
		return c.broke(ctx, err, false)
	case !whole:
		return c.relayRest(ctx, resp, body)
	case len(body) == 0:
		return result{cause: causeEmpty, status: resp.StatusCode}
	case c.route.Generates() && openai.Aborted(body):
		return result{cause: causeAborted, status: resp.StatusCode}
	}
	if u, ok := openai.ParseUsage(body); ok {
		c.usage = u
	}
	return c.passOn(ctx, resp.StatusCode, resp.Header, body, result{cause: causeOK})
}

// readWhole reads an answer into the call's buffer. whole is false if it is longer than maxWhole.
func (c *call) readWhole(resp *http.Response) (body []byte, whole bool, err error) {
	s := &c.stream
	s.reset(0)
	if n := resp.ContentLength; n > int64(len(s.buf)) && n < maxWhole {
		s.buf = make([]byte, n+1)
	}
	due := c.firstTokenDue()
	for s.filled <= maxWhole {
		if s.filled == len(s.buf) {
			s.grow()
		}
		n, err := c.read(resp.Body, s.buf[s.filled:], time.Now(), due, errFirstToken)
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

// relayRest streams an answer that is too long to be held: it has begun.
func (c *call) relayRest(ctx context.Context, resp *http.Response, head []byte) result {
	if !c.served() {
		return c.unserved()
	}
	c.begin(resp.StatusCode, resp.Header, int(resp.ContentLength))
	c.watchGaps()
	for b := head; ; {
		if !c.served() {
			c.cut = true
			return result{cause: causeUnitLost}
		}
		now := time.Now()
		if err := c.write(b, now); err != nil {
			return c.unwritten(ctx, err)
		}
		n, err := c.readGap(resp.Body, c.stream.buf)
		if b = c.stream.buf[:n]; err == nil {
			continue
		}
		if !errors.Is(err, io.EOF) {
			c.cut = true // no event can be put into a JSON body: the cut tells
			return c.broke(ctx, err, true)
		}
		if err := c.write(b, time.Now()); err != nil {
			return c.unwritten(ctx, err)
		}
		return result{cause: causeOK}
	}
}
