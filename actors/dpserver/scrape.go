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

// scrape polls the engine's /metrics every Timers.Scrape while something needs them: routing reads the KV
// usage, and this rank detects that an engine with events was restarted or put to sleep.
type scrape struct {
	isActive  bool
	isPending bool
	timer     *time.Timer
	hasLast   bool // last is a report of this incarnation
	last      engine.Counters
	suspect   *engine.Counters // a report that looks like another process's; the next report decides
	published msg.Status       // the report that the stream had last
	missed    int              // failed reads in a row
}

// maxMissedScrapes is how many reads in a row may fail before the last report is dropped. Otherwise a usage
// above busy_threshold would keep requests away without end.
const maxMissedScrapes = 5

// Messages of the scrape; round is that of the health monitor.
type (
	scrapeTimer  struct{ round uint64 }
	scrapeResult struct {
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

// needsScrape says whether anything reads the report.
func (r *replica) needsScrape() bool {
	if r.state.phase != phaseOpen && r.state.phase != phaseDraining {
		return false
	}
	return r.state.eventSource != nil || r.app.Routing.BusyThreshold != nil || policyNeeds(r.app).Usage
}

// policyNeeds is what the application's policy reads. An unknown policy reads nothing; deploy refuses it.
func policyNeeds(a *app.Application) routing.Needs {
	p, err := routing.New(a.Routing.Policy, a.Routing.Preset, a.Routing.Params)
	if err != nil {
		return routing.Needs{}
	}
	return routing.NeedsOf(p)
}

// refreshRouting loads the current routing settings of the application, with every tick of the health
// monitor.
func (r *replica) refreshRouting() {
	r.app = r.currentApplication()
	if !r.scrape.isActive && r.needsScrape() {
		r.scrape.isActive = true
		r.startScrape()
	}
	r.refreshSentColumn()
}

// startScrape reads /metrics beside the actor, one read at a time, and sets the timer for the next.
func (r *replica) startScrape() {
	s, round := r.Server, r.monitor.round
	r.scrape.timer = r.sendAfter(r.timers.Scrape, scrapeTimer{round})
	if r.scrape.isPending {
		return
	}
	r.scrape.isPending = true
	r.runProbe(r.timers.CounterLimit, func(ctx context.Context) {
		c, err := s.engine.Counters(ctx)
		s.box.Send(scrapeResult{round, c, err})
	})
}

func (r *replica) onScrapeTick(m scrapeTimer) {
	if m.round != r.monitor.round {
		return
	}
	if r.scrape.isActive = r.needsScrape(); r.scrape.isActive {
		r.startScrape()
	}
}

func (r *replica) onScraped(m scrapeResult) {
	r.scrape.isPending = false // there is never more than one read
	if m.round != r.monitor.round {
		return
	}
	if r.state.phase != phaseOpen && r.state.phase != phaseDraining {
		return
	}
	if m.err != nil {
		r.countMissedScrape()
		return
	}
	r.scrape.missed = 0
	if r.scrape.hasLast && m.counters.Restarted(r.scrape.last) && !r.spec.Target.Owned {
		r.suspectRestart(m.counters)
		return
	}
	slept := m.counters.Asleep && !r.scrape.last.Asleep
	r.scrape.hasLast, r.scrape.last, r.scrape.suspect = true, m.counters, nil
	r.updateFacts(&m.counters)
	r.publishStatus(&m.counters)
	if slept {
		r.onSleep()
	}
	r.updateKVStats()
}

// countMissedScrape counts a failed read. After maxMissedScrapes the stream says that the KV usage is not
// known.
func (r *replica) countMissedScrape() {
	if r.scrape.missed++; r.scrape.missed != maxMissedScrapes {
		return
	}
	if r.scrape.last.HasKVUsage {
		r.log.Info("the engine's KV usage is not known any more: its metrics do not answer",
			slog.Int("missed", maxMissedScrapes))
	}
	r.publishStatus(&engine.Counters{})
}

// suspectRestart handles a report that looks like another process's. The rank believes it when two reports in
// a row agree with each other: a URL in front of several processes would give a different report each time.
func (r *replica) suspectRestart(c engine.Counters) {
	if r.scrape.suspect == nil || c.Restarted(*r.scrape.suspect) {
		r.scrape.suspect = &c
		return
	}
	r.restartIncarnation("its counters began anew", true)
}

// updateFacts takes over the facts that the node could not know when it opened the rank.
func (r *replica) updateFacts(c *engine.Counters) {
	f := &r.state.facts
	if c.Blocks > 0 {
		f.Blocks = c.Blocks
	}
	if c.BlockSize > 0 {
		f.BlockSize = c.BlockSize
	}
}

// publishStatus emits a RecStatus if a value has changed.
func (r *replica) publishStatus(c *engine.Counters) {
	st := msg.Status{KVUsage: c.KVUsage, HasKVUsage: c.HasKVUsage, Capacity: r.cacheCapacity(),
		BlockSize: r.knownBlockSize()}
	if st == r.scrape.published {
		return
	}
	r.scrape.published = st
	r.rec = msg.Record{Kind: msg.RecStatus, Status: st}
	r.emit(&r.rec)
}

// onSleep empties the KV columns: a sleeping engine has freed its KV cache, and publishes no event about it.
func (r *replica) onSleep() {
	r.log.Info("engine was put to sleep: its kv cache is gone")
	if l := r.kv; l != nil {
		l.clearEvents()
		l.dropColumns(kvindex.Sent)
		r.armExpiry()
	}
}
