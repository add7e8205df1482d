package ingress

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/routing"
)

const (
	// groupTick is how often a groupQueue with requests compares what it knows with the Router, and asks anew
	// who owns the queues of its groups.
	groupTick = time.Second
	// unseenTime is how long a released request may take until the Router counts it.
	unseenTime = 2 * time.Second
	// maxHolders bounds the requests of other ingresses in one line. Each ingress bounds those of its own.
	maxHolders = 100_000
)

// groupQueue holds the requests of an application of lockstep groups until a GroupRule releases them. One
// ingress owns the queue of a group: lines are the queues that this ingress owns. waits are the requests of
// this ingress, wherever the owner of their queue is. Safe for concurrent use.
//
// One goroutine looks at the lines: when a request arrives, when a rank has room, when a first token is out,
// and when a line asks for it. Nothing else releases requests. The lock of the appRouter may be held when mu
// is taken, never the other way round.
type groupQueue struct {
	ar   *appRouter
	rule atomic.Pointer[routing.GroupRule] // nil: no requests are held
	wake chan struct{}                     // one slot
	stop chan struct{}                     // closed: the application ends

	mu      sync.Mutex
	running bool
	closed  bool
	waits   map[uint64]*groupWait // by request id: not released yet
	lines   map[int]*groupLine    // by group
	groupOwners
	rows []routing.GroupRank // reused
	look routing.GroupLook   // reused
}

// groupLine is the queue of one group, at its owner.
type groupLine struct {
	*routing.GroupLine
	holders map[uint64]groupHolder   // requests of other ingresses that wait, by the Router's key
	unseen  map[uint64]unseenRelease // likewise: released, and not counted by the Router yet
	held    routing.GroupHeld        // what the oldest waits for, as of the last look
	askAt   time.Duration            // 0: an event will change the answer
	cohorts cohortLog
}

// groupHolder is a request of another ingress.
type groupHolder struct {
	node   string
	id     uint64
	tokens int
}

// unseenRelease is a request on its way to a rank.
type unseenRelease struct {
	rank   routing.RankID
	tokens int
	at     time.Duration
}

func (g *groupQueue) init(ar *appRouter) {
	g.ar, g.wake, g.stop = ar, make(chan struct{}, 1), make(chan struct{})
	g.waits, g.lines = map[uint64]*groupWait{}, map[int]*groupLine{}
	g.owners, g.returned = map[int]string{}, map[string]time.Time{}
}

// configure follows the policy of the application.
func (g *groupQueue) configure(spec *app.Application, policy routing.Policy) {
	g.mu.Lock()
	defer g.mu.Unlock()
	cohorts, ok := policy.(routing.Cohorts)
	if !ok || spec.DataParallel.Coupling != app.Lockstep || g.closed {
		g.rule.Store(nil)
		g.poke()
		return
	}
	rule := cohorts.GroupRule()
	switch spec.Pool {
	case app.PoolPrefill:
		rule = rule.OfPrefillPool()
	case app.PoolDecode:
		rule = rule.OfDecodePool()
	}
	g.rule.Store(&rule)
	for _, l := range g.lines {
		l.SetRule(rule)
	}
	if !g.running {
		g.running = true
		g.ar.in.background.Go(g.run)
	}
	g.poke()
}

// close ends the goroutine. Requests that wait are not held any more.
func (g *groupQueue) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		g.closed = true
		g.rule.Store(nil)
		g.dismiss()
		close(g.stop)
	}
}

// poke has the goroutine look.
func (g *groupQueue) poke() { signal(g.wake) }

// room says that a rank may have room, or that no rank may get it any more. It never blocks.
func (g *groupQueue) room() {
	if g.rule.Load() != nil {
		g.poke()
	}
}

func (g *groupQueue) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ticked := time.Now(); ; {
		select {
		case <-g.stop:
			return
		case <-g.wake:
		case <-timer.C:
		}
		isTick := time.Since(ticked) >= groupTick
		if isTick {
			ticked = time.Now()
		}
		timer.Reset(g.lookAll(isTick))
	}
}

// lookAll looks at all lines, and says when they want to be looked at again. isTick: they are compared with
// the Router, too.
func (g *groupQueue) lookAll(isTick bool) (wait time.Duration) {
	g.refreshOwners()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.rule.Load() == nil {
		g.dismiss()
	}
	now, router := g.ar.in.clock(), g.ar.router.Load()
	wait = time.Hour
	if len(g.waits) > 0 {
		wait = groupTick
	}
	for group, l := range g.lines {
		if isTick {
			l.Reconcile(now-unseenTime, router.StateOf)
		}
		g.lookAt(group, l, router, now)
		if l.Released() > 0 {
			wait = min(wait, groupTick)
		}
		if l.askAt > 0 {
			wait = min(wait, max(l.askAt-now, time.Millisecond))
		}
	}
	return wait
}

// lookAt releases what may enter a group now. If no rank of it serves, its ranks will be new ones: own
// requests wait for them, those of other ingresses go back, because their ingresses may see more.
func (g *groupQueue) lookAt(group int, l *groupLine, router *routing.Router, now time.Duration) {
	g.rows = router.GroupRanks(group, g.rows[:0])
	if len(g.rows) == 0 {
		l.Restart()
		clear(l.unseen)
		g.returnHolders(group, l)
		l.held, l.askAt = routing.GroupHeld{Reason: routing.GroupNoRoom}, 0
		return
	}
	l.countUnseen(g.rows, router, now)
	l.Look(g.rows, now, &g.look)
	l.held, l.askAt = g.look.Held, g.look.AskAt
	for i := range g.look.Releases {
		g.release(group, l, &g.look.Releases[i], now)
	}
	l.cohorts.count(g.look.Releases, now)
}

// countUnseen adds to the rows what is on its way to the ranks.
func (l *groupLine) countUnseen(rows []routing.GroupRank, router *routing.Router, now time.Duration) {
	for key, u := range l.unseen {
		i := slices.IndexFunc(rows, func(rk routing.GroupRank) bool { return rk.ID == u.rank })
		if isOpen, _ := router.StateOf(u.rank, key); isOpen || i < 0 || now-u.at > unseenTime {
			delete(l.unseen, key)
			continue
		}
		rows[i].Slots = max(0, rows[i].Slots-1)
		rows[i].Open++
		rows[i].Context += int64(u.tokens)
	}
}

// release passes a release to the ingress of the request.
func (g *groupQueue) release(group int, l *groupLine, rel *routing.GroupRelease, now time.Duration) {
	to, isTaken := unseenRelease{rank: rel.Rank, at: now}, false
	if h, ok := l.holders[rel.ID]; ok {
		delete(l.holders, rel.ID)
		to.tokens = h.tokens
		isTaken = g.send(h.node, &msg.GroupMessage{
			Kind: msg.GroupRelease, Group: group, ID: h.id, Rank: rel.Rank,
		})
	} else if w := g.waits[rel.ID]; w != nil {
		to.tokens, isTaken = w.tokens, true
		g.answer(w, groupAnswer{rank: rel.Rank})
	}
	if isTaken {
		l.unseen[rel.ID] = to
	} else {
		l.End(rel.ID, 0, now)
	}
}

// returnHolders gives all requests of other ingresses back.
func (g *groupQueue) returnHolders(group int, l *groupLine) {
	for key, h := range l.holders {
		l.Remove(key)
		delete(l.holders, key)
		g.send(h.node, &msg.GroupMessage{Kind: msg.GroupReturn, Group: group, ID: h.id})
	}
}

// line is the queue of a group that this ingress owns.
func (g *groupQueue) line(group int) *groupLine {
	l := g.lines[group]
	if l == nil {
		l = &groupLine{
			GroupLine: routing.NewGroupLine(*g.rule.Load()), holders: map[uint64]groupHolder{},
			unseen: map[uint64]unseenRelease{},
		}
		g.lines[group] = l
	}
	return l
}

// observe follows the requests of a line: what a rank's stream says of them, or their own ingress, which
// knows it earlier.
func (g *groupQueue) observe(kind routing.EventKind, rank routing.RankID, key uint64, out int) {
	if g.rule.Load() == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.lines[rank.Group()]
	if l == nil {
		return
	}
	switch now := g.ar.in.clock(); kind {
	case routing.EvFirstToken:
		l.FirstToken(key, now)
	case routing.EvProgress:
		l.Progress(key, out, now)
		return
	case routing.EvFinished, routing.EvUndo:
		delete(l.unseen, key)
		l.End(key, out, now)
	default:
		return
	}
	if len(l.Waiting()) > 0 {
		g.poke()
	}
}

// state describes the queues.
func (g *groupQueue) state() []client.GroupQueue {
	g.mu.Lock()
	defer g.mu.Unlock()
	rows := map[int]*client.GroupQueue{}
	row := func(group int) *client.GroupQueue {
		if rows[group] == nil {
			rows[group] = &client.GroupQueue{Group: group, Owner: g.owners[group]}
		}
		return rows[group]
	}
	for group := range g.owners {
		row(group)
	}
	for _, w := range g.waits {
		row(w.group).Waiting++
	}
	for group, l := range g.lines {
		s := row(group)
		if s.Owner == "" || s.Owner == g.ar.in.node || len(l.Waiting())+l.Released() > 0 {
			describeLine(g, s, l)
		} // else this ingress had the queue once
	}
	out := make([]client.GroupQueue, 0, len(rows))
	for _, s := range rows {
		out = append(out, *s)
	}
	slices.SortFunc(out, func(a, b client.GroupQueue) int { return a.Group - b.Group })
	return out
}
