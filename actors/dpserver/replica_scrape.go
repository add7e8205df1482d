package dpserver

import (
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/routing"
)

// scrape polls the engine's /metrics every Timers.Scrape while something needs them: routing reads the KV
// usage, this rank detects that an engine with events was restarted or put to sleep, or waits until one that
// sleeps is awake, and engines of a prefill or decode pool count their transfers.
type scrape struct {
	isActive  bool
	isPending bool
	timer     *time.Timer
	hasLast   bool // last is a report of this incarnation
	last      engine.Counters
	suspect   *engine.Counters // a report that looks like another process's; the next report decides
	published msg.Status       // the report that the stream had last
	missed    int              // failed reads in a row
	isQuiet   bool             // the last two reports show no work
	isSlow    bool             // the timer is that of a quiet engine
}

// quietScrapes is how many times rarer the reads are while the engine has nothing to do. Its connection stays
// open between them.
const quietScrapes = 3

// maxMissedScrapes is how many reads in a row may fail before the last report is dropped. Otherwise a usage
// above busy_threshold would keep requests away without end.
const maxMissedScrapes = 5

// Messages of the scrape; round is that of the health monitor.
type (
	scrapeTimer  struct{ round uint64 }
	scrapeResult struct{ counterRead }
)

// needsScrape says whether anything reads the report.
func (r *replica) needsScrape() bool {
	if r.state.phase != phaseOpen && r.state.phase != phaseDraining {
		return false
	}
	return r.state.eventSource != nil || r.app.Routing.BusyThreshold != nil || r.app.Pool != "" ||
		r.away.byCounters
}

// policyNeeds is what the application's policy reads. An unknown policy reads nothing; deploy refuses it.
func policyNeeds(a *app.Application) routing.Needs {
	p, err := a.Routing.NewPolicy()
	if err != nil {
		return routing.Needs{}
	}
	return routing.NeedsOf(p)
}

// refreshRouting loads the current routing settings of the application, with every tick of the health
// monitor.
func (r *replica) refreshRouting() {
	r.app = r.currentApplication()
	isLate := r.scrape.isSlow && !r.hasNothingToReport()
	if (!r.scrape.isActive || isLate) && r.needsScrape() {
		r.scrape.isActive = true
		r.startScrape()
	}
	r.kv.sendSettings()
}

// startScrape reads /metrics beside the actor, one read at a time, and sets the timer for the next.
func (r *replica) startScrape() {
	stopTimer(r.scrape.timer)
	every := r.timers.Scrape
	if r.scrape.isSlow = r.hasNothingToReport(); r.scrape.isSlow {
		every *= quietScrapes
	}
	r.scrape.timer = r.sendOnBeat(every, scrapeTimer{r.monitor.round})
	if r.scrape.isPending {
		return
	}
	r.scrape.isPending = true
	r.readEngine(func(c counterRead) any { return scrapeResult{c} })
}

// hasNothingToReport says that the engine is idle, and that the report is read for restarts and sleep alone.
func (r *replica) hasNothingToReport() bool {
	return r.scrape.isQuiet && r.account.openCount() == 0 && r.app.Routing.BusyThreshold == nil &&
		r.app.Pool == ""
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
	r.scrape.isQuiet = m.err == nil && r.scrape.hasLast && m.counters.IsQuiet(r.scrape.last)
	if m.round != r.monitor.round || r.state.phase != phaseOpen && r.state.phase != phaseDraining {
		return
	}
	if m.err != nil {
		r.countMissedScrape()
		return
	}
	r.scrape.missed = 0
	r.noteRead(m.counterRead)
	if r.scrape.hasLast && m.counters.Restarted(r.scrape.last) && !r.spec.Target.Owned {
		r.suspectRestart(m.counters)
		return
	}
	slept := m.counters.Asleep && !r.scrape.last.Asleep
	r.noteTransfers(&m.counters.Transfers)
	r.scrape.hasLast, r.scrape.last, r.scrape.suspect = true, m.counters, nil
	r.updateFacts(&m.counters)
	r.publishStatus(&m.counters)
	if slept { // a sleeping engine has freed its KV cache, and publishes no event about it
		r.recorder.box.Send(engineSlept{})
	}
	r.kv.updateKVStats()
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
	r.publishStatus(&engine.Counters{Transfers: r.scrape.last.Transfers})
}

// noteTransfers keeps what the engine counts of transfers. A late read is an alarm: the text of that request
// may be wrong, and the decode rank has the wrong blocks in its prefix cache.
func (r *replica) noteTransfers(t *engine.Transfers) {
	late := t.LateReads - r.scrape.last.Transfers.LateReads
	if r.scrape.hasLast && late > 0 {
		r.log.Warn("decode ranks have read prompts of this prefill rank after their lease: "+
			"their texts may be wrong", slog.Float64("prompts", late))
	}
	r.stats.setTransfers(*t)
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
	r.kv.sendSettings()
}

func (r *replica) publishStatus(c *engine.Counters) {
	st := msg.Status{
		KVUsage: c.KVUsage, HasKVUsage: c.HasKVUsage, Capacity: r.kv.cacheCapacity(),
		BlockSize: r.kv.knownBlockSize(), LateReads: int64(c.Transfers.LateReads),
	}
	if st == r.scrape.published {
		return
	}
	r.scrape.published = st
	r.rec = msg.Record{Kind: msg.RecStatus, Status: st}
	r.stream.emit(&r.rec)
}
