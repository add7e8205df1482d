package dpserver

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine/kvevents"
)

// network is what KV events travel over, as in Factory.
type network struct {
	address string
	dial    func(ctx context.Context, addr string) (net.Conn, error)
	listen  func(ctx context.Context, addr string) (net.Listener, error)
	replays *kvevents.Replays
}

// hearing is one subscription to the events of a rank's engine.
type hearing struct {
	sub *kvevents.Subscriber
	in  *inlet
}

// listening is a rank's subscriptions, one at a time: a new incarnation of the engine gets a new one, which asks for everything there
// is. Beginning and ending one may wait for sockets and goroutines, so the actor does not do it; it reads now.
type listening struct {
	now atomic.Pointer[hearing] // nil: none

	turn   sync.Mutex // one begins or ends at a time
	life   uint64     // of the newest
	closed bool
}

// listen replaces the subscription. One that is overtaken by a later life, or comes after the end, does nothing. Errors:
// problem.InvalidArgument for endpoints that may not be used; a port that is taken.
func (s *Server) listen(ctx context.Context, src *msg.EventSource, life uint64) error {
	l := &s.listening
	l.turn.Lock()
	defer l.turn.Unlock()
	if l.closed || life < l.life {
		return nil
	}
	l.life = life
	l.end()
	if src == nil {
		return nil
	}
	h, err := s.subscription(src, life)
	if err != nil {
		return err
	}
	l.now.Store(h)
	if err := h.sub.Start(ctx); err != nil {
		l.end()
		return err
	}
	return nil
}

func (s *Server) subscription(src *msg.EventSource, life uint64) (*hearing, error) {
	in := newInlet(life, s.hasher, s.spec.App.Model.ID, func(in *inlet) { s.box.Send(arrived{in}) })
	hosts := kvevents.Hosts{Node: s.net.address}
	if src.Host != "" {
		hosts.Peers = []string{src.Host}
	}
	sub, err := kvevents.New(kvevents.Config{
		Endpoints: kvevents.Endpoints{Connect: src.Connect, Bind: src.Bind, Replay: src.Replay}, Hosts: hosts, Topic: src.Topic,
		Sink: in, Changed: in.stir, Replays: s.net.replays, Logger: s.log, Dial: s.net.dial, Listen: s.net.listen,
	})
	return &hearing{sub: sub, in: in}, err
}

// end closes the present subscription and waits for it. The caller has turn.
func (l *listening) end() {
	if h := l.now.Swap(nil); h != nil {
		_ = h.sub.Close() // the socket is gone either way
	}
}

// close ends the last subscription.
func (l *listening) close() {
	l.turn.Lock()
	defer l.turn.Unlock()
	l.closed = true
	l.end()
}

// Messages of the events.
type (
	arrived  struct{ in *inlet } // events wait
	listened struct {            // a subscription was begun, or not
		life uint64
		err  error
	}
)

// relisten begins a subscription of a new life: what was known by the one before is gone.
func (r *replica) relisten() {
	past := r.eventTotals()
	r.vitals.life++
	r.vitals.restarts = 0
	r.pulse = pulse{past: past, starting: r.pulse.starting}
	if r.kv != nil {
		r.kv.work, r.kv.lost = nil, false
		r.kv.dropEvents()
	}
	r.startListening()
}

// startListening begins the subscription of the present life beside the actor.
func (r *replica) startListening() {
	src, s, life := r.vitals.source, r.Server, r.vitals.life
	if r.pulse.starting || src == nil && r.listening.now.Load() == nil {
		return
	}
	r.pulse.starting = true
	r.probe(r.timers.CounterLimit, func(ctx context.Context) { s.box.Send(listened{life, s.listen(ctx, src, life)}) })
}

// onListened: what could not begin is tried again with the keeper's next tick.
func (r *replica) onListened(m listened) {
	r.pulse.starting = false
	if m.life != r.vitals.life {
		r.startListening()
		return
	}
	failed := r.pulse.failure
	if r.pulse.failure = ""; m.err != nil {
		r.pulse.failure = m.err.Error()
		if r.pulse.failure != failed {
			r.log.Warn("kv events of a rank cannot be followed", slog.String("err", m.err.Error()))
		}
	}
	r.feelPulse()
}

// onArrived applies some of the events that wait and comes back for the rest: an admission waits for one step at most.
func (r *replica) onArrived(m arrived) {
	if m.in.life != r.vitals.life || r.vitals.phase == ended {
		return
	}
	l := r.book()
	if l == nil {
		return
	}
	if l.work == nil {
		if l.work = m.in.take(l.spare); l.work == nil {
			r.bound()
			r.feelPulse()
			r.keepTime()
			return
		}
		l.spare = nil
	}
	b := l.work
	l.work = nil // one that panics is not tried again
	l.apply(b)
	r.endShownPrefills()
	if b.empty() {
		b.clear()
		l.spare = b
	} else {
		l.work = b
	}
	r.box.Send(m)
}
