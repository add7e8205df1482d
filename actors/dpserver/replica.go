package dpserver

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/routing/kvindex"
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
	gone     struct{}
	lapse    struct{} // orphans may be due
	sortOut  struct{} // many orphans: most are done
	unbusy   struct{ round uint64 }
	turnOver struct{} // room that was held may be free again
)

// replica is the actor: one per start. Nothing in it blocks.
type replica struct {
	*Server
	account account
	sinks   []*subscription // each once
	rec     msg.Record      // reused: a record is valid only during Deliver
	keeper  keeper
	silence silence
	trip    trip
	busy    busy
	turns   turns
	turnDue time.Time // of the next turnOver; zero: none is on its way

	prefills prefills

	app      *app.Application // its present file, for routing
	kv       *ledger          // nil until somebody asks what the rank's KV cache holds
	blocks   []uint64         // of the admission at hand
	uncached bool             // it was asked in vain: the engine caches nothing
	clock    clock
	pulse    pulse
	scrape   scrape
}

// busy is the hold after an engine_busy answer.
type busy struct {
	on    bool
	round uint64
}

func newReplica(s *Server) *replica {
	r := &replica{Server: s, account: newAccount(), app: s.application()}
	if s.vitals.began { // a panic: the account is lost, and every sink is told so by a snapshot
		s.log.Error("the account of a rank was lost, it begins anew", slog.Uint64("incarnation", s.vitals.incarnation))
		r.resume()
		r.publish()
		r.keep()
		r.settle()
	}
	return r
}

// resume begins the ledger anew after a panic: partial until the events say that they are not.
func (r *replica) resume() {
	h := r.listening.now.Load()
	if h == nil {
		return
	}
	if l := r.book(); l != nil {
		l.lost = true
	}
	r.box.Send(arrived{h.in}) // the actor before may have been about to take what waits
}

// book is the ledger, made when it is needed first; nil if the engine caches nothing.
func (r *replica) book() *ledger {
	if r.vitals.facts.CachingOff {
		r.uncached = true
		return nil
	}
	if r.kv == nil {
		l, err := newLedger(r.Server, r.emitKV, r.deviceBlocks)
		if err != nil {
			r.log.Error("a rank has no ledger of its kv cache", slog.String("err", err.Error()))
			return nil
		}
		l.muted = r.vitals.incarnation == 0 // the snapshot of Ready says what it holds by then
		r.kv = l
	}
	return r.kv
}

func (r *replica) emitKV(kind msg.RecordKind, kv msg.KV) {
	r.rec = msg.Record{Kind: kind, KV: kv}
	r.emit(&r.rec)
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
	case *msg.Demand:
		r.demand(m)
	case msg.Demand:
		r.demand(&m)
	case lapse:
		r.lapse()
	case sortOut:
		r.sortOrphans()
	case prefillDue:
		r.onPrefillDue()
	case arrived:
		r.onArrived(m)
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
	case msg.Resync:
		r.resync(m.Sink)
	case *msg.Resync:
		r.resync(m.Sink)
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
	case turnOver:
		r.onTurnOver()
	case msg.Probe:
		r.onProbe(m)
	case *msg.Probe:
		r.onProbe(*m)
	case listened:
		r.onListened(m)
	case chime:
		r.onChime(m)
	case scrapeTick:
		r.onScrapeTick(m)
	case scraped:
		r.onScraped(m)
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
	r.scrape.told = msg.Status{} // the newcomer does not know it: the next report goes out even if nothing is new
}

// resync gives a sink that has missed a record the whole of it again.
func (r *replica) resync(sink msg.Sink) {
	for _, sub := range r.sinks {
		if sub.sink == sink {
			r.scrape.told = msg.Status{}
			r.snapshot(sub)
		}
	}
}

// ready opens the rank for an engine. What an engine published before it was first ready is its own; a later one is another, or was
// out of sight: its events are asked for anew.
func (r *replica) ready(m ready) {
	if r.vitals.phase == ended || r.vitals.phase == draining {
		return
	}
	anew := r.vitals.incarnation != 0
	if r.spec.Events == nil {
		anew = anew || m.facts.Events != nil
		r.vitals.source = m.facts.Events
	}
	r.incarnate(m.facts, anew)
	r.log.Debug("rank is ready", slog.String("incarnation", hex(m.facts.Incarnation)), slog.String("url", r.spec.Target.URL))
}

// incarnate begins an incarnation: the account of the one before is gone with its engine. anew says that the subscription to its
// events begins anew too.
func (r *replica) incarnate(f msg.Facts, anew bool) {
	if r.kv != nil {
		r.kv.mute()
		r.kv.drop(kvindex.Sent)
	}
	r.account.reset()
	r.prefills.stop()
	r.trip.stop()
	r.trip, r.busy, r.turns = trip{}, busy{round: r.busy.round + 1}, turns{}
	r.vitals.phase, r.vitals.incarnation, r.vitals.facts, r.vitals.seq = open, f.Incarnation, f, 0
	if anew {
		r.relisten()
	}
	if r.kv != nil {
		r.kv.unmute()
	}
	r.keep()
	for _, sub := range r.sinks {
		r.snapshot(sub)
	}
	r.note()
	r.refresh()
}

// restarted: an attached engine is another process, though its health never failed. Its requests ended with it; the epoch stays, as
// nobody but this rank serves it. Another's process is its node's to judge.
func (r *replica) restarted(why string, anew bool) {
	if r.spec.Target.Owned || r.vitals.phase != open {
		return
	}
	f := r.vitals.facts
	f.Incarnation = newIncarnation()
	r.incarnate(f, anew)
	r.log.Warn("engine was restarted in place", slog.String("cause", why), slog.String("incarnation", hex(f.Incarnation)))
}

// newIncarnation draws the random number of one engine process; 0 means none.
func newIncarnation() uint64 {
	var b [8]byte
	for {
		_, _ = rand.Read(b[:]) // never fails since Go 1.24
		if v := binary.LittleEndian.Uint64(b[:]); v != 0 {
			return v
		}
	}
}

func hex(v uint64) string { return fmt.Sprintf("%016x", v) }

// CauseDrained is the cause of the fence that ends a stop somebody asked for: what still runs is cut with it.
const CauseDrained = "drained"

// fence closes the rank. Running requests stay on the account until their Done: the ingress ends them.
func (r *replica) fence(cause string) {
	if r.vitals.phase == fenced || r.vitals.phase == ended {
		return
	}
	r.vitals.phase, r.turns = fenced, turns{}
	r.keeper.fenced()
	r.state(cause)
	r.log.Debug("rank is fenced", slog.String("cause", cause), slog.Int("in_flight", r.account.open()))
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
		r.vitals.phase, r.turns = draining, turns{}
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
	r.prefills.stop()
	r.keeper.stop()
	r.trip.stop()
	r.scrape.stop()
	r.clock.stop()
	r.emit(&msg.Record{Kind: msg.RecGone})
	r.settle()
	r.note()
	r.box.Halt()
}

func (r *replica) accepting() bool {
	return r.vitals.phase == open && !r.trip.tripped && !r.busy.on
}

// tripped says that the rank is open and its answers failed in a row.
func (r *replica) tripped() bool { return r.vitals.phase == open && r.trip.tripped }

// state tells the sinks whether the rank accepts, and why not.
func (r *replica) state(cause string) {
	r.emit(&msg.Record{
		Kind: msg.RecState, Accepting: r.accepting(), Tripped: r.tripped(), Cause: cause, Turn: r.passTurn(),
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

// snapshot gives one sink the whole account, and the KV columns, as of the last record.
func (r *replica) snapshot(sub *subscription) {
	f := &r.vitals.facts
	give := func(rec *msg.Record) {
		r.stamp(rec)
		sub.deliver(rec)
	}
	give(&msg.Record{Kind: msg.RecSnapshot, Accepting: r.accepting(), Snapshot: &msg.Snapshot{
		Accepting: r.accepting(), Tripped: r.tripped(), MaxOngoing: f.MaxOngoing, Capacity: r.capacity(), BlockSize: r.toldBlockSize(), CachingOff: f.CachingOff,
		MaxModelLen: f.MaxModelLen, Node: r.spec.Node, Target: r.spec.Target, Mailbox: r.box, Open: r.account.snapshot(),
	}})
	if r.kv != nil {
		r.kv.snapshot(func(kind msg.RecordKind, kv msg.KV) { give(&msg.Record{Kind: kind, KV: kv}) })
	}
}

// note copies what Status shows.
func (r *replica) note() {
	r.stats.note(r.account.open(), r.vitals.facts.MaxOngoing, r.vitals.incarnation, r.tripped())
	r.noteKV()
}
