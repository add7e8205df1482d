package controller

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/app"
)

const (
	// avoidFor is how long an application avoids a node after failed starts there.
	avoidFor = 10 * time.Minute
	// leaveAfter is the failed start in a row with which a unit leaves its seats: the first may be chance.
	leaveAfter = 2
)

// avoidance says until when and why an application avoids a node: its units get seats there only if no other
// node has room.
type avoidance struct {
	until  time.Time
	launch string // what failed to start; another launch may start there
	why    string
}

func (a avoidance) describe(name string) string {
	return fmt.Sprintf("avoided for %s until %s: %s", name, a.until.UTC().Format(time.RFC3339), a.why)
}

// avoidances are the nodes that applications avoid: by pool, then by node. A new leader begins without
// any.
type avoidances map[string]map[string]avoidance

// drop ends what is over. A clock that was set back ends it too.
func (as avoidances) drop(now time.Time) {
	for _, nodes := range as {
		maps.DeleteFunc(nodes, func(_ string, a avoidance) bool {
			left := a.until.Sub(now)
			return left <= 0 || left > avoidFor
		})
	}
}

// clone returns a copy for a trial placement.
func (as avoidances) clone() avoidances {
	out := avoidances{}
	for name, nodes := range as {
		out[name] = maps.Clone(nodes)
	}
	return out
}

// nodesOf returns the nodes that a pool of an application avoids, the latest failure first: where all of them
// fail, starts go round.
func (as avoidances) nodesOf(a *application, pool string) []string {
	marks := as[app.PoolName(a.name, pool)]
	var out []string
	for node, mark := range marks {
		if slices.ContainsFunc(a.units, func(u app.Unit) bool { return a.startsAs(u.ID, mark.launch) }) {
			out = append(out, node)
		}
	}
	slices.SortFunc(out, func(n, o string) int {
		return cmp.Or(marks[o].until.Compare(marks[n].until), cmp.Compare(n, o))
	})
	return out
}

// notesOn says which applications avoid a node and why, in the order of their names. It leaves out those that
// avoid all usable nodes: they have no other.
func (as avoidances) notesOn(node string, apps map[string]*application, usable int) []string {
	var out []string
	for _, a := range inOrder(apps) {
		for _, p := range a.pools {
			if nodes := as.nodesOf(a, p.Pool); slices.Contains(nodes, node) && len(nodes) < usable {
				out = append(out, as[p.PoolName()][node].describe(p.PoolName()))
			}
		}
	}
	return out
}

// noteFailedStart has the application avoid the node that reported a failed start, from the second in a row
// on. A start with which the node's process ended says nothing about the node: the unit may end the next one
// as well.
func (as avoidances) noteFailedStart(now time.Time, u *unit) {
	node := u.failedOn()
	if node == "" || u.m.NodeDied || u.m.Attach || u.m.Attempt < leaveAfter {
		return
	}
	if as[u.poolName()] == nil {
		as[u.poolName()] = map[string]avoidance{}
	}
	as[u.poolName()][node] = avoidance{
		until: now.Add(avoidFor), launch: u.seat.launch,
		why: fmt.Sprintf("start %d of %s failed there: %s", u.m.Attempt, u.id, u.m.Reason),
	}
}

// forgive ends what the application has against the nodes of a unit that is ready.
func (as avoidances) forgive(u *unit) {
	for _, n := range u.nodes {
		delete(as[u.poolName()], n)
	}
}

// spreadOf is a number from 0 to 1 that differs between units and epochs, and is the same in every replay.
func spreadOf(unit string, epoch uint64) float64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(unit)) // a hash never fails
	return rand.New(rand.NewPCG(h.Sum64(), epoch)).Float64()
}
