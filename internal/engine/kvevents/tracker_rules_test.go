package kvevents

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// bench is a tracker with a clock and batches of one block each.
type bench struct {
	*tracker
	t    *testing.T
	view *blocks
	now  time.Time
}

func newBench(t *testing.T, replays bool) *bench {
	view := newBlocks()
	return &bench{tracker: newTracker(replays, view), t: t, view: view, now: time.Unix(1000, 0)}
}

// batch n of incarnation run stores block 1000·run + n.
func (b *bench) batch(run, n int) message {
	at := float64(run*1_000_000 + n)
	return message{
		seq:     uint64(n),
		payload: pack(b.t, list{at, list{stored(list{1000*run + n + 1}, nil, 2)}, 0}),
	}
}

func (b *bench) lives(run int, seqs ...int) {
	for _, n := range seqs {
		b.live(b.now, b.batch(run, n))
	}
}

// answer ends the replay that is wanted with batches seqs; it returns where it was asked from.
func (b *bench) answer(run int, err error, seqs ...int) uint64 {
	b.t.Helper()
	a := b.take()
	require.NotNil(b.t, a, "no replay is wanted")
	for _, n := range seqs {
		if b.running(a.id) {
			b.replayed(b.now, b.batch(run, n))
		}
	}
	if b.running(a.id) {
		b.replayEnd(b.now, err)
	}
	return a.from
}

func (b *bench) holds(run int, seqs ...int) {
	b.t.Helper()
	want := map[Hash]int{}
	for _, n := range seqs {
		want[UintHash(uint64(1000*run+n+1))]++
	}
	assert.Equal(b.t, want, b.view.copies)
}

func TestGapIsOneReplayFromTheFirstMissing(t *testing.T) {
	b := newBench(t, true)
	b.connect(b.now)
	b.lives(1, 3) // waits for the baseline
	assert.Equal(t, uint64(0), b.answer(1, nil, 0, 1, 2))
	b.holds(1, 0, 1, 2, 3)
	b.lives(1, 6, 7)
	assert.Equal(t, uint64(4), b.answer(1, nil, 4, 5, 6))
	b.holds(1, 0, 1, 2, 3, 4, 5, 6, 7)
	assert.Nil(t, b.take())
	assert.Equal(t, []bool{false}, b.view.resets)
	st := b.snapshot()
	assert.Equal(t, uint64(1), st.Gaps)
	assert.Equal(t, uint64(2), st.Replays)
	assert.Equal(t, uint64(7), st.LastSeq)
}

func TestRangeThatIsGoneDropsTheBlocks(t *testing.T) {
	b := newBench(t, true)
	b.connect(b.now)
	b.answer(1, nil, 0)
	b.lives(1, 9)
	b.answer(1, nil, 7, 8, 9)
	b.holds(1, 7, 8, 9)
	assert.Equal(t, []bool{false, true}, b.view.resets)
	b.lives(1, 12)
	b.answer(1, nil) // nothing at all
	b.holds(1, 12)
	assert.True(t, b.snapshot().Partial)
}

// RP30: The first batch of an engine is numbered 0 or 1: an empty replay and then either of them is a whole
// beginning, if a replay from 0 brings no earlier batch.
func TestFirstNumberOfTheEngine(t *testing.T) {
	type numbers = []int
	for _, tc := range []struct {
		name   string
		full   numbers // what the first replay brings
		live   numbers
		again  numbers // what the replay from 0 brings that follows; nil: none is asked
		status Stats   // Partial, Gaps
		holds  numbers
	}{
		{name: "0 in the ring", full: numbers{0}, holds: numbers{0}},
		{name: "1 in the ring", full: numbers{1}, holds: numbers{1}, status: Stats{Partial: true}},
		{name: "0 live", live: numbers{0}, holds: numbers{0}},
		{name: "1 live", live: numbers{1, 2}, again: numbers{1}, holds: numbers{1, 2}},
		{name: "1 live, 0 was lost", live: numbers{1}, again: numbers{0, 1}, holds: numbers{0, 1}},
		{
			name: "2 live", live: numbers{2}, again: numbers{2}, holds: numbers{2},
			status: Stats{Partial: true, Faults: Faults{Gaps: 1}},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBench(t, true)
			b.connect(b.now)
			b.answer(1, nil, tc.full...)
			b.lives(1, tc.live...)
			if tc.again != nil {
				assert.Zero(t, b.answer(1, nil, tc.again...), "asked from the start")
			}
			b.holds(1, tc.holds...)
			st := b.snapshot()
			assert.Equal(t, [...]any{tc.status.Partial, tc.status.Gaps}, [...]any{st.Partial, st.Gaps})
			assert.Nil(t, b.take())
		})
	}
}

// Batch 1 is the beginning only of an engine that never numbered one 0: what an earlier connection was told
// does not count, nor does a ring that has forgotten a batch 0 which arrived unreadable.
func TestBatchOneIsNoBeginningAfterBatchZero(t *testing.T) {
	for name, lose := range map[string]func(b *bench){
		"unreadable": func(b *bench) { b.live(b.now, message{seq: 0}) },
		"another engine": func(b *bench) {
			b.disconnect()
			b.connect(b.now)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, true)
			b.connect(b.now)
			b.answer(1, nil)
			lose(b)
			assert.Zero(t, b.answer(1, nil, 1, 2))
			b.holds(1, 1, 2)
			assert.True(t, b.snapshot().Partial)
		})
	}
}

// saltedBlocks is what a rank holds, each block with the salt of its chain.
type saltedBlocks struct {
	*blocks
	salts map[Hash]string
}

func (b saltedBlocks) Stored(ev *Stored) {
	b.blocks.Stored(ev)
	salt, _ := ev.Salt()
	for _, h := range ev.Hashes {
		b.salts[h] = salt
	}
}

// RP30, RP31: The recorded first batches of each publisher, live behind the empty replay of an engine that
// has just started, and from the ring of one that runs: both are whole, and both are the same blocks.
func TestFirstBatchesOfPublishers(t *testing.T) {
	sglang := map[Hash]string{
		IntHash(-3488128144981237669): "", UintHash(0x4ebfa8a1f3c34151): "",
		UintHash(0x339927f491605c4b): "tenant-a",
	}
	for file, want := range map[string]struct {
		salts   map[Hash]string // of the blocks that are left; nil: not looked at
		batches int
	}{
		"testdata/sglang/sglang-0.5.19.jsonl":                {sglang, 4},
		"testdata/sglang/sglang-0.5.23.jsonl":                {sglang, 4},
		"testdata/v0.32.0/dense_default_replay_from_0.jsonl": {nil, 18},
	} {
		for _, fromRing := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, ring %v", file, fromRing), func(t *testing.T) {
				view := saltedBlocks{newBlocks(), map[Hash]string{}}
				tr := newTracker(true, view)
				now := time.Unix(1000, 0)
				tr.connect(now)
				require.NotNil(t, tr.take())
				if !fromRing {
					tr.replayEnd(now, nil)
				}
				for _, line := range fixture(t, file) {
					if line.Dir != "reply" || line.End {
						continue
					}
					m := message{seq: line.Seq, payload: unhex(t, line.Frames[len(line.Frames)-1])}
					if fromRing {
						tr.replayed(now, m)
					} else {
						tr.live(now, m)
					}
				}
				if fromRing {
					tr.replayEnd(now, nil)
				}
				st := tr.snapshot()
				assert.Equal(t, Stats{
					Connected: true, Synced: true, LastSeq: uint64(want.batches - 1), LastEvent: st.LastEvent,
					Content: st.Content, Faults: Faults{Replays: 1, Resets: 1, Connects: 1},
				}, st)
				c := st.Content
				assert.Zero(t, c.Unknown+c.UnknownMembers+c.Malformed+c.BadBatches)
				assert.Equal(t, uint64(want.batches), c.Batches)
				if want.salts == nil {
					return
				}
				left := map[Hash]string{}
				for h := range view.copies {
					left[h] = view.salts[h]
				}
				assert.Equal(t, want.salts, left)
			})
		}
	}
}

func TestFailedReplayCoolsDown(t *testing.T) {
	b := newBench(t, true)
	b.connect(b.now)
	b.answer(1, errTest)
	b.lives(1, 4, 5)
	b.holds(1, 4, 5)
	assert.True(t, b.snapshot().Partial)
	b.lives(1, 8)
	assert.Nil(t, b.take(), "not within the cooldown")
	b.holds(1, 8)
	b.now = b.now.Add(replayCooldown - time.Second)
	b.tick(b.now)
	assert.Nil(t, b.take())
	b.now = b.now.Add(time.Second)
	b.tick(b.now)
	assert.Equal(t, uint64(0), b.answer(1, nil, 0, 1, 2, 3, 4, 5, 6, 7, 8), "then everything again")
	b.holds(1, 0, 1, 2, 3, 4, 5, 6, 7, 8)
	assert.False(t, b.snapshot().Partial)
	b.now = b.now.Add(tailDelay)
	b.tick(b.now)
	assert.Equal(t, uint64(9), b.answer(1, nil), "and only the end is looked at from now on")
}

func TestReconnectAsksWhetherItIsTheSameEngine(t *testing.T) {
	connected := func(t *testing.T) *bench {
		b := newBench(t, true)
		b.connect(b.now)
		b.answer(1, nil, 0, 1, 2, 3)
		b.disconnect()
		b.holds(1, 0, 1, 2, 3)
		b.connect(b.now)
		return b
	}
	t.Run("same", func(t *testing.T) {
		b := connected(t)
		b.lives(1, 6)
		assert.Equal(t, uint64(3), b.answer(1, nil, 3, 4, 5, 6))
		b.holds(1, 0, 1, 2, 3, 4, 5, 6)
		assert.Zero(t, b.snapshot().Restarts)
	})
	t.Run("another, still behind", func(t *testing.T) {
		b := connected(t)
		b.lives(2, 2)
		b.answer(2, nil)
		assert.Empty(t, b.view.copies, "at once")
		assert.Equal(t, uint64(0), b.answer(2, nil, 0, 1))
		b.holds(2, 0, 1, 2)
		assert.Equal(t, uint64(1), b.snapshot().Restarts)
		assert.False(t, b.snapshot().Partial)
	})
	t.Run("another, already past", func(t *testing.T) {
		b := connected(t)
		b.lives(2, 6)
		b.answer(2, nil, 3, 4, 5, 6)
		assert.Empty(t, b.view.copies)
		b.answer(2, nil, 0, 1, 2, 3, 4, 5, 6)
		b.holds(2, 0, 1, 2, 3, 4, 5, 6)
		assert.Equal(t, uint64(1), b.snapshot().Restarts)
	})
	t.Run("nobody answers", func(t *testing.T) {
		b := connected(t)
		b.answer(1, errTest)
		assert.Empty(t, b.view.copies, "who knows")
		assert.True(t, b.snapshot().Partial)
	})
}

func TestOldNumbers(t *testing.T) {
	b := newBench(t, false)
	b.connect(b.now)
	b.lives(1, 0, 1, 2, 2, 0)
	b.holds(1, 0, 1, 2)
	assert.Equal(t, uint64(2), b.snapshot().Duplicates)
	b.lives(1, 5, 4) // a gap that is given up, then its straggler
	b.holds(1, 5)
	assert.Equal(t, uint64(1), b.snapshot().Stragglers)
	b.lives(2, 0, 1) // numbers go backwards: a new incarnation
	b.holds(2, 0, 1)
	st := b.snapshot()
	assert.Equal(t, uint64(1), st.Restarts)
	assert.False(t, st.Partial, "followed from its first batch on")
	b.disconnect()
	assert.Empty(t, b.view.copies, "without replays a lost connection is a gap")
	b.connect(b.now)
	b.lives(3, 0)
	assert.Equal(t, uint64(2), b.snapshot().Restarts)
}

func TestPublisherSaysGoodbye(t *testing.T) {
	b := newBench(t, true)
	b.connect(b.now)
	b.answer(1, nil, 0, 1)
	b.live(b.now, message{seq: seqReset})
	assert.Empty(t, b.view.copies)
	b.lives(2, 1)
	b.answer(2, nil, 0, 1)
	b.holds(2, 0, 1)
}

func TestDamagedBatches(t *testing.T) {
	damaged := func(b *bench, n int) message {
		m := b.batch(1, n)
		m.payload = m.payload[:len(m.payload)-1]
		return m
	}
	t.Run("the ring has it whole", func(t *testing.T) {
		b := newBench(t, true)
		b.connect(b.now)
		b.answer(1, nil, 0)
		b.live(b.now, damaged(b, 1))
		assert.Equal(t, uint64(1), b.answer(1, nil, 1))
		b.holds(1, 0, 1)
		assert.False(t, b.snapshot().Partial)
		assert.Zero(t, b.snapshot().Restarts)
	})
	t.Run("nobody has it whole", func(t *testing.T) {
		b := newBench(t, true)
		b.connect(b.now)
		b.answer(1, nil, 0)
		b.live(b.now, damaged(b, 1))
		a := b.take()
		b.replayed(b.now, damaged(b, 1))
		require.True(t, b.running(a.id))
		b.replayEnd(b.now, nil)
		b.lives(1, 2)
		b.holds(1, 0, 2)
		assert.Nil(t, b.take())
		assert.True(t, b.snapshot().Partial, "visible, and nothing is wiped")
	})
	t.Run("without replay", func(t *testing.T) {
		b := newBench(t, false)
		b.connect(b.now)
		b.lives(1, 0)
		b.live(b.now, damaged(b, 1))
		b.lives(1, 2)
		b.holds(1, 0, 2)
		assert.True(t, b.snapshot().Partial)
	})
}

func TestLostTailIsFound(t *testing.T) {
	b := newBench(t, true)
	b.connect(b.now)
	b.answer(1, nil)
	b.lives(1, 0)
	b.tick(b.now.Add(tailDelay - 1))
	assert.Nil(t, b.take())
	b.now = b.now.Add(tailDelay)
	b.tick(b.now)
	assert.Equal(t, uint64(1), b.answer(1, nil, 1, 2))
	b.holds(1, 0, 1, 2)
	b.tick(b.now.Add(tailInterval - 1))
	assert.Nil(t, b.take())
	b.tick(b.now.Add(tailInterval))
	b.answer(1, errTest)
	b.holds(1, 0, 1, 2)
	assert.False(t, b.snapshot().Partial, "a check that failed says nothing")
	b.lives(1, 4)
	assert.Equal(t, uint64(3), b.answer(1, nil, 3, 4), "and forbids nothing")
}

func TestAnEngineThatNeverCatchesUp(t *testing.T) {
	b := newBench(t, true)
	b.connect(b.now)
	b.answer(1, nil, 0)
	n := 2
	asked := 0
	for ; asked < 100; asked++ { // every second batch is lost, during every replay
		b.lives(1, n)
		if b.replay.want == nil {
			break
		}
		n += 2
		b.lives(1, n)
		a := b.take()
		for i := b.next; i < uint64(n)-1; i++ {
			b.replayed(b.now, b.batch(1, int(i)))
		}
		require.True(t, b.running(a.id))
		b.replayEnd(b.now, nil)
		n += 2
	}
	assert.LessOrEqual(t, asked, 2*maxRounds, "replays in a row are bounded")
	assert.True(t, b.snapshot().Partial)
}

func TestPendingIsBounded(t *testing.T) {
	b := newBench(t, true)
	b.connect(b.now)
	for n := range maxPending + 5 {
		b.lives(1, n)
	}
	assert.LessOrEqual(t, len(b.pending), maxPending)
	assert.Equal(t, uint64(1), b.snapshot().Overflows)
	b.answer(1, nil, 0)
	from := b.answer(1, nil)
	assert.Equal(t, uint64(1), from, "what was dropped is a gap")
}
