package kvevents

import "time"

// start asks for a replay, or acts as if it had failed where none is allowed now.
func (t *tracker) start(now time.Time, mode replayMode, from uint64) {
	if t.rounds++; t.rounds > maxRounds {
		t.cooldown = now.Add(ReplayCooldown)
	}
	if now.Before(t.cooldown) {
		t.fail(now, mode)
		return
	}
	t.asked++
	t.mode, t.seen, t.want = mode, false, &ask{id: t.asked, from: from}
	t.stats.Replays++
}

// stop forgets the replay that runs.
func (t *tracker) stop() { t.mode, t.want = replayNone, nil }

// take is the ask that the owner has to run now; it replaces one that runs.
func (t *tracker) take() *ask {
	a := t.want
	t.want = nil
	return a
}

// running says whether the results of ask id are wanted.
func (t *tracker) running(id uint64) bool { return t.mode != replayNone && id == t.asked }

// fail is what a replay that was not possible means.
func (t *tracker) fail(now time.Time, mode replayMode) {
	t.stop()
	if mode == replayTail {
		t.tailAt = now.Add(tailInterval)
		return
	}
	t.fullAt = t.cooldown
	if t.suspect || t.have && mode != replayFull {
		t.reset(true)
	}
}

// replayed takes one batch of the replay that runs.
func (t *tracker) replayed(now time.Time, m message) {
	first := !t.seen
	t.seen = true
	switch {
	case first && t.mode == replayFull, !t.have, m.seq > t.next:
		t.base(m.seq) // what lay between is gone
	case t.suspect && m.seq == t.next:
		t.base(m.seq) // the last batch we saw is gone: nothing says that it is the same engine
	case m.seq < t.next:
		known, same := t.knows(m)
		if known && !same {
			t.restart(now)
			return
		}
		t.suspect = t.suspect && !known
		t.stats.Duplicates++
		return
	}
	if !t.apply(m) {
		t.giveUp(m)
	}
}

// replayEnd: the replay came to its end marker, or to err.
func (t *tracker) replayEnd(now time.Time, err error) {
	mode := t.mode
	t.stop()
	if err != nil {
		t.failed(now, mode)
	} else {
		t.ended(now, mode)
	}
	t.drain(now)
}

// failed: a broken replay. What it brought before is whole as far as it goes.
func (t *tracker) failed(now time.Time, mode replayMode) {
	t.stats.ReplayFailures++
	if mode == replayTail { // nothing is known to be missing
		t.tailAt = now.Add(tailInterval)
		return
	}
	t.cooldown = now.Add(ReplayCooldown)
	t.fullAt = t.cooldown
	if t.suspect {
		t.reset(true)
	} // gap: the next live batch shows what is missing
}

func (t *tracker) ended(now time.Time, mode replayMode) {
	t.tailAt = now.Add(tailDelay)
	if mode == replayTail {
		t.tailAt = now.Add(tailInterval)
	}
	if mode == replayFull {
		t.fullAt = time.Time{}
	}
	if t.seen {
		return
	}
	switch mode {
	case replayFull:
		if t.suspect || !t.have { // nothing was published yet
			t.base(t.first)
		}
	case replayVerify: // the last batch we saw is unknown there
		t.restart(now)
	case replayGap: // a gap that stays: the next live batch is the baseline
		t.reset(true)
	case replayNone, replayTail:
	}
}
