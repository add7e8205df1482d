package sim

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/kvevents"
	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/test/ports"
)

// kvView is the dumbest index: copies per hash.
type kvView struct {
	mu     sync.Mutex
	copies map[string]int
	resets []bool
}

func newKVView() *kvView { return &kvView{copies: map[string]int{}} }

func (v *kvView) Stored(ev *kvevents.Stored) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, h := range ev.Hashes {
		v.copies[h.String()]++
	}
}

func (v *kvView) Removed(ev *kvevents.Removed) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, h := range ev.Hashes {
		if v.copies[h.String()]--; v.copies[h.String()] <= 0 {
			delete(v.copies, h.String())
		}
	}
}

func (v *kvView) Cleared() {
	v.mu.Lock()
	defer v.mu.Unlock()
	clear(v.copies)
}

func (v *kvView) Reset(partial bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	clear(v.copies)
	v.resets = append(v.resets, partial)
}

func (v *kvView) equals(t BlockTable) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	want := map[string]int{}
	for hash, n := range t.Blocks {
		want[fmt.Sprint(hash)] = n
	}
	return maps.Equal(want, v.copies)
}

func (v *kvView) size() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.copies)
}

// follow subscribes to rank i of s, and waits until the rank knows: what it publishes before that is lost to
// the subscriber, which is connected by its own account.
func follow(t *testing.T, s *Server, i int, edit func(*kvevents.Config)) (*kvevents.Subscriber, *kvView) {
	t.Helper()
	kv := s.ranks[i].kv
	known := kv.listeners()
	cfg := kvevents.Config{Endpoints: kvevents.Endpoints{
		Connect: schemeTCP + kvAddr(s, kv.sockets.endpoint),
		Replay:  kv.sockets.replay,
	}}
	sub, view := subscribe(t, cfg, edit)
	eventually(t, func() bool { return kv.listeners() > known })
	return sub, view
}

// listeners is how many subscribers have said what they want.
func (p *kvPublisher) listeners() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for s := range p.subs {
		s.mu.Lock()
		if s.wants(p.set.Topic) {
			n++
		}
		s.mu.Unlock()
	}
	return n
}

func subscribe(t *testing.T, cfg kvevents.Config,
	edit func(*kvevents.Config),
) (*kvevents.Subscriber, *kvView) {
	t.Helper()
	view := newKVView()
	cfg.Sink, cfg.Replays = view, kvevents.NewReplays()
	if edit != nil {
		edit(&cfg)
	}
	sub, err := kvevents.New(cfg)
	require.NoError(t, err)
	require.NoError(t, sub.Start(t.Context()))
	t.Cleanup(func() { assert.NoError(t, sub.Close()); assert.NoError(t, sub.Close()) })
	return sub, view
}

// tightKV is an engine whose memory is scarce: blocks come and go.
func tightKV() Config {
	c := kvConfig()
	c.Model.BlockSize, c.Model.Blocks, c.Model.MaxModelLen, c.Model.MaxSeqs = 4, 200, 400, 16
	c.DevMode = true
	return c
}

// converse sends turns of several conversations at a time; they share prefixes within and across.
func converse(t *testing.T, urls ...string) {
	t.Helper()
	var wg sync.WaitGroup
	for k := range 6 {
		wg.Go(func() {
			history := "you are a helpful assistant, tenant " + fmt.Sprint(k%3) + ". "
			for turn := range 12 {
				history += fmt.Sprintf("turn %d of %d asks for more. ", turn, k)
				body := fmt.Sprintf(`{"prompt":%q,"max_tokens":%d,"ignore_eos":true}`, history, 4+turn)
				got := tryAsk(urls[(k+turn)%len(urls)]+"/v1/completions", body)
				if !strings.Contains(got, "cmpl-") {
					t.Errorf("no answer: %s", got)
				}
			}
		})
	}
	wg.Wait()
}

// agree waits until sub has read everything and the view equals the engine's own table.
func agree(t *testing.T, s *Server, sub *kvevents.Subscriber, view *kvView, i int) {
	t.Helper()
	ok := assert.Eventually(t, func() bool {
		table, st := s.BlockTables()[i], sub.Stats()
		return st.Synced && st.LastSeq+1 == table.Next && !st.Replaying && view.equals(table)
	}, 30*time.Second, 5*time.Millisecond)
	if !ok {
		table := s.BlockTables()[i]
		t.Fatalf("view of %d blocks, engine has %d, next batch %d: %+v", view.size(), len(table.Blocks),
			table.Next, sub.Stats())
	}
}

func TestSubscriberHoldsWhatTheEngineHolds(t *testing.T) {
	c := tightKV()
	c.Model.FixedStep = 200 * time.Microsecond
	s := start(t, c)
	early, earlyView := follow(t, s, 0, nil)
	converse(t, s.URL())
	late, lateView := follow(t, s, 0, nil)
	converse(t, s.URL())
	agree(t, s, early, earlyView, 0)
	agree(t, s, late, lateView, 0)
	for _, sub := range []*kvevents.Subscriber{early, late} {
		st := sub.Stats()
		assert.False(t, st.Partial)
		assert.Zero(t, st.Malformed+st.BadBatches+st.BadFrames+st.Unknown+st.Restarts)
		assert.Positive(t, st.Removed, "memory was scarce")
	}
	_, body := ask(t, s, "/reset_prefix_cache", "")
	require.JSONEq(t, `{"success":true}`, body)
	ask(t, s, "/v1/completions", `{"prompt":"after the reset, something new","max_tokens":1}`)
	agree(t, s, early, earlyView, 0)
	assert.Equal(t, uint64(1), early.Stats().Cleared)
}

func TestLossesAreReplayed(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		faults []Fault
	}{
		{name: "drop", faults: []Fault{{Mode: ModeKVDrop, Rate: 0.05}}},
		{name: "reorder", faults: []Fault{{Mode: ModeKVReorder, Rate: 0.1}}},
		{name: "garbage", faults: []Fault{{Mode: ModeKVGarbage, Rate: 0.05}}},
		{
			name:   "duplicate and unknown",
			faults: []Fault{{Mode: ModeKVDuplicate, Rate: 0.2}, {Mode: ModeKVUnknown, Rate: 0.2}},
		},
		{name: "all", faults: []Fault{
			{Mode: ModeKVDrop, Rate: 0.03},
			{Mode: ModeKVDuplicate, Rate: 0.03},
			{Mode: ModeKVReorder, Rate: 0.03},
			{Mode: ModeKVGarbage, Rate: 0.03},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := tightKV()
			c.Model.FixedStep = 500 * time.Microsecond
			s := start(t, c)
			sub, view := follow(t, s, 0, nil)
			eventually(t, func() bool { return sub.Stats().Synced })
			for _, f := range tc.faults {
				require.NoError(t, s.Fail(f))
			}
			converse(t, s.URL())
			agree(t, s, sub, view, 0)
			st := sub.Stats()
			assert.False(t, st.Partial, "%+v", st)
			assert.Zero(t, st.Restarts, "%+v", st)
			assert.Equal(t, []bool{false}, view.resets, "one baseline, nothing was ever dropped")
		})
	}
}

func TestWithoutReplayAGapIsVisible(t *testing.T) {
	c := tightKV()
	c.KVEvents.Replay = nil
	s := start(t, c)
	sub, view := follow(t, s, 0, nil)
	ask(t, s, "/v1/completions", `{"prompt":"the first request of all, long enough for blocks",`+
		`"max_tokens":1}`)
	agree(t, s, sub, view, 0)
	assert.False(t, sub.Stats().Partial, "followed from the first batch on")
	require.NoError(t, s.Fail(Fault{Mode: ModeKVDrop, Count: 1}))
	ask(t, s, "/v1/completions", `{"prompt":"a request whose blocks nobody hears of, a lost one",`+
		`"max_tokens":1}`)
	ask(t, s, "/v1/completions", `{"prompt":"another request that shows the gap, and fills blocks",`+
		`"max_tokens":1}`)
	eventually(t, func() bool {
		st := sub.Stats()
		return st.Gaps == 1 && st.LastSeq+1 == s.BlockTables()[0].Next
	})
	st := sub.Stats()
	assert.True(t, st.Partial)
	assert.Less(t, view.size(), len(s.BlockTables()[0].Blocks), "only what came after the gap")
	ask(t, s, "/reset_prefix_cache", "")
	ask(t, s, "/v1/completions", `{"prompt":"after a clear nothing can be unknown any more","max_tokens":1}`)
	agree(t, s, sub, view, 0)
	assert.False(t, sub.Stats().Partial)
}

// The ring is shorter than the history: partial, and it refills.
func TestLateJoinerOfALongHistoryIsPartial(t *testing.T) {
	c := tightKV()
	c.KVEvents.BufferSteps = 10
	s := start(t, c)
	converse(t, s.URL())
	sub, view := follow(t, s, 0, nil)
	eventually(t, func() bool {
		st := sub.Stats()
		return st.Synced && st.LastSeq+1 == s.BlockTables()[0].Next
	})
	assert.True(t, sub.Stats().Partial)
	assert.Equal(t, []bool{true}, view.resets)
	for hash, n := range s.BlockTables()[0].Blocks {
		assert.LessOrEqual(t, view.copies[fmt.Sprint(hash)], n)
	}
	before := view.size()
	ask(t, s, "/v1/completions", `{"prompt":"something that was never asked before, to refill the `+
		`view","max_tokens":9}`)
	eventually(t, func() bool { return view.size() > before })
}

// An engine that begins anew in its place, its numbers from the first: the blocks of the one before are gone
// at once.
func TestRestartInPlace(t *testing.T) {
	for _, replay := range []bool{true, false} {
		t.Run(fmt.Sprintf("replay=%v", replay), func(t *testing.T) {
			c := tightKV()
			c.Model.Blocks, c.Model.MaxModelLen = 2000, 4000
			if !replay {
				c.KVEvents.Replay = nil
			}
			s := start(t, c)
			sub, view := follow(t, s, 0, nil)
			converse(t, s.URL())
			agree(t, s, sub, view, 0)
			require.NoError(t, s.Fail(Fault{Mode: ModeKVRestart}))
			eventually(t, func() bool { return view.size() == 0 })
			eventually(t, func() bool { return sub.Stats().Connects == 2 && s.ranks[0].kv.listeners() == 1 })
			ask(t, s, "/v1/completions", `{"prompt":"the first one of the new incarnation, with some `+
				`blocks","max_tokens":1}`)
			agree(t, s, sub, view, 0)
			st := sub.Stats()
			assert.False(t, st.Partial, "%+v", st)
			assert.Equal(t, uint64(1), st.Restarts)
		})
	}
}

// Two ranks behind one port, two streams: what happens on one does not touch the other (KV5, KV8).
func TestStreamsOfRanksAreTheirOwn(t *testing.T) {
	c := tightKV()
	c.InternalLB = 4
	s := start(t, c)
	var subs []*kvevents.Subscriber
	var views []*kvView
	for i := range 4 {
		sub, view := follow(t, s, i, nil)
		subs, views = append(subs, sub), append(views, view)
	}
	const prompt = `{"prompt":"a prompt that fills some blocks on one rank only","max_tokens":1}`
	ask(t, s, "/v1/completions", prompt, "X-data-parallel-rank", "2")
	for i := range 4 {
		eventually(t, func() bool { return subs[i].Stats().Synced })
	}
	agree(t, s, subs[2], views[2], 2)
	for i, v := range views {
		assert.Equal(t, i == 2, v.size() > 0, "rank %d", i)
	}
	ask(t, s, "/v1/completions", prompt, "X-data-parallel-rank", "1")
	agree(t, s, subs[1], views[1], 1)
	s.ranks[2].mu.Lock()
	s.ranks[2].core.ResetPrefixCache(false, false)
	s.ranks[2].mu.Unlock()
	ask(t, s, "/v1/completions", `{"prompt":"tiny","max_tokens":1}`, "X-data-parallel-rank", "2")
	ask(t, s, "/v1/completions", `{"prompt":"one that fills a block, at last","max_tokens":1}`,
		"X-data-parallel-rank", "2")
	agree(t, s, subs[2], views[2], 2)
	assert.Equal(t, uint64(1), subs[2].Stats().Cleared)
	assert.Positive(t, views[1].size())
	assert.Zero(t, subs[1].Stats().Cleared)
}

func TestSlowAndSilentReplays(t *testing.T) {
	t.Parallel()
	for _, mode := range []Mode{ModeKVNoReplay, ModeKVSlowReplay} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			s := start(t, tightKV())
			require.NoError(t, s.Fail(Fault{Mode: mode}))
			sub, view := follow(t, s, 0, nil)
			eventually(t, func() bool { return sub.Stats().ReplayFailures == 1 })
			ask(t, s, "/v1/completions", `{"prompt":"the first batch of all is a baseline by itself",`+
				`"max_tokens":1}`)
			agree(t, s, sub, view, 0)
			assert.False(t, sub.Stats().Partial)
			require.NoError(t, s.Fail(Fault{Mode: ModeKVDrop, Count: 1}))
			ask(t, s, "/v1/completions", `{"prompt":"a batch that is lost, and cannot be asked for",`+
				`"max_tokens":1}`)
			ask(t, s, "/v1/completions", `{"prompt":"the batch that shows it, some more blocks for it",`+
				`"max_tokens":1}`)
			eventually(t, func() bool { return sub.Stats().LastSeq+1 == s.BlockTables()[0].Next })
			assert.True(t, sub.Stats().Partial, "visibly so")
			assert.Equal(t, uint64(1), sub.Stats().ReplayFailures, "not asked again within the cooldown")
		})
	}
}

// The launched form: the engine dials its publisher to a socket that is bound before it starts, and comes
// back after a restart.
func TestEngineProcessDialsAndRestarts(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	replay, http := ports.Take(t, 1), ports.Take(t, 1)
	sub, view := subscribe(t, kvevents.Config{
		Endpoints: kvevents.Endpoints{
			Bind:   "tcp://127.0.0.1:0",
			Replay: fmt.Sprintf("tcp://127.0.0.1:%d", replay),
		},
	}, nil)
	config := fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://%s",`+
		`"replay_endpoint":"tcp://127.0.0.1:%d","topic":""}`,
		sub.Addr(), replay)
	url := fmt.Sprintf("http://127.0.0.1:%d", http)
	table := func() (out []BlockTable) {
		resp := getURL(t, url+"/_sim/blocks")
		require.NoError(t, json.Unmarshal([]byte(resp), &out))
		return out
	}
	for run := range 2 {
		p := launchOn(t, http, "--kv-events-config", config, "--sim-step-ms", "0", "--block-size", "4",
			"--num-gpu-blocks-override", "200", "--max-model-len", "400")
		p.waitReady(t)
		eventually(t, func() bool { return sub.Stats().Synced && sub.Stats().Connects == uint64(run+1) })
		if run > 0 {
			eventually(t, func() bool { return view.size() == 0 && sub.Stats().Restarts == 1 })
		}
		converse(t, url)
		eventually(t, func() bool {
			st := sub.Stats()
			mine := table()[0]
			return st.LastSeq+1 == mine.Next && view.equals(mine)
		})
		assert.False(t, sub.Stats().Partial)
		require.NoError(t, p.cmd.Process.Kill())
		<-p.ended
		eventually(t, func() bool { return !sub.Stats().Connected })
	}
}

// All hash types tell of the same blocks.
func TestHashTypes(t *testing.T) {
	t.Parallel()
	for _, hash := range []KVHash{KVUint, KVInt, KVBytes} {
		for _, window := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s-%v", hash, window), func(t *testing.T) {
				t.Parallel()
				c := tightKV()
				c.KVEvents.Hash, c.KVEvents.SlidingWindow = hash, window
				s := start(t, c)
				sub, view := follow(t, s, 0, nil)
				eventually(t, func() bool { return sub.Stats().Synced })
				converse(t, s.URL())
				eventually(t, func() bool { return sub.Stats().LastSeq+1 == s.BlockTables()[0].Next })
				table := s.BlockTables()[0]
				assert.Len(t, view.copies, len(table.Blocks))
				copies, own := 0, 0
				for _, n := range view.copies {
					copies += n
				}
				for _, n := range table.Blocks {
					own += n
				}
				assert.Equal(t, own, copies)
				st := sub.Stats()
				assert.Zero(t, st.Malformed+st.BadBatches+st.Unknown)
				assert.Equal(t, window, st.Skipped > 0)
			})
		}
	}
}

func getURL(t testing.TB, url string) string {
	t.Helper()
	resp, err := client.Get(url)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(b)
}

// 20,000 batches, a ring of 10,000: the newest half is there at once, and it says that it is a half.
func TestJoinAfterTwentyThousandBatches(t *testing.T) {
	c := kvConfig()
	c.Model.BlockSize = 4
	s := start(t, c)
	kv := s.ranks[0].kv
	for i := range uint32(20_000) {
		content := em.NewTokenContent([]uint32{i, 1, 2, 3}, em.Prose{}, 4, "")
		kv.step([]em.BlockEvent{{
			Kind: em.BlocksStored,
			Req:  &em.Request{Prompt: 4, Output: 1, Content: content}, Count: 1,
		}})
	}
	sub, view := follow(t, s, 0, nil)
	eventually(t, func() bool {
		st := sub.Stats()
		return st.Synced && st.LastSeq == 19_999 && !st.Replaying
	})
	st := sub.Stats()
	assert.True(t, st.Partial)
	assert.Equal(t, uint64(10_000), st.Batches)
	assert.Equal(t, 10_000, view.size())
	assert.Equal(t, uint64(1), st.Replays)
	assert.Zero(t, st.ReplayFailures)
}
