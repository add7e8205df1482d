package noderpc

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/rankleg"
)

// dataRequest is one request through a data port: body, ticket, engine, answer.
type dataRequest struct {
	server *DataServer
	w      http.ResponseWriter
	rc     *http.ResponseController
	r      *http.Request
	cancel context.CancelCauseFunc

	ingress   string // the node that sent it
	isIngress bool

	upload      *requestBody // nil after releaseBody
	isBodyFree  bool         // no other goroutine reads upload
	head        *dataHead
	rank        *rankleg.Rank
	ticket      msg.Ticket // ID 0: none
	body        []byte     // for the engine
	begun       time.Time  // when the head was read
	deadlineSet time.Time  // when the write deadline was set last
}

// run serves the request. It returns false if the connection must be broken instead of the answer ended.
func (p *dataRequest) run(ctx context.Context) (clean bool) {
	s := p.server
	if !p.isIngress {
		return p.answerError(http.StatusForbidden, causeDenied)
	}
	p.begun = time.Now()
	head, err := readHead(p.r.Header, p.r.URL.Path, p.begun)
	switch {
	case err != nil:
		return p.answerError(http.StatusBadRequest, causeMalformed)
	case (head.class == classBoth || head.class == classHold) && head.admit.Ingress != p.ingress:
		return p.answerError(http.StatusForbidden, causeDenied)
	}
	if !s.takeLarge(p.r.ContentLength) {
		return p.refuse(&msg.AdmitReply{Refusal: msg.Overloaded})
	}
	defer s.giveLarge(p.r.ContentLength)
	switch err := p.upload.read(p.r, s.body, p.cutBody); {
	case errors.Is(err, errBodyTooLarge):
		return p.answerError(http.StatusRequestEntityTooLarge, causeTooLarge)
	case err != nil:
		return false
	}
	var ok bool
	if p.upload.blocks, p.body, ok = takeBlocks(p.upload.blocks[:0], p.upload.b, head.blocks); !ok {
		return p.answerError(http.StatusBadRequest, causeMalformed)
	}
	p.head = head
	return p.serve(ctx)
}

// cut ends the request.
func (p *dataRequest) cut(why error) {
	p.cancel(why)
	_ = p.rc.SetWriteDeadline(time.Now()) // it also ends a write to a stalled reader
}

// cutBody ends the request, and a read of its body that waits.
func (p *dataRequest) cutBody() {
	p.cancel(errBodyCut)
	_ = p.rc.SetReadDeadline(time.Now()) // if the connection is closed, the read ends as well
}

func (p *dataRequest) serve(ctx context.Context) (clean bool) {
	p.rank = p.server.table.find(p.head.app, p.head.unit, p.head.rank)
	if p.rank == nil || p.head.class == classHeld && p.rank.Incarnation != p.head.incarnation {
		return p.refuse(&msg.AdmitReply{Refusal: msg.Gone})
	}
	q := p.newAsk()
	if p.head.class == classHold {
		return p.reserve(ctx, q)
	}
	resp, reply, err := p.ask(ctx, q)
	p.isBodyFree = !q.IsAdmitPending
	switch refused := reply.Refusal != msg.Granted; {
	case refused && ctx.Err() == nil:
		return p.refuse(&reply)
	case refused || err != nil:
		return p.answerFailure(ctx, err, q.Resent)
	}
	defer closeAnswer(resp)
	return p.passAnswer(resp, q.Resent)
}

// reserve keeps the stream, and with its context the ticket, until the ingress ends it.
func (p *dataRequest) reserve(ctx context.Context, q *rankleg.Request) (clean bool) {
	reply, err := p.server.near.Reserve(ctx, q)
	p.isBodyFree = !q.IsAdmitPending
	switch {
	case ctx.Err() != nil || err != nil:
		p.returnTicket("client_gone")
		return false
	case reply.Refusal != msg.Granted:
		return p.refuse(&reply)
	}
	p.setTicketHeader(p.w.Header())
	p.w.WriteHeader(http.StatusOK)
	if p.rc.Flush() == nil {
		<-ctx.Done()
	}
	return false
}

// newAsk is the request for the rank. Its header is the one that the ingress prepared for the engine.
func (p *dataRequest) newAsk() *rankleg.Request {
	q := &rankleg.Request{
		Rank: p.rank, Route: p.head.route, Reset: p.head.isReset, Body: p.body,
		Target: p.head.target, Model: p.head.model, IsPlain: p.head.isPlain,
		Header:   rankleg.StripHeader(p.r.Header),
		OnTicket: func(t *msg.Ticket) { p.ticket = *t },
	}
	q.Guard = p.newGuard()
	switch p.head.class {
	case classHeld:
		q.IsHeld = true
	case classBoth, classHold:
		q.Admit = &p.head.admit
		q.Admit.Ctx = p.r.Context()
		if len(p.upload.blocks) > 0 {
			q.Admit.Blocks = p.upload.blocks
		}
	}
	return q
}

// newGuard watches a request that must not be sent late, or twice. The time to write it counts from the
// moment at which its head was read, also while this machine sleeps: Round removes the monotonic time, which
// stands still then.
func (p *dataRequest) newGuard() *rankleg.Guard {
	if !p.head.once {
		return nil
	}
	g, limit, begun := &rankleg.Guard{}, p.head.writeBy, p.begun
	if limit > 0 {
		g.IsUsable = func() bool {
			now := time.Now()
			return max(now.Sub(begun), now.Round(0).Sub(begun.Round(0))) < limit
		}
	}
	return g
}

// ask asks the rank. The time limit for the answer's header begins when the whole request is here.
func (p *dataRequest) ask(ctx context.Context, q *rankleg.Request) (*http.Response, msg.AdmitReply, error) {
	if d := p.head.firstToken; d > 0 {
		late := time.AfterFunc(d, func() { p.cancel(rankleg.ErrFirstToken) })
		defer late.Stop()
	}
	return p.server.near.Ask(ctx, q)
}

// passAnswer passes the engine's answer on. If the ingress is gone before it begins, the ticket is given back
// here, because the ingress has not received its number.
func (p *dataRequest) passAnswer(resp *http.Response, resent bool) (clean bool) {
	p.releaseBody()
	p.copyEngineHeader(resp.Header, resent)
	p.setWriteDeadline(time.Now())
	p.w.WriteHeader(resp.StatusCode)
	hasBegun, clean := p.relay(resp)
	if !hasBegun {
		p.returnTicket("client_gone")
	}
	return clean
}

// releaseBody gives the request's body back: it is not sent again, and its answer may take minutes. It is
// safe to call twice.
func (p *dataRequest) releaseBody() {
	if p.upload != nil && p.isBodyFree {
		p.server.recycle(p.upload)
	}
	p.upload, p.body = nil, nil
}

func closeAnswer(resp *http.Response) { _ = resp.Body.Close() } // else the connection is not re-used

// answerFailure answers a request that got no answer of the engine.
func (p *dataRequest) answerFailure(ctx context.Context, err error, resent bool) (clean bool) {
	switch {
	case errors.Is(context.Cause(ctx), rankleg.ErrFirstToken):
		return p.answerEngineError(causeFirstToken, resent)
	case ctx.Err() != nil:
		p.returnTicket("client_gone")
		return false
	case rankleg.IsOutOfFiles(err):
		return p.answerEngineError(causeNoFiles, resent)
	case rankleg.IsRefused(err):
		return p.answerEngineError(causeRefused, resent)
	case errors.Is(err, rankleg.ErrTooLate):
		return p.answerEngineError(causeTooLate, resent)
	case errors.Is(err, rankleg.ErrNotResent):
		return p.answerEngineError(causeNotResent, resent)
	case rankleg.IsMalformed(err):
		return p.answerEngineError(causeBadAnswer, resent)
	default:
		return p.answerEngineError(causeReset, resent)
	}
}

// returnTicket ends the ticket of a request that is over.
func (p *dataRequest) returnTicket(cause string) {
	if p.ticket.ID != 0 {
		p.rank.Mailbox.Send(&msg.Done{TicketID: p.ticket.ID, Outcome: msg.Cancelled, Cause: cause})
	}
}

// relay passes the body on: one read of the engine is one write and flush. Backpressure is the blocked write.
// The header of an answer of known length leaves with the first bytes of the body if these are here already,
// any other before them, or net/http would announce a length. hasBegun is false if it could not be sent.
func (p *dataRequest) relay(resp *http.Response) (hasBegun, clean bool) {
	body := resp.Body
	mem, _ := p.server.buffers.Get().(*[]byte)
	defer p.server.buffers.Put(mem)
	buf := *mem
	if resp.ContentLength < 0 || !rankleg.HasBuffered(body) {
		if p.rc.Flush() != nil {
			return false, false
		}
		hasBegun = true
	}
	for {
		n, err := body.Read(buf)
		isEnd := errors.Is(err, io.EOF)
		p.setWriteDeadline(time.Now()) // for the write here, and for the end that net/http writes
		switch {
		case n > 0 && !p.write(buf[:n]):
			return hasBegun, false
		case isEnd && p.r.Context().Err() == nil:
			return true, true
		case (err == nil || !hasBegun) && p.rc.Flush() != nil:
			return hasBegun, false
		case isEnd:
			return true, true
		case err != nil:
			p.w.Header()[http.TrailerPrefix+dataBroken] = []string{"1"}
			return true, true
		}
		hasBegun = true
	}
}

func (p *dataRequest) write(b []byte) bool {
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
	_ = p.rc.SetWriteDeadline(now.Add(stuckWrite)) // if it is closed, the write returns the error
}

// requestBody is the memory of a request's body: chain hashes, then the engine's body. It is re-used.
type requestBody struct {
	most   int64 // see DataConfig.MaxBody
	b      []byte
	blocks []uint64
}

var (
	errBodyTooLarge = errors.New("the body is too large")
	errBodyCut      = errors.New("the body did not come whole")
)

// read reads the whole body before the request is passed on: while a body is unread, net/http does not cancel
// the request's context when the client leaves. cut is called after patience and one second for each MiB of
// the announced length.
func (a *requestBody) read(r *http.Request, patience time.Duration, cut func()) error {
	a.b = a.b[:0]
	n := r.ContentLength
	switch {
	case n == 0:
		return nil
	case n > a.most:
		return errBodyTooLarge
	case n < 0:
		n = firstBodyBuffer
	}
	late := time.AfterFunc(patience+time.Duration(n>>20)*time.Second, cut)
	defer late.Stop()
	if cap(a.b) <= int(n) {
		a.b = make([]byte, 0, n+1)
	}
	return a.fill(r.Body)
}

func (a *requestBody) fill(body io.Reader) error {
	for {
		if len(a.b) == cap(a.b) {
			a.b = append(a.b, 0)[:len(a.b)]
		}
		n, err := body.Read(a.b[len(a.b):cap(a.b)])
		a.b = a.b[:len(a.b)+n]
		switch {
		case int64(len(a.b)) > a.most:
			return errBodyTooLarge
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return errBodyCut
		}
	}
}

// answerError answers a request that this port does not pass on.
func (p *dataRequest) answerError(status int, cause string) (clean bool) {
	p.w.Header()[dataCause] = []string{cause}
	return p.answerEmpty(status)
}

// answerEngineError answers that the engine gave no answer. The ingress gives the ticket back.
func (p *dataRequest) answerEngineError(cause string, resent bool) (clean bool) {
	h := p.w.Header()
	p.setTicketHeader(h)
	markResent(h, resent)
	return p.answerError(http.StatusBadGateway, cause)
}

// refuse answers that there is no ticket.
func (p *dataRequest) refuse(rep *msg.AdmitReply) (clean bool) {
	h := p.w.Header()
	h[dataRefused] = []string{rep.Refusal.String()}
	h[dataEpoch] = []string{strconv.FormatUint(rep.Epoch, 10)}
	h[dataSeq] = []string{strconv.FormatUint(rep.Seq, 10)}
	return p.answerEmpty(http.StatusServiceUnavailable)
}

func (p *dataRequest) answerEmpty(status int) (clean bool) {
	p.w.Header()["Content-Length"] = []string{"0"}
	p.w.WriteHeader(status)
	return true
}

func (p *dataRequest) setTicketHeader(h http.Header) {
	if p.ticket.ID == 0 {
		return
	}
	t, values := &p.ticket, make([]string, 4) // one allocation
	for i, f := range [...]struct {
		name string
		n    uint64
	}{{dataTicket, t.ID}, {dataSeq, t.Seq}, {dataInc, t.Incarnation}, {dataEpoch, t.Epoch}} {
		values[i] = strconv.FormatUint(f.n, 10)
		h[f.name] = values[i : i+1 : i+1]
	}
}

func markResent(h http.Header, resent bool) {
	if resent {
		h[dataResent] = []string{"1"}
	}
}

// copyEngineHeader copies an engine's header to the answer. Date and Content-Type are set to nil, because
// net/http would add its own.
func (p *dataRequest) copyEngineHeader(engine http.Header, resent bool) {
	h := p.w.Header()
	h["Date"], h["Content-Type"] = nil, nil
	rankleg.CopyHeader(h, engine, func(name string) bool { return strings.HasPrefix(name, dataPrefix) })
	if length, ok := h["Content-Length"]; ok {
		delete(h, "Content-Length")
		h[dataLength] = length
	}
	p.setTicketHeader(h)
	markResent(h, resent)
}
