package rankleg

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/openai"
)

// Timers of a Near. All must be set.
type Timers struct {
	Admit        time.Duration // for the reply of a rank's actor; after it the rank counts as overloaded
	LateTicket   time.Duration // how long an abandoned admission is waited for, to return its ticket
	Dial         time.Duration // for a connection to an engine
	IdleOwned    time.Duration // idle connections to engines that dpserve started
	IdleAttached time.Duration // idle connections to other engines
}

// Near asks the ranks of its own node. Safe for concurrent use.
type Near struct {
	timers  Timers
	serves  func() bool
	engines engines
	waits   sync.Pool      // *wait
	late    sync.WaitGroup // waits for late tickets
}

// wait is what waits for the reply of a rank's actor. It is used again when the reply has come.
type wait struct {
	reply    chan msg.AdmitReply
	patience *time.Timer
}

var _ Asker = (*Near)(nil)

// NewNear makes a Near. A nil dial is TCP. serves tells whether the node may serve, that is, holds its lease;
// nil: always.
func NewNear(t Timers, dial Dialer, serves func() bool) *Near {
	n := &Near{timers: t, serves: serves, engines: newEngines(t, dial)}
	n.waits.New = func() any {
		return &wait{make(chan msg.AdmitReply, 1), time.NewTimer(t.Admit)}
	}
	return n
}

// Close waits for late tickets and closes the connections to engines. No Ask may be running or follow.
func (n *Near) Close() {
	n.late.Wait()
	n.engines.close()
}

// Ask implements Asker.
func (n *Near) Ask(ctx context.Context, q *Request) (*http.Response, msg.AdmitReply, error) {
	reply, err := n.Reserve(ctx, q)
	if err != nil || reply.Refusal != msg.Granted {
		return nil, reply, err
	}
	resp, err := n.askEngine(ctx, q)
	if err == nil && n.serves != nil {
		resp.Body = &leasedBody{inner: resp.Body, serves: n.serves}
	}
	return resp, reply, err
}

// Reserve implements Asker.
func (n *Near) Reserve(ctx context.Context, q *Request) (reply msg.AdmitReply, err error) {
	switch {
	case n.serves != nil && !n.serves():
		return q.refused(msg.NoLease), nil
	case q.Admit == nil:
		return reply, nil
	}
	if reply = n.admit(ctx, q); reply.Refusal == msg.Granted {
		q.OnTicket(&reply.Ticket)
	}
	return reply, nil
}

// admit asks the rank's actor for a ticket. It waits for the reply, for the end of ctx, which counts as a
// refusal because the request has expired, for the end of the actor, which then replies to nothing, or for
// Timers.Admit.
func (n *Near) admit(ctx context.Context, q *Request) msg.AdmitReply {
	w, _ := n.waits.Get().(*wait)
	q.Admit.Reply = w.reply
	box := q.Rank.Mailbox
	if box.TrySend(q.Admit) != nil {
		n.waits.Put(w)
		select {
		case <-box.Stopped():
			return q.refused(msg.Gone)
		default:
			return q.refused(msg.Overloaded)
		}
	}
	w.patience.Reset(n.timers.Admit)
	select {
	case rep := <-w.reply:
		n.endWait(w)
		if rep.Refusal == msg.Granted && (ctx.Err() != nil || q.Admit.Ctx.Err() != nil) {
			giveBackLate(box, &rep) // the request left at the same moment: no engine is asked
			return q.refused(msg.Expired)
		}
		return rep
	case <-box.Stopped():
		q.IsAdmitPending = true // the mailbox may still hold the message
		select {
		case rep := <-w.reply: // it came just before the actor ended
			return rep
		default:
			return q.refused(msg.Gone) // w is not used again
		}
	case <-ctx.Done():
		n.returnLateTicket(q, w)
		return q.refused(msg.Expired)
	case <-w.patience.C:
		n.returnLateTicket(q, w)
		return q.refused(msg.Overloaded)
	}
}

func (n *Near) endWait(w *wait) {
	w.patience.Stop()
	n.waits.Put(w)
}

func (q *Request) refused(why msg.Refusal) msg.AdmitReply {
	return msg.AdmitReply{Refusal: why, Epoch: q.Rank.Epoch}
}

// returnLateTicket waits for the ticket of a request that has already left, and returns it. It uses one
// goroutine per such request, which ends with the reply, the actor or Timers.LateTicket.
func (n *Near) returnLateTicket(q *Request, w *wait) {
	q.IsAdmitPending = true
	box := q.Rank.Mailbox
	w.patience.Reset(n.timers.LateTicket)
	n.late.Go(func() {
		select {
		case rep := <-w.reply:
			n.endWait(w)
			if rep.Refusal == msg.Granted {
				giveBackLate(box, &rep)
			}
		case <-box.Stopped():
		case <-w.patience.C:
		}
	})
}

// giveBackLate returns a ticket that no request uses.
func giveBackLate(box msg.Mailbox, rep *msg.AdmitReply) {
	box.Send(&msg.Done{TicketID: rep.Ticket.ID, Outcome: msg.Refused, Cause: "late_ticket"})
}

// askEngine sends the request, and sends it once more if a connection that had waited turns out to be closed.
// Engines close idle connections, so this is no failure and not a new attempt. If the second time brings no
// answer either, the first error counts: the engine may have died of the request, and the refused dial that
// follows would hide it. A guarded request is not sent twice: there a dial shows that the engine lives.
func (n *Near) askEngine(ctx context.Context, q *Request) (*http.Response, error) {
	header, body := q.addressed()
	body, named := q.rename(body)
	header = q.Rank.withKey(header)
	to, method := q.urlOf(), ""
	if q.Target != "" {
		method = q.Route.Method()
	}
	engine := n.engines.of(q.Rank.Target.Owned)
	for first := error(nil); ; {
		o := &engineRequest{
			Method: method, URL: to, Trust: q.Rank.trust(), Header: header, Body: body, rest: q.Rest,
			guard: q.Guard,
		}
		resp, err := engine.send(ctx, o)
		if err == nil && named != nil {
			named.inAnswer(resp, q.answerRoute())
		}
		switch {
		case err == nil || ctx.Err() != nil || IsMalformed(err) || IsOutOfFiles(err):
			return resp, err
		case q.Rest != nil && q.Rest.IsBegun():
			return nil, err
		case first != nil:
			return nil, first
		case !o.isStale || q.Guard != nil && engine.reach(ctx, o) != nil:
			return nil, err
		case q.Guard != nil:
			return nil, fmt.Errorf("%w: %w", ErrNotResent, err)
		}
		first, q.Resent = err, true
	}
}

// addressed returns header and body for the engine. An engine that hosts several ranks behind one URL is told
// which of them has granted the ticket, whether Ask or the caller got it. SGLang reads the number for its own
// route from the body alone.
func (q *Request) addressed() (http.Header, []byte) {
	by := q.Rank.Target.Addressing
	if q.Admit == nil && !q.IsHeld || by != "header" && by != "body" {
		return q.Header, q.Body
	}
	header, body, number := q.Header, q.Body, strconv.Itoa(q.Rank.Target.Selector)
	if by == "header" {
		header = make(http.Header, len(q.Header)+1) // an earlier attempt may still read the shared one
		maps.Copy(header, q.Header)
		header[headerRank] = []string{number}
	}
	switch {
	case by == "header" && q.Route != openai.Generate:
	case q.Rest != nil: // the end is not here; the beginning has other members
		i := bytes.IndexByte(q.Body, '{') + 1
		body = slices.Concat(q.Body[:i], []byte(`"routed_dp_rank":`+number+","), q.Body[i:])
	case !q.IsPlain:
		body = openai.AppendField(nil, q.Body, "routed_dp_rank", []byte(number))
	}
	return header, body
}

// leasedBody is an answer that ends when its node loses its lease: a node that was suspended must not
// continue its streams.
type leasedBody struct {
	inner  io.ReadCloser
	serves func() bool
}

func (b *leasedBody) Read(p []byte) (int, error) {
	n, err := b.inner.Read(p)
	if !b.serves() {
		return 0, ErrNoLease
	}
	return n, err
}

func (b *leasedBody) Close() error { return b.inner.Close() }

// HasBuffered is that of the inner body.
func (b *leasedBody) HasBuffered() bool { return HasBuffered(b.inner) }

// HasBuffered reports that the next Read of an answer's body does not wait for the engine. False may also
// mean that this is not known.
func HasBuffered(body io.Reader) bool {
	b, ok := body.(interface{ HasBuffered() bool })
	return ok && b.HasBuffered()
}
