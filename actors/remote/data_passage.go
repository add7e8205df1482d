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

// dataRequest is one request through a data port: body, ticket, engine, answer.
type dataRequest struct {
	server *DataServer
	w      http.ResponseWriter
	rc     *http.ResponseController
	r      *http.Request
	cancel context.CancelCauseFunc

	upload      *requestBody // nil after releaseBody
	isBodyFree  bool         // no other goroutine reads upload
	head        *dataHead
	target      *dataTarget
	ticket      msg.Ticket // ID 0: none
	body        []byte     // for the engine
	deadlineSet time.Time  // when the write deadline was set last
}

// run serves the request. It returns false if the stream must be reset instead of ended.
func (p *dataRequest) run(ctx context.Context) (clean bool) {
	s := p.server
	node, ok := s.caller(ctx)
	if !ok {
		return p.answerError(http.StatusForbidden, causeDenied)
	}
	head, err := readHead(p.r.Header, p.r.URL.Path, time.Now())
	switch {
	case err != nil:
		return p.answerError(http.StatusBadRequest, causeMalformed)
	case head.class != classNone && head.admit.Ingress != node:
		return p.answerError(http.StatusForbidden, causeDenied)
	}
	switch err := p.upload.read(p.r, s.timers.Body, p.cancel); {
	case errors.Is(err, errBodyTooLarge):
		return p.answerError(http.StatusRequestEntityTooLarge, causeTooLarge)
	case err != nil:
		return false
	}
	if p.upload.blocks, p.body, ok = takeBlocks(p.upload.blocks[:0], p.upload.b, head.blocks); !ok {
		return p.answerError(http.StatusBadRequest, causeMalformed)
	}
	p.head = head
	return p.serve(ctx)
}

func (p *dataRequest) serve(ctx context.Context) (clean bool) {
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
		return p.holdTicket(ctx)
	}
	return p.exchange(ctx)
}

// holdTicket keeps the stream, and with its context the ticket, until the ingress ends it.
func (p *dataRequest) holdTicket(ctx context.Context) (clean bool) {
	p.setTicketHeader(p.w.Header())
	p.w.WriteHeader(http.StatusOK)
	if p.rc.Flush() == nil {
		<-ctx.Done()
	}
	return false
}

// exchange asks the engine and passes its answer on. If the request ends before its answer has begun, the
// ticket is given back here, because the ingress has not received its number.
func (p *dataRequest) exchange(ctx context.Context) (clean bool) {
	resp, resent, err := p.askEngine(ctx)
	if err != nil {
		return p.answerFailure(ctx, err, resent)
	}
	defer closeAnswer(resp)
	p.releaseBody()
	p.copyEngineHeader(resp.Header, resent)
	p.setWriteDeadline(time.Now())
	p.w.WriteHeader(resp.StatusCode)
	if p.rc.Flush() != nil {
		p.returnTicket("client_gone")
		return false
	}
	return p.relay(resp.Body)
}

// releaseBody gives the request's body back: it is not sent again, and its answer may take minutes. It is
// safe to call twice.
func (p *dataRequest) releaseBody() {
	if p.upload != nil && p.isBodyFree {
		p.server.recycle(p.upload)
	}
	p.upload, p.body = nil, nil
}

func closeAnswer(resp *http.Response) {
	if resp.Body.Close() != nil {
		return // the connection is not re-used
	}
}

// askEngine sends the request, and once more if a re-used connection turned out to be closed: the engine had
// closed it while it was idle, so it has not seen the request.
func (p *dataRequest) askEngine(ctx context.Context) (resp *http.Response, resent bool, err error) {
	if d := p.head.firstToken; d > 0 {
		late := time.AfterFunc(d, func() { p.cancel(msg.ErrFirstToken) })
		defer late.Stop()
	}
	header := p.engineHeader()
	o, resp, err := p.sendOnce(ctx, header)
	if err == nil || !o.Stale() || ctx.Err() != nil {
		return resp, false, err
	}
	_, resp, err = p.sendOnce(ctx, header)
	return resp, true, err
}

func (p *dataRequest) sendOnce(ctx context.Context, header http.Header) (*engineleg.Request, *http.Response,
	error) {
	t := &p.target.target
	o := &engineleg.Request{URL: p.target.urls[p.head.route], Header: header, Body: p.body}
	if t.Addressing == "body" && p.head.class == classBoth {
		o.Body = openai.AppendField(nil, p.body, "routed_dp_rank",
			strconv.AppendInt(nil, int64(t.Selector), 10))
	}
	resp, err := p.server.legs.Send(ctx, t.Owned, o)
	if !o.Settled() {
		p.isBodyFree = false
	}
	return o, resp, err
}

// answerFailure answers a request that got no answer of the engine.
func (p *dataRequest) answerFailure(ctx context.Context, err error, resent bool) (clean bool) {
	switch {
	case errors.Is(context.Cause(ctx), msg.ErrFirstToken):
		return p.answerEngineError(causeFirstToken, resent)
	case ctx.Err() != nil:
		p.returnTicket("client_gone")
		return false
	case engineleg.Refused(err):
		return p.answerEngineError(causeRefused, resent)
	case engineleg.Malformed(err):
		p.w.Header()[dataMalformed] = []string{"1"}
		return p.answerEngineError(causeReset, resent)
	default:
		return p.answerEngineError(causeReset, resent)
	}
}

// returnTicket ends the ticket of a request that is over.
func (p *dataRequest) returnTicket(cause string) {
	if p.ticket.ID != 0 {
		p.target.mailbox.Send(&msg.Done{TicketID: p.ticket.ID, Outcome: msg.Cancelled, Cause: cause})
	}
}

// relay passes the body on: one read of the engine is one write and flush. Backpressure is the blocked write.
func (p *dataRequest) relay(body io.Reader) (clean bool) {
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

// write checks the lease before each write: a node that was suspended must not continue after its lease has
// expired.
func (p *dataRequest) write(b []byte) bool {
	if !p.server.serves() {
		return false
	}
	p.setWriteDeadline(time.Now())
	_, err := p.w.Write(b)
	return err == nil
}

// setWriteDeadline sets the deadline of a write, at most once a second: setting it for each token costs more
// than the precision is worth.
func (p *dataRequest) setWriteDeadline(now time.Time) {
	if now.Sub(p.deadlineSet) < time.Second {
		return
	}
	p.deadlineSet = now
	if p.rc.SetWriteDeadline(now.Add(p.server.timers.Stuck)) != nil {
		return // not a network connection, or a closed one: the write returns the error
	}
}

// engineHeader is the header that the ingress prepared for the engine, with the rank's number if the engine
// hosts several ranks.
func (p *dataRequest) engineHeader() http.Header {
	out := make(http.Header, len(p.r.Header))
	for name, values := range p.r.Header {
		if !engineleg.Hop(name) && !strings.HasPrefix(name, dataPrefix) && name != "Content-Length" &&
			name != "Accept-Encoding" && name != headerEngineRank {
			out[name] = values
		}
	}
	if _, ok := out["User-Agent"]; !ok {
		out["User-Agent"] = nil // otherwise net/http adds its own
	}
	if t := &p.target.target; t.Addressing == "header" && p.head.class == classBoth {
		out[headerEngineRank] = []string{strconv.Itoa(t.Selector)}
	}
	return out
}
