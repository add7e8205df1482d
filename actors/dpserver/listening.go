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

// eventNetwork is the network of KV event sockets, as in Factory.
type eventNetwork struct {
	address string
	dial    func(ctx context.Context, addr string) (net.Conn, error)
	listen  func(ctx context.Context, addr string) (net.Listener, error)
	replays *kvevents.Replays
}

// eventSubscription is one subscription to the events of a rank's engine.
type eventSubscription struct {
	sub   *kvevents.Subscriber
	queue *eventQueue
}

// subscriptions are a rank's subscriptions, one at a time: each new incarnation of the engine gets a new one,
// which asks for all events from the start. Starting and ending a subscription may wait for sockets and
// goroutines, so it is done outside the actor, which reads only current.
type subscriptions struct {
	current atomic.Pointer[eventSubscription] // nil: none

	mu     sync.Mutex // one subscription starts or ends at a time
	newest uint64     // number of the newest subscription
	closed bool
}

// replaceSubscription replaces the subscription. It does nothing if a later one has started or the Server has
// ended. Errors: problem.InvalidArgument for endpoints that may not be used; a port that is taken.
func (s *Server) replaceSubscription(ctx context.Context, src *msg.EventSource, life uint64) error {
	l := &s.subscriptions
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || life < l.newest {
		return nil
	}
	l.newest = life
	l.closeCurrent()
	if src == nil {
		return nil
	}
	h, err := s.newSubscription(src, life)
	if err != nil {
		return err
	}
	l.current.Store(h)
	if err := h.sub.Start(ctx); err != nil {
		l.closeCurrent()
		return err
	}
	return nil
}

func (s *Server) newSubscription(src *msg.EventSource, life uint64) (*eventSubscription, error) {
	in := newEventQueue(life, s.hasher, s.spec.App.Model.ID,
		func(in *eventQueue) { s.box.Send(eventsQueued{in}) })
	hosts := kvevents.Hosts{Node: s.net.address}
	if src.Host != "" {
		hosts.Peers = []string{src.Host}
	}
	sub, err := kvevents.New(kvevents.Config{
		Endpoints: kvevents.Endpoints{Connect: src.Connect, Bind: src.Bind, Replay: src.Replay}, Hosts: hosts,
		Topic: src.Topic,
		Sink:  in, Changed: in.wake, Replays: s.net.replays, Logger: s.log, Dial: s.net.dial,
		Listen: s.net.listen,
	})
	return &eventSubscription{sub: sub, queue: in}, err
}

// closeCurrent closes the current subscription and waits for it. The caller holds mu.
func (l *subscriptions) closeCurrent() {
	if h := l.current.Swap(nil); h != nil {
		_ = h.sub.Close() // the socket is closed even if Close fails
	}
}

// close ends the last subscription.
func (l *subscriptions) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.closeCurrent()
}

// Messages of the event subscriptions.
type (
	eventsQueued struct{ queue *eventQueue } // events wait
	// a subscription has started, or failed to
	subscriptionResult struct { // a subscription was begun, or not
		id  uint64
		err error
	}
)

// restartSubscription starts a new subscription. The blocks that the one before reported are dropped.
func (r *replica) restartSubscription() {
	past := r.eventTotals()
	r.state.subscriptionID++
	r.state.knownRestarts = 0
	r.eventHealth = eventHealth{pastTotals: past, isStarting: r.eventHealth.isStarting}
	if r.kv != nil {
		r.kv.currentBatch, r.kv.isPartial = nil, false
		r.kv.dropEventColumns()
	}
	r.startSubscription()
}

// startSubscription starts the current subscription beside the actor.
func (r *replica) startSubscription() {
	src, s, life := r.state.eventSource, r.Server, r.state.subscriptionID
	if r.eventHealth.isStarting || src == nil && r.subscriptions.current.Load() == nil {
		return
	}
	r.eventHealth.isStarting = true
	r.runProbe(r.timers.CounterLimit, func(ctx context.Context) {
		s.box.Send(subscriptionResult{life,
			s.replaceSubscription(ctx, src, life)})
	})
}

// onSubscriptionResult notes how the start ended. A failed start is tried again with the next health tick.
func (r *replica) onSubscriptionResult(m subscriptionResult) {
	r.eventHealth.isStarting = false
	if m.id != r.state.subscriptionID {
		r.startSubscription()
		return
	}
	failed := r.eventHealth.failure
	if r.eventHealth.failure = ""; m.err != nil {
		r.eventHealth.failure = m.err.Error()
		if r.eventHealth.failure != failed {
			r.log.Warn("kv events of a rank cannot be followed", slog.String("err", m.err.Error()))
		}
	}
	r.checkEventHealth()
}

// onEventsQueued applies one step of the queued events and posts itself for the rest, so that an admission
// waits for one step at most.
func (r *replica) onEventsQueued(m eventsQueued) {
	if m.queue.subscriptionID != r.state.subscriptionID || r.state.phase == phaseEnded {
		return
	}
	l := r.ensureKVRecord()
	if l == nil {
		return
	}
	if l.currentBatch == nil {
		if l.currentBatch = m.queue.takeBatch(l.spareBatch); l.currentBatch == nil {
			r.boundSent()
			r.checkEventHealth()
			r.armExpiry()
			return
		}
		l.spareBatch = nil
	}
	b := l.currentBatch
	l.currentBatch = nil // a batch that panics is dropped
	l.applyBatch(b)
	r.endShownPrefills()
	if b.isEmpty() {
		b.clear()
		l.spareBatch = b
	} else {
		l.currentBatch = b
	}
	r.box.Send(m)
}
