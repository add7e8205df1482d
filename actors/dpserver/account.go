package dpserver

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// ticket is one open request of a rank.
type ticket struct {
	req          msg.OpenRequest
	weight       int           // in sequences
	stopWatch    func() bool   // stops the watch of the admission's context
	prompt       *sentPrompt   // in the record of sent prompts; nil: it is not recorded
	admittedAt   time.Time     // when it was granted
	lastAt       time.Time     // of its last record: the times of a request never go back
	prefillAlone time.Duration // predicted time of its prefill if nothing else runs
	// predicted time of its prefill behind all earlier prefill; 0: not predicted
	prefillPredicted time.Duration
	prefillAssumed   bool // its prefill is over by prediction: the engine has not shown a first token
}

func (t *ticket) hasFirstToken() bool { return t.req.Decoding && !t.prefillAssumed }

// clampFirstToken is the time of its first token: the reported time if it lies between its admission and now.
// Without a report it is now.
func (t *ticket) clampFirstToken(reported, now time.Time) time.Time {
	switch {
	case reported.IsZero(), reported.After(now):
		return now
	case reported.Before(t.lastAt):
		return t.lastAt
	default:
		return reported
	}
}

// timePerToken is the mean time between the tokens of a request that has ended well; 0 = it has no second
// one.
func (t *ticket) timePerToken(m *msg.Done, now time.Time) time.Duration {
	if m.Outcome != msg.OK || m.FirstToken <= 0 || m.CompletionTokens < 2 {
		return 0
	}
	return (now.Sub(t.admittedAt) - m.FirstToken) / time.Duration(m.CompletionTokens-1)
}

// uncachedTokens is the number of tokens that its prefill computes.
func (t *ticket) uncachedTokens() int { return max(t.req.Tokens-t.req.Hit, 0) }

// account is every open ticket of an incarnation.
type account struct {
	tickets map[uint64]*ticket
	// ended tickets for re-use: after warm-up an admission allocates only the watch of its context
	free   []*ticket
	weight int // sequences of all tickets
	// prompt tokens and generated tokens of all tickets
	tokens int
	// prompt tokens of requests without a first token: the most prefill that may be ahead
	prefillTokens int
	// prompt tokens of requests whose prefill is over, seen or predicted: a prefill rank holds them until a
	// decode rank has read them
	computedTokens int
	uncachedWork   int           // uncached tokens of requests whose prefill is not over, seen or predicted
	prefillSum     time.Duration // predicted time of the same requests, one after the other
}

func newAccount() account { return account{tickets: map[uint64]*ticket{}} }

func (a *account) openCount() int { return len(a.tickets) }

func (a *account) add(id uint64, req msg.OpenRequest, weight int, stopCtx func() bool) *ticket {
	var t *ticket
	if n := len(a.free); n > 0 {
		t, a.free = a.free[n-1], a.free[:n-1]
	} else {
		t = new(ticket)
	}
	*t = ticket{req: req, weight: weight, stopWatch: stopCtx}
	a.tickets[id] = t
	a.weight += weight
	a.tokens += req.Tokens
	a.prefillTokens += req.Tokens
	a.uncachedWork += t.uncachedTokens()
	return t
}

// markDecoding marks a ticket's prefill as done. isAssumed says that this is a prediction: it does not
// shorten the stall limit, because the engine has not shown a first token. It returns false if the prefill
// was done already, or the ticket is unknown.
func (a *account) markDecoding(id uint64, isAssumed bool) (*ticket, bool) {
	t := a.tickets[id]
	if t == nil || t.req.Decoding {
		return t, false
	}
	t.req.Decoding, t.prefillAssumed = true, isAssumed
	if !isAssumed {
		a.prefillTokens -= t.req.Tokens
	}
	a.computedTokens += t.req.Tokens
	a.endPrefill(t)
	return t, true
}

func (a *account) endPrefill(t *ticket) {
	a.uncachedWork -= t.uncachedTokens()
	a.prefillSum -= t.prefillAlone
}

// addPrefillTime notes how long the prefill of a ticket is predicted to take alone.
func (a *account) addPrefillTime(t *ticket, d time.Duration) {
	t.prefillAlone = d
	a.prefillSum += d
}

// addOutput notes how many tokens a request has generated so far.
func (a *account) addOutput(t *ticket, out int) {
	a.tokens += out - t.req.Out
	t.req.Out = out
}

// remove takes a ticket off the account. It returns nil if the ticket is unknown: it lapsed, or belongs to an
// earlier incarnation. The caller recycles it.
func (a *account) remove(id uint64) *ticket {
	t := a.tickets[id]
	if t == nil {
		return nil
	}
	delete(a.tickets, id)
	a.weight -= t.weight
	a.tokens -= t.req.Tokens + t.req.Out
	if !t.hasFirstToken() {
		a.prefillTokens -= t.req.Tokens
	}
	if t.req.Decoding {
		a.computedTokens -= t.req.Tokens
	} else {
		a.endPrefill(t)
	}
	if t.stopWatch != nil {
		t.stopWatch()
	}
	return t
}

// recycle keeps a removed ticket for a later request.
func (a *account) recycle(t *ticket) {
	t.prompt = nil
	a.free = append(a.free, t)
}

func (a *account) reset() {
	for id := range a.tickets {
		a.recycle(a.remove(id))
	}
}

// listRequests lists the requests in the order of their admission: the engine computes their prompts in that
// order.
func (a *account) listRequests() []msg.OpenRequest {
	out := make([]msg.OpenRequest, 0, len(a.tickets))
	for _, id := range slices.Sorted(maps.Keys(a.tickets)) {
		out = append(out, a.tickets[id].req)
	}
	return out
}

// orphans are tickets whose admission's context has ended. The Done of nearly every one waits in the mailbox
// already, because a request's context ends right after its answer. So they share one timer and one message:
// a timer for each request would wake the actor each time.
type orphans struct {
	post func(m any) // to the replica

	mu         sync.Mutex
	queue      []orphan // by due
	isTimerSet bool     // a lapseTimer runs
}

type orphan struct {
	ticket uint64
	due    time.Time
}

// maxOrphans is how many may wait before the actor drops those whose ticket has ended, ahead of the timer.
const maxOrphans = 4096

// add notes that the context of a ticket's admission has ended: without a Done the ticket lapses after wait,
// which is the same for all tickets.
func (o *orphans) add(ticket uint64, wait time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queue = append(o.queue, orphan{ticket, time.Now().Add(wait)})
	if !o.isTimerSet {
		o.setTimer(wait)
	}
	if len(o.queue)%maxOrphans == 0 {
		o.post(pruneRequest{})
	}
}

func (o *orphans) setTimer(d time.Duration) {
	o.isTimerSet = true
	time.AfterFunc(d, func() { o.post(lapseTimer{}) })
}

func (o *orphans) prune(open map[uint64]*ticket) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.dropEnded(open)
}

func (o *orphans) dropEnded(open map[uint64]*ticket) {
	o.queue = slices.DeleteFunc(o.queue, func(e orphan) bool { return open[e.ticket] == nil })
}

// takeDue takes the open tickets that are due, and sets the timer for the next.
func (o *orphans) takeDue(now time.Time, open map[uint64]*ticket) (due []uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.dropEnded(open)
	n := 0
	for n < len(o.queue) && !now.Before(o.queue[n].due) {
		due = append(due, o.queue[n].ticket)
		n++
	}
	o.queue = slices.Delete(o.queue, 0, n)
	if o.isTimerSet = len(o.queue) > 0; o.isTimerSet {
		o.setTimer(o.queue[0].due.Sub(now))
	}
	return due
}
