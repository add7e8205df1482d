package controller

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

// The load of a rank is the mean of the window, which is cut into parts. It is shorter than a minute, so that
// an imbalance is over at most a minute after the loads are even.
const (
	windowPart  = 5 * time.Second
	windowParts = 10
	// A rank counts when it has reported for half of the window: one long prompt of a rank that has just
	// become ready, or that a new leader has just heard of, is no imbalance.
	knownParts = windowParts / 2
)

// An imbalance begins when the fullest rank has more than unevenRatio times the mean of all ranks, and
// unevenGap tokens more than it. It ends below evenRatio or evenGap. A few short requests, of which each rank
// has one more or less, are thus no imbalance.
const (
	unevenRatio, evenRatio = 1.5, 1.25
	unevenGap, evenGap     = 16 << 10, 8 << 10
)

// balance compares the loads of a pool's ranks over time. Time is an argument.
type balance struct {
	loads    map[string]*loadWindow // by rank
	lastPart int64                  // the part of the window in which update compared the ranks last
	since    time.Time              // when the imbalance began; zero: the loads are even

	maxMean, mean float64
	fullest       []client.RankLoad // far above the mean
}

// loadWindow holds the reports of the last windowParts parts, each at its number modulo windowParts.
type loadWindow [windowParts]struct {
	part       int64
	sum, count int
}

// partAt numbers the parts of the window.
func partAt(now time.Time) int64 { return now.UnixNano() / int64(windowPart) }

// add notes what a rank has reported.
func (b *balance) add(now time.Time, rank string, tokens int) {
	w := b.loads[rank]
	if w == nil {
		w = &loadWindow{}
		b.loads[rank] = w
	}
	part := partAt(now)
	p := &w[part%windowParts]
	if p.part != part {
		p.part, p.sum, p.count = part, 0, 0
	}
	p.sum += tokens
	p.count++
}

// meanAt returns the mean load in the window that ends with a part; known says in how many parts the rank has
// reported.
func (w *loadWindow) meanAt(part int64) (mean float64, known int) {
	sum := 0.0
	for _, p := range w {
		if p.count > 0 && part-p.part < windowParts {
			sum += float64(p.sum) / float64(p.count)
			known++
		}
	}
	return sum / max(1, float64(known)), known
}

// update compares the ranks, once per part of the window. It reports whether an imbalance has begun or ended.
func (b *balance) update(now time.Time) (changed bool) {
	part := partAt(now)
	if part == b.lastPart {
		return false
	}
	b.lastPart = part
	var ranks []client.RankLoad
	sum := 0.0
	for _, rank := range slices.Sorted(maps.Keys(b.loads)) {
		mean, known := b.loads[rank].meanAt(part)
		switch {
		case known == 0:
			delete(b.loads, rank)
		case known >= knownParts:
			ranks = append(ranks, client.RankLoad{Rank: rank, Tokens: int(mean)})
			sum += mean
		}
	}
	wasUneven := !b.since.IsZero()
	b.mean = sum / max(1, float64(len(ranks)))
	slices.SortStableFunc(ranks, func(x, y client.RankLoad) int { return cmp.Compare(y.Tokens, x.Tokens) })
	most := 0.0
	if len(ranks) > 1 {
		most = float64(ranks[0].Tokens)
	}
	b.maxMean = most / max(1, b.mean)
	ratio, gap := unevenRatio, float64(unevenGap)
	if wasUneven {
		ratio, gap = evenRatio, evenGap
	}
	isUneven := b.maxMean > ratio && most-b.mean > gap
	b.fullest = slices.DeleteFunc(ranks, func(r client.RankLoad) bool {
		return float64(r.Tokens) <= ratio*b.mean
	})
	switch {
	case isUneven == wasUneven:
		return false
	case isUneven:
		b.since = now
	default:
		b.since = time.Time{}
	}
	return true
}

// Words of an event about the loads of ranks.
const (
	loadEven   = "load-even"
	loadUneven = "load-uneven"
)

// noteLoads takes the loads of a report, and reports imbalances that begin or end. All pools are compared at
// each report, because the nodes of a pool may be silent.
func (c *Core) noteLoads(now time.Time, loads []msg.RankLoad) {
	for _, l := range loads {
		u := c.units[l.Unit]
		if u == nil || u.m.Phase != state.Ready {
			continue
		}
		b := c.balances[u.poolID]
		if b == nil {
			b = &balance{loads: map[string]*loadWindow{}}
			c.balances[u.poolID] = b
		}
		b.add(now, fmt.Sprintf("%s/%d/%d", u.poolName(), u.group, l.Rank), l.Tokens)
	}
	byName := func(x, y poolID) int { return cmp.Compare(x.poolName(), y.poolName()) }
	for _, id := range slices.SortedFunc(maps.Keys(c.balances), byName) {
		b := c.balances[id]
		changed := b.update(now)
		if len(b.loads) == 0 {
			delete(c.balances, id)
		}
		if a := c.apps[id.app]; changed && a != nil {
			e := Event{At: now, App: id.app, From: loadUneven, To: loadEven, Reason: id.poolName() + ": even"}
			if pool := a.pool(id.pool); !b.since.IsZero() && pool != nil {
				e.From, e.To, e.Reason = loadEven, loadUneven, b.status(pool).String()
			}
			c.emit(ChangeEffect{e})
		}
	}
}

// imbalances returns the pools of an application whose ranks are loaded unevenly.
func (c view) imbalances(a *application) (out []client.Imbalance) {
	for _, pool := range a.pools {
		if b := c.balances[poolID{a.name, pool.Pool}]; b != nil && !b.since.IsZero() {
			out = append(out, *b.status(pool))
		}
	}
	return out
}

func (b *balance) status(pool *app.Application) *client.Imbalance {
	out := &client.Imbalance{
		Pool: pool.PoolName(), MaxMean: b.maxMean, Mean: int(b.mean), Ranks: b.fullest,
		Policy: pool.Routing.Policy, Since: b.since,
	}
	balancing := routing.BalancingNames(pool.DataParallel.Coupling == app.Lockstep)
	if !slices.Contains(balancing, out.Policy) {
		out.Policies = balancing
	}
	return out
}
