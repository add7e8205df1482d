package kvevents

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// blocks is what a rank holds: copies per hash. As a Sink it is the dumbest possible index.
type blocks struct {
	copies map[Hash]int
	resets []bool
}

func newBlocks() *blocks { return &blocks{copies: map[Hash]int{}} }

func (b *blocks) Stored(ev *Stored) {
	for _, h := range ev.Hashes {
		b.copies[h]++
	}
}

func (b *blocks) Removed(ev *Removed) {
	for _, h := range ev.Hashes {
		if b.copies[h] > 1 {
			b.copies[h]--
		} else {
			delete(b.copies, h)
		}
	}
}
func (b *blocks) Cleared() { clear(b.copies) }
func (b *blocks) Reset(partial bool) {
	clear(b.copies)
	b.resets = append(b.resets, partial)
}

// fakeEngine publishes random batches and remembers everything.
type fakeEngine struct {
	t     testing.TB
	clock float64
	sent  [][]byte
	truth *blocks
	after []map[Hash]int // truth behind each batch
	ring  int
}

func newEngine(t testing.TB, ring int, clock float64) *fakeEngine {
	return &fakeEngine{t: t, ring: ring, clock: clock, truth: newBlocks()}
}

// publish makes the next batch: stores, removals of what is held, rarely a clear.
func (e *fakeEngine) publish(draw func(limit int) int) message {
	events := list{}
	if draw(40) == 0 {
		events = append(events, list{"AllBlocksCleared"})
	}
	for range draw(3) {
		if len(e.truth.copies) > 0 { // any, but the same one in a run that repeats this
			first := slices.MinFunc(slices.Collect(maps.Keys(e.truth.copies)), func(a, b Hash) int {
				return cmp.Compare(raw(a), raw(b))
			})
			events = append(events, list{"BlockRemoved", list{raw(first)}})
		}
	}
	for range 1 + draw(2) {
		events = append(events, stored(list{uint64(draw(12) + 1)}, nil, 2))
	}
	e.clock++
	payload := pack(e.t, list{e.clock, events, 0})
	var d batchDecoder
	_, err := d.Decode(payload)
	require.NoError(e.t, err)
	d.Deliver(e.truth, nil)
	e.sent = append(e.sent, payload)
	e.after = append(e.after, maps.Clone(e.truth.copies))
	return message{seq: uint64(len(e.sent) - 1), payload: payload}
}

func raw(h Hash) uint64 {
	v, _ := seqOf(h.Data[:8])
	return v
}

// replay is what the engine's ring answers. It never begins with batch 1: a ring that has forgotten batch 0
// and no other looks like that of an engine that counts from 1, and real rings hold thousands.
func (e *fakeEngine) replay(from uint64) []message {
	var out []message
	oldest := max(len(e.sent)-e.ring, 0)
	if oldest == 1 {
		oldest = 2
	}
	for i := max(int(from), oldest); i < len(e.sent); i++ {
		out = append(out, message{seq: uint64(i), payload: e.sent[i]})
	}
	return out
}

var errTest = errors.New("no answer")

// The tracker against an engine behind a line that drops, doubles, reorders, damages and breaks: what it
// shows as whole is exactly what the engine holds, what it shows as partial is a part of it; at rest it has
// caught up.
func TestTrackerAgainstOracle(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		draw := func(limit int) int { return rapid.IntRange(0, limit-1).Draw(rt, "n") }
		replays := rapid.Bool().Draw(rt, "replays")
		view := newBlocks()
		tr := newTracker(replays, view)
		engine := newEngine(t, 1+draw(30), 0)
		now := time.Unix(1000, 0)
		var held []message // reordered
		damaged := false
		subset := func(part, whole map[Hash]int) {
			for h, n := range part {
				assert.LessOrEqual(rt, n, whole[h])
			}
		}
		exact := func() {
			s := tr.snapshot()
			if !s.Synced || tr.suspect {
				return // until it is verified, it may be that of the engine before
			}
			require.LessOrEqual(rt, int(tr.next), len(engine.sent))
			want := map[Hash]int{}
			if tr.next > 0 {
				want = engine.after[tr.next-1]
			}
			switch {
			case !s.Partial:
				assert.Equal(rt, want, view.copies)
			case !damaged:
				subset(view.copies, want)
			}
		}
		runReplay := func(cut int, fail bool) {
			a := tr.take()
			if a == nil {
				return
			}
			for i, m := range engine.replay(a.from) {
				if i >= cut || !tr.running(a.id) {
					break
				}
				tr.replayed(now, m)
			}
			if tr.running(a.id) {
				var err error
				if fail || cut < len(engine.replay(a.from)) {
					err = errTest
				}
				tr.replayEnd(now, err)
			}
		}
		deliver := func(m message) {
			if tr.connected {
				tr.live(now, m)
			}
		}
		tr.connect(now)
		rt.Repeat(map[string]func(*rapid.T){
			"publish": func(*rapid.T) { deliver(engine.publish(draw)) },
			"drop":    func(*rapid.T) { engine.publish(draw) },
			"duplicate": func(*rapid.T) {
				m := engine.publish(draw)
				deliver(m)
				deliver(m)
			},
			"hold": func(*rapid.T) { held = append(held, engine.publish(draw)) },
			"release": func(*rapid.T) {
				for _, m := range held {
					deliver(m)
				}
				held = nil
			},
			"damage": func(*rapid.T) {
				m := engine.publish(draw)
				m.payload = m.payload[:draw(len(m.payload))]
				damaged = true
				deliver(m)
			},
			"replay":     func(*rapid.T) { runReplay(1<<30, false) },
			"replay cut": func(*rapid.T) { runReplay(draw(5), true) },
			"reconnect":  func(*rapid.T) { tr.disconnect(); held = nil; tr.connect(now) },
			"overflow":   func(*rapid.T) { engine.publish(draw); tr.overflow(now) },
			"time": func(*rapid.T) {
				now = now.Add(time.Duration(draw(20)) * time.Second)
				tr.tick(now)
			},
			"restart": func(*rapid.T) {
				engine = newEngine(t, engine.ring, engine.clock+100)
				held = nil
				tr.disconnect()
				tr.connect(now)
			},
			"": func(*rapid.T) { exact() },
		})
		// Rest: the line holds, replays work, time passes.
		for range 4 {
			deliver(engine.publish(draw))
			runReplay(1<<30, false)
			now = now.Add(replayCooldown + time.Second)
			tr.tick(now)
			runReplay(1<<30, false)
			runReplay(1<<30, false)
		}
		s := tr.snapshot()
		require.True(rt, s.Synced)
		assert.Equal(rt, uint64(len(engine.sent)-1), s.LastSeq)
		exact()
		if replays && engine.ring >= len(engine.sent) {
			assert.False(rt, s.Partial, "the ring holds everything")
		}
	})
}
