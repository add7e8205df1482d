package routing

// opensWatcher is a policy whose state follows every open request by itself. The Router then tells it exactly
// when a request begins and ceases to count on a rank (EvOpened, EvClosed): only the account knows about
// bumps that expire, snapshots that no longer name a request, or tickets of another incarnation.
type opensWatcher interface{ watchesOpens() bool }

// opensLog gathers what an event changed in the accounts until the policy has seen the event itself. nil logs
// nothing.
type opensLog struct{ list []openChange }

type openChange struct {
	key    uint64
	rank   RankID
	tokens int32
	open   bool
}

func (l *opensLog) opened(rank RankID, o *open) {
	if l != nil {
		l.list = append(l.list, openChange{key: o.key, rank: rank, tokens: o.tokens, open: true})
	}
}

func (l *opensLog) closed(rank RankID, key uint64) {
	if l != nil {
		l.list = append(l.list, openChange{key: key, rank: rank})
	}
}

// logDifference logs what the account has that before had not, and the other way round.
func (a *account) logDifference(rank RankID, before *opens) {
	if a.log == nil {
		return
	}
	for i := range before.cells {
		if o := &before.cells[i]; o.phase != free && a.opens.get(o.key) == nil {
			a.log.closed(rank, o.key)
		}
	}
	for i := range a.opens.cells {
		if o := &a.opens.cells[i]; o.phase != free && before.get(o.key) == nil {
			a.log.opened(rank, o)
		}
	}
}

// derive passes the log on to the policy. q is the request that was dispatched, nil for any other event.
func (r *Router) derive(q *Request) {
	if r.log == nil {
		return
	}
	for i := range r.log.list {
		c := &r.log.list[i]
		r.derived = Event{Kind: EvClosed, Rank: c.rank, ReqID: c.key, Tokens: int(c.tokens)}
		if c.open {
			r.derived.Kind = EvOpened
			if q != nil && q.ID == c.key {
				r.derived.Request = q
			}
		}
		r.policy.Observe(r.state, &r.view, &r.derived)
	}
	r.derived.Request = nil
	r.log.list = r.log.list[:0]
}
