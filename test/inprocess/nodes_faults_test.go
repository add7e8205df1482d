package inprocess

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// nodeFault is one kind of step of a walk over nodes.
type nodeFault struct {
	name   string
	weight int
	do     func(r *nodeWalk)
}

// nodeFaults are those that may cost the restart of an engine.
func nodeFaults() []nodeFault {
	return []nodeFault{
		{"silence around a node", 2, func(r *nodeWalk) { r.silence(r.draw(r.peers())) }},
		{"silence one way", 2, func(r *nodeWalk) { r.oneWay(r.peers()) }},
		{"cut", 1, func(r *nodeWalk) { r.cut(r.peers()) }},
		{"bridge", 1, (*nodeWalk).bridge},
		{"delay", 1, (*nodeWalk).delay},
		{"a disk hangs", 2, func(r *nodeWalk) { r.sicken(r.draw(r.control()), (*harness.Disk).Hang) }},
		{"the leader's disk hangs", 1, func(r *nodeWalk) { r.sicken(r.leader(), (*harness.Disk).Hang) }},
		{"a disk is full", 1, func(r *nodeWalk) { r.sicken(r.draw(r.control()), (*harness.Disk).Fill) }},
		{"a node is told to stop", 2, func(r *nodeWalk) { r.terminate(r.draw(r.peers())) }},
		{"a process dies", 2, func(r *nodeWalk) { r.crash(r.draw(r.peers()), awayFor) }},
		{"the leader's process dies", 1, func(r *nodeWalk) { r.crash(r.leader(), awayFor) }},
		{"a machine dies", 2, func(r *nodeWalk) { r.drop(r.draw(r.peers()), awayFor) }},
		{"heal", 5, (*nodeWalk).heal},
		{"an engine dies", 3, (*nodeWalk).kill},
		{"deploy", 2, (*nodeWalk).deploy},
		{"requests", 8, (*nodeWalk).ask},
	}
}

// gentleFaults must not cost a single restart: what they do is between workers, or among control nodes
// without ranks, or too little to end a lease.
func gentleFaults() []nodeFault {
	workers := func(r *nodeWalk) []*harness.Peer { return r.c.Peers()[r.nodes-r.workers:] }
	return []nodeFault{
		{"silence between workers", 2, func(r *nodeWalk) { r.oneWay(workers(r)) }},
		{"cut between workers", 2, func(r *nodeWalk) { r.cut(workers(r)) }},
		{"delay", 2, (*nodeWalk).delay},
		{"a disk hangs", 2, func(r *nodeWalk) { r.sicken(r.draw(r.control()), (*harness.Disk).Hang) }},
		{"the leader's disk hangs", 2, func(r *nodeWalk) { r.sicken(r.leader(), (*harness.Disk).Hang) }},
		{"silence around a control node", 2, func(r *nodeWalk) { r.silence(r.draw(r.control())) }},
		{"a control node is told to stop", 1, func(r *nodeWalk) { r.terminate(r.draw(r.control())) }},
		{"the leader's machine dies", 2, func(r *nodeWalk) { r.drop(r.leader(), awayFor) }},
		{"a worker's process dies", 3, func(r *nodeWalk) {
			list := slices.DeleteFunc(r.peers(), func(p *harness.Peer) bool {
				return slices.Contains(r.control(), p)
			})
			r.crash(r.draw(list), briefly)
		}},
		{"heal", 5, (*nodeWalk).heal},
		{"requests", 8, (*nodeWalk).ask},
	}
}

// leader is the node that leads, or believes so; nil if there is none.
func (r *nodeWalk) leader() *harness.Peer {
	for _, p := range r.peers() {
		if p.Leads() {
			return p
		}
	}
	return nil
}

// links says that links of these nodes fail until the next heal.
func (r *nodeWalk) links(nodes ...*harness.Peer) {
	for _, p := range nodes {
		r.badLinks[p.ID] = true
		r.laws.harmed(p.ID)
	}
}

func (r *nodeWalk) silence(p *harness.Peer) {
	if p == nil {
		return
	}
	r.note("silence around %s, leads %v", p.ID, p.Leads())
	r.links(r.c.Peers()...)
	p.Silence()
}

func (r *nodeWalk) oneWay(list []*harness.Peer) {
	if a, b, ok := r.pair(list); ok {
		r.note("silence from %s to %s", a.ID, b.ID)
		r.links(a, b)
		r.c.Net.Silence(a.Host, b.Host)
	}
}

func (r *nodeWalk) cut(list []*harness.Peer) {
	if a, b, ok := r.pair(list); ok {
		r.note("cut between %s and %s", a.ID, b.ID)
		r.links(a, b)
		r.c.Net.Cut(a.Host, b.Host)
	}
}

// bridge leaves one node that reaches all others, which do not reach each other.
func (r *nodeWalk) bridge() {
	bridge := r.draw(r.peers())
	if bridge == nil {
		return
	}
	r.note("only %s reaches the others", bridge.ID)
	r.links(r.c.Peers()...)
	for i, a := range r.c.Peers() {
		for _, b := range r.c.Peers()[:i] {
			if a != bridge && b != bridge {
				a.Silence(b)
			}
		}
	}
}

// delay makes a link slower than any within a data center, which harms nobody.
func (r *nodeWalk) delay() {
	if a, b, ok := r.pair(r.c.Peers()); ok {
		d := r.span(100 * time.Millisecond)
		r.note("%s from %s to %s", d, a.ID, b.ID)
		r.c.Net.Delay(a.Host, b.Host, d)
	}
}

func (r *nodeWalk) sicken(p *harness.Peer, how func(*harness.Disk)) {
	if p == nil || slices.Contains(r.sick, p) {
		return
	}
	r.note("the disk of %s is sick, leads %v", p.ID, p.Leads())
	r.laws.harmed(p.ID)
	r.sick = append(r.sick, p)
	how(p.Disk)
}

// heal ends everything but the absence of nodes.
func (r *nodeWalk) heal() {
	r.note("heal")
	r.c.Reconnect()
	clear(r.badLinks)
	for _, p := range r.sick {
		p.Disk.Heal()
	}
	r.sick = nil
	for _, p := range r.peers() {
		r.laws.mended(p.ID)
	}
}

// leaves lets a node go down by do, which ends when it is, and come back later.
func (r *nodeWalk) leaves(p *harness.Peer, limit time.Duration, start func() error, do func()) {
	r.laws.harmed(p.ID)
	a := &absence{Peer: p, until: time.Now().Add(r.span(limit)), ended: make(chan struct{}), start: start}
	r.away = append(r.away, a)
	go func() {
		do()
		close(a.ended)
	}()
}

// terminate is SIGTERM: the node drains, and its engines end. (With a disk that hangs, only the end of a real
// process would let go of the data dir.)
func (r *nodeWalk) terminate(p *harness.Peer) {
	if p == nil || slices.Contains(r.sick, p) {
		return
	}
	r.note("%s is told to stop, leads %v", p.ID, p.Leads())
	r.leaves(p, awayFor, func() error { return p.Again(nil) }, func() { _ = p.End() })
}

// crash ends the process of a node by an error, and not its engines.
func (r *nodeWalk) crash(p *harness.Peer, limit time.Duration) {
	if p == nil || slices.Contains(r.sick, p) {
		return
	}
	r.note("the process of %s dies, leads %v", p.ID, p.Leads())
	r.leaves(p, limit, func() error { return p.Again(nil) }, func() { _ = p.BreakEndpoint() })
}

// drop ends a node and its engines at once.
func (r *nodeWalk) drop(p *harness.Peer, limit time.Duration) {
	if p == nil || slices.Contains(r.sick, p) {
		return
	}
	r.note("the machine of %s dies, leads %v", p.ID, p.Leads())
	r.leaves(p, limit, p.Boot, p.Drop)
}

func (r *nodeWalk) kill() {
	if live := r.c.Engines.Live(); len(live) > 0 {
		e := live[r.rand.IntN(len(live))]
		r.note("kill %s", e)
		e.Kill()
	}
}

// deploy puts another revision that starts no engine. No two deploys are given the same revision.
func (r *nodeWalk) deploy() {
	p := r.draw(r.peers())
	if p == nil {
		return
	}
	r.revision++
	ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Second)
	defer cancel()
	code, text := put(ctx, p, spread("a", 6, fmt.Sprintf("max_ongoing_requests: %d", 100+r.revision)))
	r.note("deploy %d through %s: %d", r.revision, p.ID, code)
	if code == http.StatusAccepted {
		r.laws.deployed(text)
	}
}

// remove cuts the worker off and removes it meanwhile, once.
func (r *nodeWalk) remove() {
	p := r.c.Peers()[r.nodes-1]
	if r.removed != nil || !slices.Contains(r.peers(), p) {
		return
	}
	r.note("%s is cut off and removed", p.ID)
	r.removed = p
	r.laws.harmed(p.ID)
	p.Silence()
	deadline := time.Now().Add(2 * time.Minute)
	for time.Now().Before(deadline) {
		r.starts()
		if l := r.leader(); l != nil {
			ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Second)
			path := l.Admin() + "/api/v1/nodes/" + p.ID
			req, err := http.NewRequestWithContext(ctx, http.MethodDelete, path, nil)
			require.NoError(r.t, err)
			resp, err := l.Send(req)
			cancel()
			if err == nil {
				require.NoError(r.t, resp.Body.Close())
				if resp.StatusCode == http.StatusAccepted {
					r.note("removed")
					return
				}
			}
		}
		time.Sleep(time.Second)
	}
	r.note("not removed: there is no majority")
	r.removed = nil
}
