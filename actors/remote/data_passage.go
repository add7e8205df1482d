package remote

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/internal/engineleg"
)

// passage is one request through a data port: body, ticket, engine, answer.
type passage struct {
	server *DataServer
	w      http.ResponseWriter
	rc     *http.ResponseController
	r      *http.Request
	cancel context.CancelCauseFunc

	in      *arrival // nil after letGo
	settled bool     // nobody reads in any more
	head    *dataHead
	target  *dataTarget
	ticket  msg.Ticket // ID 0: none
	body    []byte     // for the engine
	armed   time.Time  // when the write deadline was set last
}

// run serves the request; false: it must not end cleanly.
func (p *passage) run(ctx context.Context) (clean bool) {
	s := p.server
	node, ok := s.caller(ctx)
	if !ok {
		return p.fail(http.StatusForbidden, causeDenied)
	}
	head, err := readHead(p.r.Header, p.r.URL.Path, time.Now())
	switch {
	case err != nil:
		return p.fail(http.StatusBadRequest, causeMalformed)
	case head.class != classNone && head.admit.Ingress != node:
		return p.fail(http.StatusForbidden, causeDenied)
	}
	switch err := p.in.read(p.r, s.timers.Body, p.cancel); {
	case errors.Is(err, errBodyTooLarge):
		return p.fail(http.StatusRequestEntityTooLarge, causeTooLarge)
	case err != nil:
		return false
	}
	if p.in.blocks, p.body, ok = takeBlocks(p.in.blocks[:0], p.in.b, head.blocks); !ok {
		return p.fail(http.StatusBadRequest, causeMalformed)
	}
	p.head = head
	return p.serve(ctx)
}

func (p *passage) serve(ctx context.Context) (clean bool) {
	p.target = p.server.table.find(p.head.app, p.head.unit, p.head.rank)
	switch {
	case p.target == nil:
		return p.refuse(&msg.AdmitReply{Refusal: msg.Gone})
	case !p.server.serves():
		return p.refuse(&msg.AdmitReply{Refusal: msg.NoLease, Epoch: p.target.epoch})
	}
	if p.head.class != classNone {
		rep, ok := p.admit(ctx)
		switch {
		case !ok:
			return false
		case rep.Refusal != msg.Granted:
			return p.refuse(&rep)
		}
		p.ticket = rep.Ticket
	}
	if p.head.class == classHold {
		return p.hold(ctx)
	}
	return p.exchange(ctx)
}

// hold keeps the stream, and by its context the ticket, until the ingress ends it.
func (p *passage) hold(ctx context.Context) (clean bool) {
	p.ticketHeader(p.w.Header())
	p.w.WriteHeader(http.StatusOK)
	if p.rc.Flush() == nil {
		<-ctx.Done()
	}
	return false
}

// exchange asks the engine and passes its answer on. A request that is given up before its answer has begun takes its ticket
// back here: its ingress never heard of it.
func (p *passage) exchange(ctx context.Context) (clean bool) {
	resp, resent, err := p.ask(ctx)
	if err != nil {
		return p.unanswered(ctx, err, resent)
	}
	defer closeAnswer(resp)
	p.letGo()
	p.answerHeader(resp.Header, resent)
	p.arm(time.Now())
	p.w.WriteHeader(resp.StatusCode)
	if p.rc.Flush() != nil {
		p.giveBack("client_gone")
		return false
	}
	return p.relay(resp.Body)
}

// letGo gives the request's body back: it is not sent again, and its answer may take minutes. Safe to call twice.
func (p *passage) letGo() {
	if p.in != nil && p.settled {
		p.server.keep(p.in)
	}
	p.in, p.body = nil, nil
}

func closeAnswer(resp *http.Response) {
	if resp.Body.Close() != nil {
		return // its connection is not used again
	}
}

// ask sends the request, and once more if a reused connection turned out to be closed (ENGINES 3.6).
func (p *passage) ask(ctx context.Context) (resp *http.Response, resent bool, err error) {
	if d := p.head.firstToken; d > 0 {
		late := time.AfterFunc(d, func() { p.cancel(msg.ErrFirstToken) })
		defer late.Stop()
	}
	header := p.engineHeader()
	o, resp, err := p.send(ctx, header)
	if err == nil || !o.Stale() || ctx.Err() != nil {
		return resp, false, err
	}
	_, resp, err = p.send(ctx, header)
	return resp, true, err
}

func (p *passage) send(ctx context.Context, header http.Header) (*engineleg.Request, *http.Response, error) {
	t := &p.target.target
	o := &engineleg.Request{URL: p.target.urls[p.head.route], Header: header, Body: p.body}
	if t.Addressing == "body" && p.head.class == classBoth {
		o.Body = openai.AppendField(nil, p.body, "routed_dp_rank", strconv.AppendInt(nil, int64(t.Selector), 10))
	}
	resp, err := p.server.legs.Send(ctx, t.Owned, o)
	if !o.Settled() {
		p.settled = false
	}
	return o, resp, err
}

// unanswered says what became of a request without an answer.
func (p *passage) unanswered(ctx context.Context, err error, resent bool) (clean bool) {
	switch {
	case errors.Is(context.Cause(ctx), msg.ErrFirstToken):
		return p.failed(causeFirstToken, resent)
	case ctx.Err() != nil:
		p.giveBack("client_gone")
		return false
	case engineleg.Refused(err):
		return p.failed(causeRefused, resent)
	case engineleg.Malformed(err):
		p.w.Header()[dataMalformed] = []string{"1"}
		return p.failed(causeReset, resent)
	default:
		return p.failed(causeReset, resent)
	}
}

// giveBack ends the ticket of a request that is over.
func (p *passage) giveBack(cause string) {
	if p.ticket.ID != 0 {
		p.target.mailbox.Send(&msg.Done{TicketID: p.ticket.ID, Outcome: msg.Cancelled, Cause: cause})
	}
}

// relay passes the body on: one read of the engine is one write and flush. Backpressure is the blocked write.
func (p *passage) relay(body io.Reader) (clean bool) {
	mem, _ := p.server.buffers.Get().(*[]byte)
	defer p.server.buffers.Put(mem)
	buf := *mem
	for {
		n, err := body.Read(buf)
		if n > 0 && !p.write(buf[:n]) {
			return false
		}
		switch {
		case errors.Is(err, io.EOF):
			return true
		case err != nil || p.rc.Flush() != nil:
			return false
		}
	}
}

// write is asked for leave before each write: a node that was frozen must not go on as if nothing had been.
func (p *passage) write(b []byte) bool {
	if !p.server.serves() {
		return false
	}
	p.arm(time.Now())
	_, err := p.w.Write(b)
	return err == nil
}

// arm gives a write its time, at most once a second: the deadline is coarse (HOTPATH 3).
func (p *passage) arm(now time.Time) {
	if now.Sub(p.armed) < time.Second {
		return
	}
	p.armed = now
	if p.rc.SetWriteDeadline(now.Add(p.server.timers.Stuck)) != nil {
		return // not a network connection, or gone: the write will tell
	}
}

// engineHeader is what the ingress has prepared for the engine, with the rank's number where the engine hosts several.
func (p *passage) engineHeader() http.Header {
	out := make(http.Header, len(p.r.Header))
	for name, values := range p.r.Header {
		if !engineleg.Hop(name) && !strings.HasPrefix(name, dataPrefix) && name != "Content-Length" && name != "Accept-Encoding" && name != headerEngineRank {
			out[name] = values
		}
	}
	if _, ok := out["User-Agent"]; !ok {
		out["User-Agent"] = nil // or net/http adds its own
	}
	if t := &p.target.target; t.Addressing == "header" && p.head.class == classBoth {
		out[headerEngineRank] = []string{strconv.Itoa(t.Selector)}
	}
	return out
}
