package ingress

import (
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// resyncEvery is how long a rank has to answer when it is asked for a snapshot, and the least time between two such questions.
const resyncEvery = time.Second

// owner names a rank's column of a tier.
func (r *rank) owner(tier kvindex.Tier) kvindex.Owner {
	return kvindex.Owner{Rank: uint32(r.id), Tier: tier, Epoch: r.epoch, Incarnation: r.incarnation}
}

// kv hands a KV record to the index's writer. Call with mu held.
func (l *lane) kv(r *rank, rec *msg.Record) {
	if rec.Kind == msg.RecKVBegin && rec.KV.Tier == kvindex.GPU {
		l.resize(r, rec.KV.BlockSize, true)
	}
	c := l.reads().cache
	if c == nil || r.deaf || rec.KV.Tier > kvindex.Sent {
		return
	}
	op := kvOp{kind: opDelta, owner: r.owner(rec.KV.Tier), change: rec.KV.Delta.Change, parent: rec.KV.Delta.Parent}
	hashes := rec.KV.Delta.Hashes
	switch rec.Kind {
	case msg.RecKVBegin:
		op.kind, op.size, hashes = opBegin, rec.KV.BlockSize, nil
	case msg.RecKVEnd:
		op.kind, op.n, op.sum, hashes = opEnd, rec.KV.Len, rec.KV.Sum, nil
	default:
	}
	if !c.queue.push(op, hashes) {
		l.hide(r)
		c.queue.lose(op.owner)
	}
}

// miss says that a record of a rank did not come: it is asked for all it has. Its load goes on from what is known.
func (l *lane) miss(r *rank) {
	if r.deaf {
		return // it was asked already
	}
	l.hide(r)
	l.ask(r)
}

// hide takes a rank's columns out of look-ups until its next snapshot.
func (l *lane) hide(r *rank) {
	r.deaf = true
	if c := l.reads().cache; c != nil {
		c.queue.push(kvOp{kind: opMask, owner: r.owner(0)}, nil)
	}
	if m := l.meter.Load(); m != nil {
		m.IndexGap()
	}
}

// missed is miss for the index's writer: an owner's column did not come out equal.
func (l *lane) missed(owner kvindex.Owner) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.ranks[routing.RankID(owner.Rank)]
	if r == nil || r.epoch != owner.Epoch || r.incarnation != owner.Incarnation {
		return // its columns are gone, too
	}
	if !r.deaf {
		l.hide(r)
	}
	l.ask(r)
}

// ask asks a rank for a snapshot, and again every second until one comes.
func (l *lane) ask(r *rank) {
	if r.asking != nil || l.ended || !r.deaf {
		return
	}
	wait := resyncEvery
	if since := l.in.clock() - r.asked; r.asked != 0 && since < resyncEvery {
		wait -= since
	} else {
		l.resync(r)
	}
	r.asking = time.AfterFunc(wait, func() { l.askAgain(r) })
}

func (l *lane) askAgain(r *rank) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.asking != nil && l.ranks[r.id] == r {
		r.asking = nil
		l.ask(r)
	}
}

// resync posts the question. A mailbox that is full is asked again.
func (l *lane) resync(r *rank) {
	r.asked = l.in.clock()
	if err := r.mailbox.TrySend(msg.Resync{Sink: l.in}); err != nil {
		l.in.log.Debug("a rank could not be asked for a snapshot", slog.String("app", l.name), slog.Int("group", r.id.Group()), slog.Int("rank", r.id.Rank()), slog.Any("err", err))
		return
	}
	l.resyncs.Add(1)
}

// told ends the questions: a snapshot is here, or the rank is gone. What the index holds of the rank is dropped.
func (l *lane) told(r *rank) {
	r.deaf = false
	if r.asking != nil {
		r.asking.Stop()
		r.asking = nil
	}
	if c := l.reads().cache; c != nil {
		c.queue.push(kvOp{kind: opDrop, owner: r.owner(0)}, nil)
	}
}

// resize notes a rank's tokens per KV block; proven: its events came in them. Prompts are cut to the size that most ranks have; a
// rank of another size hits nothing, and its log line says why.
func (l *lane) resize(r *rank, tokens int, proven bool) {
	if tokens <= 0 || r.proven && !proven || tokens == r.blockSize && r.proven == proven {
		return
	}
	r.blockSize, r.proven = tokens, proven
	best, known := l.mostBlockTokens()
	l.blockTokens.Store(int32(best)) //nolint:gosec // tokens of a block
	if best != tokens && (r.proven || !known) {
		l.in.log.Warn("a rank's KV blocks are of another size than the other ranks': its cache is not seen", slog.String("app", l.name),
			slog.String("unit", r.unit), slog.Int("block_size", tokens), slog.Int("others", best))
	}
}

// mostBlockTokens is the block size of most ranks, the smaller of two. What events came in counts, before what engines report: some
// settle on another size than they report. proven: it was seen in events.
func (l *lane) mostBlockTokens() (best int, proven bool) {
	votes := map[bool]map[int]int{true: {}, false: {}}
	for _, r := range l.ranks {
		if r.blockSize > 0 {
			votes[r.proven][r.blockSize]++
		}
	}
	proven = len(votes[true]) > 0
	for n, count := range votes[proven] {
		if most := votes[proven][best]; count > most || count == most && n < best {
			best = n
		}
	}
	return best, proven
}

// tokensPerBlock is the size to which prompts are cut.
func (l *lane) tokensPerBlock() int {
	if n := l.blockTokens.Load(); n > 0 {
		return int(n)
	}
	return routing.DefaultBlockSize
}

// status takes over an engine's report.
func (l *lane) status(r *rank, rec *msg.Record) {
	s := &rec.Status
	l.resize(r, s.BlockSize, false)
	l.observe(routing.Event{
		Kind: routing.EvStatus, Rank: r.id, Incarnation: r.incarnation, Seq: rec.Seq, KVUsage: s.KVUsage, NoKVUsage: !s.HasKVUsage,
		Capacity: s.Capacity, BlockSize: s.BlockSize,
	})
}

// judgeCaching looks whether every ready rank runs without prefix caching.
func (l *lane) judgeCaching() {
	ready, off := 0, 0
	for _, r := range l.ranks {
		if r.shownReady {
			ready++
			if r.cachingOff {
				off++
			}
		}
	}
	if now := ready > 0 && ready == off; ready > 0 && now != l.cachingOff.Load() {
		l.cachingOff.Store(now)
		if now && l.reads().needs.Hits {
			l.in.log.Warn("every engine runs without prefix caching: routing goes by load alone", slog.String("app", l.name))
		}
		l.configure()
	}
}

// configure tells the Router the application's settings.
func (l *lane) configure() {
	spec := l.spec.Load()
	if spec == nil {
		return
	}
	l.observe(routing.Event{Kind: routing.EvConfigured, Config: &routing.Config{
		BusyThreshold: spec.app.Routing.BusyThreshold, PrefixCachingOff: l.cachingOff.Load(),
	}})
}

// model is the application's own name of its model, whatever the client called it.
func (l *lane) model() string {
	if spec := l.spec.Load(); spec != nil {
		return spec.app.Model.ID
	}
	return ""
}

// adapter is the LoRA adapter that a model's name asks for, "" for none.
func (l *lane) adapter(model []byte) string {
	if spec := l.spec.Load(); spec != nil {
		return spec.adapters[string(model)]
	}
	return ""
}
