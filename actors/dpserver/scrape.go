package dpserver

import (
	"context"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/engine"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// scrape looks at an engine's own report every Timers.Scrape while somebody reads it: routing its KV usage, or this rank whether an
// engine that publishes events was restarted or put to sleep behind its back.
type scrape struct {
	on      bool
	asking  bool
	timer   *time.Timer
	taken   bool // last is a report of this incarnation
	last    engine.Counters
	suspect *engine.Counters // a report that looks like another process's; the next decides
	told    msg.Status       // what the stream said last
	missed  int              // reports in a row that did not come
}

// maxMissed is how many reports in a row may be missing before the last one counts for nothing: a usage above busy_threshold would keep
// requests away for ever.
const maxMissed = 5

// Messages of the scrape; round is the keeper's.
type (
	scrapeTick struct{ round uint64 }
	scraped    struct {
		round    uint64
		counters engine.Counters
		err      error
	}
)

func (s *scrape) stop() {
	if s.timer != nil {
		s.timer.Stop()
	}
}

// wantsScrape says whether anybody reads the report.
func (r *replica) wantsScrape() bool {
	if r.vitals.phase != open && r.vitals.phase != draining {
		return false
	}
	return r.vitals.source != nil || r.app.Routing.BusyThreshold != nil || needsOf(r.app).Usage
}

// needsOf is what the application's policy reads; nothing if there is no such policy, which was refused when it was deployed.
func needsOf(a *app.Application) routing.Needs {
	p, err := routing.New(a.Routing.Policy, a.Routing.Preset, a.Routing.Params)
	if err != nil {
		return routing.Needs{}
	}
	return routing.NeedsOf(p)
}

// refresh takes the present routing of the application over, with every tick of the keeper.
func (r *replica) refresh() {
	r.app = r.application()
	if !r.scrape.on && r.wantsScrape() {
		r.scrape.on = true
		r.lookAtReport()
	}
	r.refreshSent()
}

// lookAtReport asks beside the actor, one question at a time, and sets the timer for the next.
func (r *replica) lookAtReport() {
	s, round := r.Server, r.keeper.round
	r.scrape.timer = r.after(r.timers.Scrape, scrapeTick{round})
	if r.scrape.asking {
		return
	}
	r.scrape.asking = true
	r.probe(r.timers.CounterLimit, func(ctx context.Context) {
		c, err := s.engine.Counters(ctx)
		s.box.Send(scraped{round, c, err})
	})
}

func (r *replica) onScrapeTick(m scrapeTick) {
	if m.round != r.keeper.round {
		return
	}
	if r.scrape.on = r.wantsScrape(); r.scrape.on {
		r.lookAtReport()
	}
}

func (r *replica) onScraped(m scraped) {
	r.scrape.asking = false // there is never more than one
	if m.round != r.keeper.round {
		return
	}
	if r.vitals.phase != open && r.vitals.phase != draining {
		return
	}
	if m.err != nil {
		r.missReport()
		return
	}
	r.scrape.missed = 0
	if r.scrape.taken && m.counters.Restarted(r.scrape.last) && !r.spec.Target.Owned {
		r.suspectRestart(m.counters)
		return
	}
	slept := m.counters.Asleep && !r.scrape.last.Asleep
	r.scrape.taken, r.scrape.last, r.scrape.suspect = true, m.counters, nil
	r.learnFacts(&m.counters)
	r.report(&m.counters)
	if slept {
		r.asleep()
	}
	r.noteKV()
}

// missReport notes that the engine's report did not come; after maxMissed the stream says that its KV usage is not known.
func (r *replica) missReport() {
	if r.scrape.missed++; r.scrape.missed != maxMissed {
		return
	}
	if r.scrape.last.HasKVUsage {
		r.log.Info("the engine's KV usage is not known any more: its metrics do not answer", slog.Int("missed", maxMissed))
	}
	r.report(&engine.Counters{})
}

// suspectRestart believes that an attached engine is another process when two reports in a row say so and agree with each other: one
// URL in front of several processes would say something else each time.
func (r *replica) suspectRestart(c engine.Counters) {
	if r.scrape.suspect == nil || c.Restarted(*r.scrape.suspect) {
		r.scrape.suspect = &c
		return
	}
	r.restarted("its counters began anew", true)
}

// learnFacts takes over what the node could not know when it opened the rank.
func (r *replica) learnFacts(c *engine.Counters) {
	f := &r.vitals.facts
	if c.Blocks > 0 {
		f.Blocks = c.Blocks
	}
	if c.BlockSize > 0 {
		f.BlockSize = c.BlockSize
	}
}

// report tells the stream what is new.
func (r *replica) report(c *engine.Counters) {
	st := msg.Status{KVUsage: c.KVUsage, HasKVUsage: c.HasKVUsage, Capacity: r.capacity(), BlockSize: r.toldBlockSize()}
	if st == r.scrape.told {
		return
	}
	r.scrape.told = st
	r.rec = msg.Record{Kind: msg.RecStatus, Status: st}
	r.emit(&r.rec)
}

// asleep: a sleeping engine has given its KV cache up, and publishes nothing about it.
func (r *replica) asleep() {
	r.log.Info("engine was put to sleep: its kv cache is gone")
	if l := r.kv; l != nil {
		l.clear()
		l.drop(kvindex.Sent)
		r.keepTime()
	}
}
