package ingress

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

// returnedTime is for how long an ingress that has returned a request gets none.
const returnedTime = 5 * time.Second

// groupOwners says which ingress owns the queue of a group: that of the node where the group's first rank
// runs, or else, of those that can be reached, that whose node has the smallest name. Each ingress finds this
// out by itself. While two of them disagree there are two queues, which costs levelling and no request.
type groupOwners struct {
	owners   map[int]string       // by group: the node
	ownersAt time.Time            // when they were found; zero: they must be found anew
	returned map[string]time.Time // owners that have returned a request, and when
}

// ingressNodes are the nodes that may own a queue, in the order of their names.
func ingressNodes(st *state.State) []string {
	var out []string
	for name, n := range st.Nodes {
		if !n.Lost && slices.Contains(n.Roles, state.RoleIngress) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// homes are the nodes of the groups that serve, and whether requests may wait for another group. Those of a
// prefill pool do not: a decode rank can compute the prompt.
func (g *groupQueue) homes() (homes map[int]string, mayCome bool) {
	ar := g.ar
	ar.mu.Lock()
	defer ar.mu.Unlock()
	first := map[int]*rank{}
	for id, r := range ar.ranks {
		if at := first[id.Group()]; r.publishedReady && (at == nil || id < at.ID) {
			first[id.Group()] = r
		}
	}
	homes = make(map[int]string, len(first))
	for group, r := range first {
		homes[group] = r.Node
	}
	if spec := ar.revision.Load(); spec != nil && spec.app.Pool == app.PoolPrefill {
		return homes, false
	}
	return homes, !ar.closed && (len(ar.suspectedNodes) > 0 || ar.comingUnits() > 0 && !ar.isDown())
}

// ownerOf chooses the owner of a group whose first rank is on the node home.
func (g *groupQueue) ownerOf(home string, nodes []string) string {
	in := g.ar.in
	if in.groupLinks == nil {
		return in.node
	}
	if i := slices.Index(nodes, home); i > 0 {
		nodes = append([]string{home}, nodes...)
	}
	for _, node := range nodes {
		at, isReturned := g.returned[node]
		switch {
		case node == in.node:
			return node
		case isReturned && time.Since(at) < returnedTime:
		case in.groupLinks.Reach(node):
			return node
		}
	}
	return in.node
}

// refreshOwners finds the owners anew if it is time, and moves the requests that wait at another one. Those
// whose group does not serve go to one that does. If none may come to serve, they are not held any more.
func (g *groupQueue) refreshOwners() {
	g.mu.Lock()
	isFresh := len(g.waits) == 0 || time.Since(g.ownersAt) < groupTick && g.allServe()
	g.mu.Unlock()
	if isFresh || g.rule.Load() == nil {
		return
	}
	homes, mayCome := g.homes()
	nodes := ingressNodes(g.ar.in.store.State())
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(homes) == 0 && !mayCome {
		g.dismiss()
		return
	}
	g.ownersAt = time.Now()
	clear(g.owners)
	for group, home := range homes {
		g.owners[group] = g.ownerOf(home, nodes)
	}
	for _, w := range g.byAge() {
		group := w.group
		if _, serves := homes[group]; !serves && len(homes) > 0 {
			group = slices.Min(slices.Collect(maps.Keys(homes)))
		}
		if owner := cmp.Or(g.owners[group], g.ar.in.node); owner != w.owner || group != w.group {
			g.withdraw(w)
			w.group, w.owner = group, owner
			g.place(w, w.client)
		}
	}
}

// allServe reports whether groups did serve, and all of them do so still.
func (g *groupQueue) allServe() bool {
	router := g.ar.router.Load()
	for group := range g.owners {
		if g.rows = router.GroupRanks(group, g.rows[:0]); len(g.rows) == 0 {
			return false
		}
	}
	return len(g.owners) > 0
}

// byAge are the requests that wait, the oldest first.
func (g *groupQueue) byAge() []*groupWait {
	return slices.SortedFunc(maps.Values(g.waits), func(a, b *groupWait) int {
		return cmp.Or(cmp.Compare(a.since, b.since), cmp.Compare(a.id, b.id))
	})
}

// choose finds the group for a request that arrives: that with the least tokens per rank, where the request
// counts as its uncached tokens. It returns false if none serves.
func (g *groupQueue) choose(w *groupWait, groups int) (serves bool) {
	router, least := g.ar.router.Load(), math.Inf(1)
	g.mu.Lock()
	defer g.mu.Unlock()
	if groups == 1 {
		g.rows = router.GroupRanks(0, g.rows[:0])
		return len(g.rows) > 0
	}
	tokens := make([]int64, groups) // that wait, and that are open on the ranks
	for _, other := range g.waits {
		tokens[min(other.group, groups-1)] += int64(other.tokens)
	}
	for group := range groups {
		g.rows = router.GroupRanks(group, g.rows[:0])
		for i := range g.rows {
			tokens[group] += g.rows[i].Context
		}
		cost := float64(tokens[group])/float64(len(g.rows)) + float64(w.uncached(group))
		if len(g.rows) > 0 && cost < least {
			w.group, least, serves = group, cost, true
		}
	}
	return serves
}

// join begins the wait. It returns false if the application holds no requests any more.
func (g *groupQueue) join(w *groupWait) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.rule.Load() == nil {
		return false
	}
	owner, isKnown := g.owners[w.group]
	if !isKnown {
		owner, g.ownersAt = g.ar.in.node, time.Time{}
	}
	w.owner = owner
	g.waits[w.id] = w
	g.place(w, w.client)
	return true
}

// putBack puts a request back that has found no room on the rank of its release. It keeps its place in time.
func (g *groupQueue) putBack(w *groupWait) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.withdraw(w)
	g.waits[w.id] = w
	g.place(w, 0)
}

// renew replaces what the ranks' caches hold of a request.
func (g *groupQueue) renew(w *groupWait, hits []routing.Hit) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.waits[w.id] == nil || slices.Equal(hits, w.hits) {
		return
	}
	w.hits = append(w.hits[:0], hits...)
	if l := g.lines[w.group]; w.owner == g.ar.in.node && l != nil {
		l.renewHits(w.id, w.hits)
	} else {
		g.place(w, w.client)
	}
}

// leave ends a wait, whatever its state.
func (g *groupQueue) leave(w *groupWait) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case a := <-w.answered:
		if !a.isNobody {
			g.withdraw(w)
		}
	default:
		if g.waits[w.id] != nil {
			delete(g.waits, w.id)
			g.withdraw(w)
		}
	}
}

// finish says that a request has ended that was released. Of one that a rank has taken, the owner hears from
// the rank.
func (g *groupQueue) finish(w *groupWait, rank routing.RankID, out int, isUndone bool) {
	if w.owner == g.ar.in.node {
		g.observe(routing.EvFinished, rank, w.id, out)
	} else if isUndone {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.withdraw(w)
	}
}

// place puts a request into the queue of its owner, or into an own queue if the owner cannot be reached.
func (g *groupQueue) place(w *groupWait, client uint64) {
	if g.rule.Load() == nil {
		g.answer(w, groupAnswer{isNobody: true})
		return
	}
	now := g.ar.in.clock()
	if w.owner != g.ar.in.node {
		if g.send(w.owner, &msg.GroupMessage{
			Kind: msg.GroupHold, Group: w.group, ID: w.id, Tokens: w.tokens, Hits: w.hits, Age: now - w.since,
			Client: client,
		}) {
			return
		}
		w.owner, g.ownersAt = g.ar.in.node, time.Time{}
	}
	g.line(w.group).Add(routing.GroupWaiting{
		ID: w.id, Tokens: w.tokens, Hits: w.hits, Since: w.since, Client: client,
	}, now)
	g.poke()
}

// answer ends a wait. The caller holds mu.
func (g *groupQueue) answer(w *groupWait, a groupAnswer) {
	delete(g.waits, w.id)
	w.answered <- a
}

// withdraw takes a request, which waits or was released, from its owner.
func (g *groupQueue) withdraw(w *groupWait) {
	if w.owner != g.ar.in.node {
		g.send(w.owner, &msg.GroupMessage{Kind: msg.GroupCancel, Group: w.group, ID: w.id})
	} else if l := g.lines[w.group]; l != nil {
		g.drop(l, w.id)
	}
}

// drop takes a request from a line of this ingress.
func (g *groupQueue) drop(l *groupLine, key uint64) {
	delete(l.holders, key)
	delete(l.unseen, key)
	if !l.Remove(key) {
		l.End(key, 0, g.ar.in.clock())
	}
	g.poke()
}

// dismiss ends the holding of all requests.
func (g *groupQueue) dismiss() {
	for _, w := range g.waits {
		g.withdraw(w)
		g.answer(w, groupAnswer{isNobody: true})
	}
	if g.rule.Load() == nil {
		for group, l := range g.lines {
			g.returnHolders(group, l)
		}
		clear(g.lines)
	}
}

func (g *groupQueue) send(node string, m *msg.GroupMessage) bool {
	m.App = g.ar.name
	links := g.ar.in.groupLinks
	return links != nil && links.Send(node, m)
}

// groupPeer is the ingress to the ingresses of other nodes.
type groupPeer struct{ in *Ingress }

var _ msg.GroupPeer = groupPeer{}

// ReceiveGroup implements msg.GroupPeer.
func (p groupPeer) ReceiveGroup(from string, m *msg.GroupMessage) {
	in := p.in
	if ar := in.findAppRouter(m.App); ar != nil {
		ar.groups.receive(from, m)
	} else if m.Kind == msg.GroupHold {
		in.groupLinks.Send(from, &msg.GroupMessage{
			Kind: msg.GroupReturn, App: m.App, Group: m.Group, ID: m.ID,
		})
	}
}

func (g *groupQueue) receive(from string, m *msg.GroupMessage) {
	g.mu.Lock()
	defer g.mu.Unlock()
	key, now := g.ar.in.routerKey(from, m.ID), g.ar.in.clock()
	switch m.Kind {
	case msg.GroupHold:
		if l := g.lines[m.Group]; g.rule.Load() == nil || l != nil && len(l.holders) >= maxHolders {
			g.send(from, &msg.GroupMessage{Kind: msg.GroupReturn, Group: m.Group, ID: m.ID})
			return
		}
		l := g.line(m.Group)
		if _, again := l.holders[key]; again {
			l.renewHits(key, m.Hits)
			return
		}
		l.holders[key] = groupHolder{node: from, id: m.ID, tokens: m.Tokens}
		l.Add(routing.GroupWaiting{
			ID: key, Tokens: m.Tokens, Hits: m.Hits, Since: now - m.Age, Client: m.Client,
		}, now)
		g.poke()
	case msg.GroupCancel:
		if l := g.lines[m.Group]; l != nil {
			g.drop(l, key)
		}
	case msg.GroupRelease:
		if w := g.waits[m.ID]; w != nil && w.owner == from {
			g.answer(w, groupAnswer{rank: m.Rank})
		} else { // it is another owner's by now
			g.send(from, &msg.GroupMessage{Kind: msg.GroupCancel, Group: m.Group, ID: m.ID})
		}
	case msg.GroupReturn:
		if w := g.waits[m.ID]; w != nil && w.owner == from {
			g.returned[from], g.ownersAt, w.owner = time.Now(), time.Time{}, g.ar.in.node
			g.place(w, w.client)
		}
	}
}

// renewHits replaces what the ranks' caches hold of a request that waits.
func (l *groupLine) renewHits(key uint64, hits []routing.Hit) {
	for i, w := range l.Waiting() {
		if w.ID == key {
			l.Waiting()[i].Hits = hits
		}
	}
}

// OwnerChanged implements msg.GroupPeer.
func (p groupPeer) OwnerChanged(string) {
	p.eachQueue(func(g *groupQueue) { g.ownersAt = time.Time{} })
}

// HolderLost implements msg.GroupPeer. What was released to the node, its ranks' streams tell of.
func (p groupPeer) HolderLost(node string) {
	p.eachQueue(func(g *groupQueue) {
		for _, l := range g.lines {
			for key, h := range l.holders {
				if h.node == node {
					g.drop(l, key)
				}
			}
		}
	})
}

// eachQueue changes the queues of all applications, and has them look.
func (p groupPeer) eachQueue(change func(g *groupQueue)) {
	in := p.in
	in.appRoutersMu.RLock()
	defer in.appRoutersMu.RUnlock()
	for _, ar := range in.appRouters {
		if g := &ar.groups; g.rule.Load() != nil {
			g.mu.Lock()
			change(g)
			g.mu.Unlock()
			g.poke()
		}
	}
}
