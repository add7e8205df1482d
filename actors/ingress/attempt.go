package ingress

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/internal/engineleg"
	"github.com/dpserve/dpserve/routing"
)

// attempt is one dispatch to a rank.
type attempt struct {
	router *routing.Router
	rank   *rank
	ticket msg.Ticket
	cancel context.CancelCauseFunc
	start  time.Time
	first  time.Time // first token
	posted time.Time // last FirstToken or Progress

	prev, next *attempt // rank.attempts
	tracked    bool
	begun      bool // it has a first byte; lane.mu
}

// try dispatches to rk and relays its answer. When it returns, the rank's load is given back. If c.status is 0 and c.cut is
// false, the client has seen nothing.
func (c *call) try(parent context.Context, rk *rank) result {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(errOver)
	a := &c.attempt
	*a = attempt{router: a.router, rank: rk, cancel: cancel, start: time.Now()}
	c.usage, c.counted, c.stream.tokens = openai.Usage{}, 0, 0
	c.guard.begin(cancel)
	defer c.guard.end()
	counted := c.route.Generates()
	if !c.entry.lane.begin(rk, a) {
		if counted {
			c.undo()
		}
		return result{cause: causeGone}
	}
	defer c.entry.lane.over(rk, a)
	if !counted {
		return c.tryUncounted(ctx, rk)
	}
	if !rk.local {
		return c.tryRemote(ctx, rk)
	}
	c.guard.arm(a.start, a.start.Add(c.in.timers.Admit), errAdmitSlow)
	rep, refused := c.admit(ctx, parent, rk)
	c.guard.pause()
	if refused != causeOK {
		return c.turnedAway(ctx, rep, refused)
	}
	c.granted(&rep.Ticket)
	res := result{cause: causeDrained} // what a panic leaves behind
	defer func() { c.done(&res) }()
	res = c.exchange(ctx)
	return res
}

// granted notes the ticket: from here on it is owed back.
func (c *call) granted(t *msg.Ticket) {
	a := &c.attempt
	a.ticket = *t
	a.router.Observe(&routing.Event{
		Kind: routing.EvTicket, Rank: a.rank.id, ReqID: c.query.ID, Seq: t.Seq, Incarnation: t.Incarnation, Now: c.in.clock(),
	})
}

// refused takes the bump back. A full rank's picture is corrected first, so the undo wakes nobody in vain.
func (c *call) refused(rep msg.AdmitReply, why cause) result {
	c.entry.lane.meter.Load().Refusal(rows[why].name)
	if why == causeFull {
		c.entry.lane.marked(c.attempt.rank, rep.Seq)
	}
	c.undo()
	return result{cause: why}
}

// turnedAway is refused for a request whose end is known here: what the rank calls expired is a client that left, or a deadline.
func (c *call) turnedAway(ctx context.Context, rep msg.AdmitReply, why cause) result {
	res := c.refused(rep, why)
	if why == causeExpired && ctx.Err() != nil {
		res.cause = ended(ctx)
	}
	return res
}

func (c *call) undo() {
	c.attempt.router.Observe(&routing.Event{Kind: routing.EvUndo, Rank: c.attempt.rank.id, ReqID: c.query.ID, Now: c.in.clock()})
}

// done gives the ticket back, exactly once, with what the attempt says about the engine.
func (c *call) done(res *result) {
	a, what := &c.attempt, rows[res.cause]
	var first time.Duration
	if !a.first.IsZero() {
		first = a.first.Sub(a.start)
	}
	a.rank.mailbox.Send(&msg.Done{
		TicketID: a.ticket.ID, Outcome: what.done, Cause: what.name,
		PromptTokens: c.usage.PromptTokens, CachedTokens: c.usage.CachedTokens, HasCached: c.usage.HasCached, CompletionTokens: c.generated(),
		FirstToken: first, Trip: c.countsToTrip(res), Busy: what.busy, Probe: what.probe,
	})
	c.entry.lane.took(time.Since(a.start))
	c.account()
}

// generated is the engine's count of output tokens, else the chunks seen.
func (c *call) generated() int { return max(c.usage.CompletionTokens, c.stream.tokens) }

// account adds the tokens to the metrics and teaches the estimate.
func (c *call) account() {
	n := c.generated()
	c.in.tokens.Add(uint64(max(n-c.counted, 0)))
	c.counted = max(n, c.counted)
	if c.usage.PromptTokens == 0 && n == 0 {
		return
	}
	c.entry.lane.meter.Load().Tokens(c.usage.PromptTokens, c.usage.CachedTokens, n)
	if c.query.Estimated {
		c.entry.lane.ratios[c.route].ObservePrompt(&c.scan, c.usage.PromptTokens)
	}
}

// exchange sends the request to an engine of this node and relays the answer.
func (c *call) exchange(ctx context.Context) result {
	c.guard.arm(time.Now(), c.firstTokenDue(), errFirstToken)
	resp, err := c.request(ctx)
	c.guard.pause()
	if err != nil {
		return c.unanswered(ctx, err)
	}
	defer closeBody(resp)
	return c.relay(ctx, resp)
}

// relay passes the answer on.
func (c *call) relay(ctx context.Context, resp *http.Response) result {
	switch {
	case resp.StatusCode >= http.StatusBadRequest:
		return c.relayError(ctx, resp)
	case resp.StatusCode >= http.StatusMultipleChoices: // its Location is an address behind the ingress, and clients would send the prompt there
		return result{cause: causeStatus, status: resp.StatusCode}
	case isStream(resp.Header):
		return c.relayStream(ctx, resp)
	default:
		return c.relayWhole(ctx, resp)
	}
}

// firstTokenDue is when the attempt must have shown its first token. An answer that is not streamed shows none: it gets the
// time that a stream with its number of tokens could take at most.
func (c *call) firstTokenDue() time.Time {
	d := c.entry.firstToken
	if c.route.Generates() && !c.scan.Stream {
		n := c.scan.MaxTokens
		if n < 0 || n > unknownTokens {
			n = unknownTokens
		}
		d += time.Duration(n) * c.entry.between
	}
	return c.attempt.start.Add(d)
}

// request sends once, and once more if a reused connection turned out to be closed: engines close idle connections, so that is nobody's fault and
// no attempt.
func (c *call) request(ctx context.Context) (*http.Response, error) {
	resp, o, err := c.sendOnce(ctx)
	if err == nil || !o.Stale() || ctx.Err() != nil {
		return resp, err
	}
	c.entry.lane.meter.Load().Attempt("keepalive_resend", "free")
	resp, _, err = c.sendOnce(ctx)
	return resp, err
}

func (c *call) sendOnce(ctx context.Context) (*http.Response, *engineleg.Request, error) {
	a := &c.attempt
	o := &engineleg.Request{URL: a.rank.urls[c.route], Header: c.header, Body: c.send}
	switch t := &a.ticket.Target; t.Addressing {
	case "header":
		o.Header = withRank(c.header, t.Selector)
	case "body":
		o.Body = openai.AppendField(nil, c.send, "routed_dp_rank", strconv.AppendInt(nil, int64(t.Selector), 10))
	}
	resp, err := c.in.legs.Send(ctx, a.ticket.Target.Owned, o)
	if !o.Settled() {
		c.settled = false
	}
	return resp, o, err
}

// broke says what a failed read of an answer's body means.
func (c *call) broke(ctx context.Context, err error, begun bool) result {
	switch {
	case ctx.Err() != nil:
		why := ended(ctx)
		if (why == causeStalled || why == causeSilent) && !begun {
			why = causeFirstToken // an empty delta came, and then nothing
		}
		return result{cause: why, err: err}
	case errors.Is(err, msg.ErrUnreachable):
		return result{cause: causeUnreachable, err: err}
	case begun:
		return result{cause: c.lostStream(), err: err}
	default:
		return result{cause: causeEmpty, err: err}
	}
}

// lostStream tells a rank that was drained from one that failed.
func (c *call) lostStream() cause {
	if c.entry.lane.isDraining(c.attempt.rank) {
		return causeDrained
	}
	return causeUpstreamLost
}

func closeBody(resp *http.Response) {
	if err := resp.Body.Close(); err != nil {
		return // the answer's outcome is decided; the connection is not used again
	}
}

// tokensSeen counts output.
func (c *call) tokensSeen(n int, now time.Time) {
	if c.attempt.first.IsZero() {
		c.attempt.first = now
	}
	c.in.tokens.Add(uint64(n)) //nolint:gosec // a count
	c.counted += n
}

// report tells the rank that its prefill is done, and later now and then how far its stream is, so that it is seen to live. It
// comes behind the write: a message wakes its receiver, and the client need not wait for that. A stream that has ended needs no
// report: its Done says it all.
func (c *call) report(now time.Time) {
	a := &c.attempt
	switch {
	case a.first.IsZero() || now.Sub(a.posted) < progressEvery:
		return
	case a.posted.IsZero():
		a.rank.mailbox.Send(&msg.FirstToken{TicketID: a.ticket.ID, At: a.first})
	default:
		a.rank.mailbox.Send(&msg.Progress{TicketID: a.ticket.ID, Out: c.stream.tokens})
	}
	a.posted = now
}

func asBodyError(err error) (*openai.BodyError, bool) {
	var e *openai.BodyError
	ok := errors.As(err, &e)
	return e, ok
}
