package dpserver

import (
	"fmt"
	"log/slog"
	"slices"

	"github.com/dpserve/dpserve/actors/msg"
)

// phase is what a DPServer knows of its own life; the unit's phase is the node's.
type phase uint8

const (
	starting phase = iota
	open
	draining
	fenced
	ended
)

var refusals = [...]msg.Refusal{starting: msg.NotReady, open: msg.Granted, draining: msg.Draining, fenced: msg.Fenced, ended: msg.Gone}

// Messages of the room itself.
type (
	begin       struct{}
	subscribe   struct{ sub *subscription }
	unsubscribe struct{ sub *subscription }
	ready       struct {
		facts msg.Facts
		taken chan struct{}
	}
	fence struct {
		cause string
		heard chan struct{}
	}
	gone    struct{}
	lapse   struct{} // orphans may be due
	sortOut struct{} // many orphans: most are done
	unbusy  struct{ round uint64 }
)

// replica is the actor: one per start. Nothing in it blocks.
type replica struct {
	*Server
	account account
	sinks   []*subscription // each once
	rec     msg.Record      // reused: a record is valid only during Deliver
	keeper  keeper
	trip    trip
	busy    busy
}

// busy is the hold after an engine_busy answer.
type busy struct {
	on    bool
	round uint64
}

func newReplica(s *Server) *replica {
	r := &replica{Server: s, account: newAccount()}
	if s.vitals.began { // a panic: the account is lost, and every sink is told so by a snapshot
		s.log.Error("the account of a rank was lost, it begins anew", slog.Uint64("incarnation", s.vitals.incarnation))
		r.publish()
		r.keep()
		r.settle()
	}
	return r
}

// Receive implements inbox.Receiver.
func (r *replica) Receive(m any) {
	switch m := m.(type) {
	case *msg.Admit:
		r.admit(m)
	case msg.Admit:
		r.admit(&m)
	case msg.FirstToken:
		r.firstToken(m)
	case *msg.FirstToken:
		r.firstToken(*m)
	case msg.Progress:
		r.progress(m)
	case *msg.Progress:
		r.progress(*m)
	case msg.Done:
		r.done(&m)
	case *msg.Done:
		r.done(m)
	case lapse:
		r.lapse()
	case sortOut:
		r.sortOrphans()
	default:
		r.control(m)
	}
}

// control is everything that does not come with a request.
func (r *replica) control(m any) {
	switch m := m.(type) {
	case begin:
		r.vitals.began = true
		r.publish()
	case subscribe:
		r.add(m.sub)
		r.snapshot(m.sub)
	case unsubscribe:
		r.sinks = slices.DeleteFunc(r.sinks, func(s *subscription) bool { return s == m.sub })
	case ready:
		r.ready(m)
		close(m.taken)
	case msg.Fence:
		r.fence(m.Cause)
	case fence:
		r.fence(m.cause)
		close(m.heard)
	case msg.Drain:
		r.drain(m.Cause)
	case gone:
		r.end()
	case unbusy:
		if m.round == r.busy.round {
			r.clearBusy()
		}
	default:
		r.watch(m)
	}
}

// publish enters the feed and brings every sink up to date.
func (r *replica) publish() {
	for _, sub := range r.hub.register(r.Server) {
		r.add(sub)
		r.snapshot(sub)
	}
	r.note()
}

// add takes a sink in, once: after a panic it may come from the hub and by its own message.
func (r *replica) add(sub *subscription) {
	if !slices.Contains(r.sinks, sub) {
		r.sinks = append(r.sinks, sub)
	}
}

// ready begins an incarnation: the account of the one before is gone with its engine.
func (r *replica) ready(m ready) {
	if r.vitals.phase == ended || r.vitals.phase == draining {
		return
	}
	r.account.reset()
	r.trip.stop()
	r.trip, r.busy = trip{}, busy{round: r.busy.round + 1}
	r.vitals.phase, r.vitals.incarnation, r.vitals.maxOngoing, r.vitals.seq = open, m.facts.Incarnation, m.facts.MaxOngoing, 0
	r.keep()
	for _, sub := range r.sinks {
		r.snapshot(sub)
	}
	r.note()
	r.log.Info("rank is ready", slog.String("incarnation", hex(m.facts.Incarnation)), slog.String("url", r.spec.Target.URL))
}

func hex(v uint64) string { return fmt.Sprintf("%016x", v) }

// CauseDrained is the cause of the fence that ends a stop somebody asked for: what still runs is cut with it.
const CauseDrained = "drained"

// fence closes the rank. Running requests stay on the account until their Done: the ingress ends them.
func (r *replica) fence(cause string) {
	if r.vitals.phase == fenced || r.vitals.phase == ended {
		return
	}
	level := slog.LevelInfo // the end of a stop
	if r.vitals.phase == open && cause != CauseDrained {
		level = slog.LevelWarn
	}
	r.vitals.phase = fenced
	r.keeper.fenced()
	r.state(cause)
	r.log.Log(r.ctx, level, "rank is fenced", slog.String("cause", cause), slog.Int("in_flight", r.account.open()))
	r.settle()
}

// lose is a fence the DPServer decided on itself: the node must hear of it.
func (r *replica) lose(cause string) {
	if r.vitals.phase != open && r.vitals.phase != draining {
		return
	}
	r.fence(cause)
	r.tell(msg.ReplicaLost, cause)
}

func (r *replica) drain(cause string) {
	if r.vitals.phase == ended {
		return
	}
	if r.vitals.phase != fenced {
		r.vitals.phase = draining
		r.state(cause)
	}
	r.settle()
}

// settle closes Drained when nothing is left that it could wait for.
func (r *replica) settle() {
	if r.account.open() == 0 && (r.vitals.phase == draining || r.vitals.phase == fenced && r.spec.Target.Owned) || r.vitals.phase == ended {
		r.setDrained()
	}
}

// end closes the stream and the actor.
func (r *replica) end() {
	if r.vitals.phase == ended {
		return
	}
	r.vitals.phase = ended
	r.hub.remove(r.Server)
	r.account.reset()
	r.keeper.stop()
	r.trip.stop()
	r.emit(&msg.Record{Kind: msg.RecGone})
	r.settle()
	r.note()
	r.box.Halt()
}

func (r *replica) accepting() bool {
	return r.vitals.phase == open && !r.trip.tripped && !r.busy.on
}

// state tells the sinks whether the rank accepts, and why not.
func (r *replica) state(cause string) {
	r.emit(&msg.Record{
		Kind: msg.RecState, Accepting: r.accepting(), Cause: cause,
		Fenced: r.vitals.phase == fenced, Draining: r.vitals.phase == draining || r.vitals.phase == fenced && cause == CauseDrained,
	})
	r.note()
}

// emit numbers a record and hands it to every sink.
func (r *replica) emit(rec *msg.Record) {
	r.vitals.seq++
	r.stamp(rec)
	for _, sub := range r.sinks {
		sub.deliver(rec)
	}
}

func (r *replica) stamp(rec *msg.Record) {
	rec.App, rec.Unit, rec.Rank, rec.Epoch = r.spec.App.Name, r.spec.Unit, r.id, r.spec.Epoch
	rec.Incarnation, rec.Seq = r.vitals.incarnation, r.vitals.seq
}

// snapshot gives one sink the whole account as of the last record.
func (r *replica) snapshot(sub *subscription) {
	rec := &msg.Record{Kind: msg.RecSnapshot, Accepting: r.accepting(), Snapshot: &msg.Snapshot{
		Accepting: r.accepting(), MaxOngoing: r.vitals.maxOngoing, Node: r.spec.Node, Target: r.spec.Target, Mailbox: r.box, Open: r.account.snapshot(),
	}}
	r.stamp(rec)
	sub.deliver(rec)
}

// note copies what Status shows.
func (r *replica) note() {
	r.stats.note(r.account.open(), r.vitals.maxOngoing, r.vitals.incarnation)
}
