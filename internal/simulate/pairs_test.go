package simulate

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/routing"
)

func newMex() (routing.Policy, error) { return routing.New("mex", "", nil) }

// playOn plays a workload to its end, and checks that nothing is left of it.
func playOn(t *testing.T, cfg Config, work []Request) (*sim, *Result) {
	t.Helper()
	s, err := newSim(cfg, work, newMex)
	require.NoError(t, err)
	require.NoError(t, s.play())
	for len(s.late) > 0 {
		s.hear(s.late[0].pool, &s.late[0].event)
		s.late = s.late[1:]
	}
	assert.Zero(t, s.open)
	for _, p := range []*pool{s.pool, s.prefill} {
		if p == nil {
			continue
		}
		for i, rk := range p.ranks {
			if !rk.isDead {
				assert.Zero(t, rk.core.Stats().UsedBlocks, "rank %d", i)
				assert.Empty(t, rk.decoding)
			}
		}
		for _, r := range p.routers {
			for _, row := range r.Snapshot().Ranks {
				assert.Zero(t, row.Load.O(), row.ID)
				assert.Zero(t, row.Load.Q, row.ID)
			}
		}
	}
	for _, r := range s.pairs {
		r.Update(func(table *routing.PairTable) {
			for _, row := range s.prefill.routers[0].Snapshot().Ranks {
				assert.Zero(t, table.Leased(&row), row.ID)
			}
		})
	}
	return s, s.result()
}

// pairConfig is two prefill ranks and four decode ranks.
func pairConfig(decider routing.PairDecider) Config {
	cfg := Default()
	cfg.Ranks, cfg.Prefill = 4, Pool{Ranks: 2, Engine: Engine()}
	cfg.Pair.Decider, cfg.Ingresses, cfg.Lag = decider, 2, 50*time.Millisecond
	return cfg
}

// The deciders of live ingresses choose between both pools: every request is served, and nothing stays
// counted or leased.
func TestPairs(t *testing.T) {
	for decider, split := range map[routing.PairDecider]int{
		routing.DecideAlways: 150, routing.DecideISL: 20, routing.DecideMex: 5,
	} {
		_, r := playOn(t, pairConfig(decider), Chats(200, 4, 3))
		assert.Len(t, r.TTFT, 200)
		assert.GreaterOrEqual(t, r.Prefill.Requests[0]+r.Prefill.Requests[1], split, "decider %d", decider)
	}
}

// RT5: With very mixed lengths, each of four decode ranks gets 15 to 35 % of the requests under the decider
// isl.
func TestRT5SharesOfDecodeRanksByISL(t *testing.T) {
	const requests = 2000
	for _, rate := range []float64{10, 16, 20} {
		cfg := pairConfig(routing.DecideISL)
		cfg.Prefill.Ranks, cfg.Ingresses, cfg.Lag = 4, 1, 0
		_, r := playOn(t, cfg, Lengths(requests, rate, 5, Mixed))
		for _, n := range r.Requests {
			share := float64(n) / requests
			assert.True(t, share >= 0.15 && share <= 0.35, "%g per s: %v", rate, r.Requests)
		}
	}
}

// A prompt that is computed elsewhere keeps its decode rank free: the time to the first token is that of the
// prefill, the hand-over, the transfer and one token.
func TestWhatASplitRequestTakes(t *testing.T) {
	cfg := pairConfig(routing.DecideAlways)
	_, r := playOn(t, cfg, []Request{{Prompt: 4096, Output: 2}})
	alone, token := cfg.alone(&Request{Prompt: 4096, Output: 2}, 0)
	want := alone + cfg.HandOver + 8*BlockSize*cfg.PerToken + token
	assert.InDelta(t, want.Seconds(), r.TTFT[0].Seconds(), .0005)
}

// A rank that dies loses its requests to others, whichever leg it had; it comes back empty. Answers that have
// begun go on, unless they are not to.
func TestRanksDieAndComeBack(t *testing.T) {
	for name, change := range map[string]func(cfg *Config){
		"one pool":     func(cfg *Config) { cfg.Prefill = Pool{} },
		"decode rank":  func(*Config) {},
		"prefill rank": func(cfg *Config) { cfg.Faults[0].Prefill = true },
		"for good":     func(cfg *Config) { cfg.Faults[0].For = 0 },
	} {
		for _, cut := range []bool{false, true} {
			cfg := pairConfig(routing.DecideAlways)
			cfg.Faults, cfg.Cut = []Fault{{At: 10 * time.Second, Rank: 1, For: 20 * time.Second}}, cut
			change(&cfg)
			s, r := playOn(t, cfg, Chats(200, 4, 3))
			lost := 0
			for i := range s.calls {
				if s.calls[i].lost > 0 {
					lost++
				}
			}
			assert.Positive(t, lost, name)
			assert.Equal(t, 200, len(r.TTFT)+r.Failed, name)
			if !cut {
				assert.Zero(t, r.Failed, name)
				assert.Equal(t, tokensOf(s), r.Tokens, name)
			}
			if name == "one pool" {
				assert.Equal(t, cut, r.Failed > 0)
				assert.Zero(t, r.Share(1, 11*time.Second, 30*time.Second))
				assert.Positive(t, r.Share(1, 30*time.Second, time.Hour))
			}
		}
	}
}

func tokensOf(s *sim) (n int) {
	for i := range s.calls {
		n += s.calls[i].Output
	}
	return n
}

// What finds no room waits at its ingress, for its time, and no longer.
func TestFullRanksLetRequestsWait(t *testing.T) {
	cfg := Default()
	cfg.Ranks, cfg.Slots, cfg.Ingresses = 2, 4, 2
	open, most := map[routing.RankID]int{}, 0
	cfg.Report = func(e *routing.Event) {
		switch e.Kind {
		case routing.EvAdmitted:
			open[e.Rank]++
			most = max(most, open[e.Rank])
		case routing.EvFinished:
			open[e.Rank]--
		default:
		}
	}
	work := Uniform(60, 2048, 50, 20, 1)
	_, r := playOn(t, cfg, work)
	assert.Equal(t, 4, most)
	assert.Zero(t, r.Failed)
	cfg.Wait = time.Second
	_, r = playOn(t, cfg, work)
	assert.Positive(t, r.Failed)
	cfg.Wait, cfg.Most = 0, 3
	_, r = playOn(t, cfg, work)
	assert.Positive(t, r.Failed)
}
