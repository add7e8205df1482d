package simulate_test

import (
	"math/rand/v2"
	"path"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/simulate"
	"github.com/dpserve/dpserve/routing"
)

// The figures of lockstep groups, as a table: go test ./internal/simulate -run TestGroup -v. Under make
// acceptance they are means over five seeds.

// groupCase is a workload for a lockstep group.
type groupCase struct {
	cfg   simulate.GroupConfig
	rule  func(r routing.GroupRule) routing.GroupRule // nil: that of a group that computes prompts
	work  func(seed uint64) []simulate.Request
	seeds uint64
}

// figure is a mean over the seeds.
type figure func(r *simulate.GroupResult) float64

// groupRuns are the results of a case under a policy, or under the rule: one per seed.
type groupRuns []*simulate.GroupResult

func (g groupRuns) mean(f figure) float64 {
	sum := 0.0
	for _, r := range g {
		sum += f(r)
	}
	return sum / float64(len(g))
}

func (g groupRuns) most(f figure) float64 {
	most := 0.0
	for _, r := range g {
		most = max(most, f(r))
	}
	return most
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func perSecond(r *simulate.GroupResult) float64 { return r.PerSecond }
func step(r *simulate.GroupResult) float64      { return ms(r.Step) }
func prefill(r *simulate.GroupResult) float64   { return r.Prefill }
func balance(r *simulate.GroupResult) float64   { return r.Balance }
func longWait(r *simulate.GroupResult) float64  { return ms(r.LongWait) }
func skips(r *simulate.GroupResult) float64     { return float64(r.Skips) }

func ttft(p float64) figure {
	return func(r *simulate.GroupResult) float64 { return ms(simulate.Percentile(r.TTFT, p)) }
}

func tpot(p float64) figure {
	return func(r *simulate.GroupResult) float64 { return ms(simulate.Percentile(r.TPOT, p)) }
}

func itl(p float64) figure {
	return func(r *simulate.GroupResult) float64 { return ms(simulate.Percentile(r.ITL, p)) }
}

// good is the share, in %, with a first token within 2 s and each token behind it within each.
func good(each time.Duration) figure {
	return func(r *simulate.GroupResult) float64 {
		return 100 * r.Good(routing.Goals{TTFT: 2 * time.Second, TPOT: each})
	}
}

// play runs a case under today's default and under the rule, and prints both.
func (c *groupCase) play(t *testing.T, name string) (base, rule groupRuns) {
	t.Helper()
	for seed := uint64(31); seed < 31+seedsOf(c.seeds, 5); seed++ {
		cfg, work := c.cfg, c.work(seed)
		cfg.Seed = seed
		for range 2 {
			r, err := simulate.RunGroup(cfg, work, func() (routing.Policy, error) {
				return routing.New("lmetric-1", "", nil)
			})
			require.NoError(t, err)
			if cfg.Rule != nil {
				rule = append(rule, r)
				break
			}
			base = append(base, r)
			ruled := routing.NewGroupRule(0, 0)
			if c.rule != nil {
				ruled = c.rule(ruled)
			}
			cfg.Rule = &ruled
		}
	}
	for i, g := range []groupRuns{base, rule} {
		t.Logf("%-24s %-9s %7.1f tok/s · step %6.1f ms · %4.1f ranks · balance %.3f · ITL %3.0f/%4.0f · "+
			"TTFT %4.0f/%5.0f · TPOT p99 %4.0f · good %3.0f/%3.0f %% · wait %6.1f s, %3.0f skips",
			name, [...]string{"lmetric-1", "cohorts"}[i], g.mean(perSecond), g.mean(step), g.mean(prefill),
			g.mean(balance), g.mean(itl(.5)), g.mean(itl(.99)), g.mean(ttft(.5)), g.mean(ttft(.99)),
			g.mean(tpot(.99)), g.mean(good(50*time.Millisecond)), g.mean(good(100*time.Millisecond)),
			g.most(longWait)/1000, g.most(skips))
	}
	return base, rule
}

// gain is by how many % the rule's figure is above the default's.
func gain(base, rule groupRuns, f figure) float64 { return 100 * (rule.mean(f)/base.mean(f) - 1) }

// equals are 1,024 tokens in and 200 out, on 8 ranks for 60 s.
func equals(rate float64, ranks int) groupCase {
	c := groupCase{cfg: simulate.LockstepGroup(ranks, 128), seeds: 2}
	c.cfg.From, c.cfg.Until = 20*time.Second, 60*time.Second
	c.work = func(seed uint64) []simulate.Request {
		return simulate.Lengths(int(65*rate), rate, seed, simulate.Equal(200, false))
	}
	return c
}

// saturated has 64 requests waiting at any time.
func saturated(ranks, slots, from, until int, next func(*rand.Rand) (prompt, output int)) groupCase {
	c := groupCase{cfg: simulate.LockstepGroup(ranks, slots), seeds: 1}
	c.cfg.Waiting = 64
	c.cfg.From, c.cfg.Until = time.Duration(from)*time.Second, time.Duration(until)*time.Second
	c.work = func(seed uint64) []simulate.Request { return simulate.Lengths(20_000, 0, seed, next) }
	return c
}

func promptSteps(c groupCase) groupCase {
	c.cfg.Engine.PromptSteps = true
	return c
}

// LG4: Below saturation prompts share steps: the step is half as long, and so is the time between tokens.
// First tokens come within the hold.
func TestGroupPromptsShareSteps(t *testing.T) {
	skipShort(t)
	t.Parallel()
	t.Run("30 per s", func(t *testing.T) {
		c := equals(30, 8)
		base, rule := c.play(t, path.Base(t.Name()))
		assert.LessOrEqual(t, rule.mean(step), 62.0)
		assert.GreaterOrEqual(t, rule.mean(prefill), 7.2)
		assert.LessOrEqual(t, rule.mean(itl(.5)), 42.0)
		assert.LessOrEqual(t, rule.mean(itl(.5)), .5*base.mean(itl(.5)))
		assert.LessOrEqual(t, rule.mean(ttft(.99)), 650.0)
		assert.LessOrEqual(t, rule.mean(tpot(.99)), 68.0)
	})
	t.Run("30 per s, prompt steps", func(t *testing.T) {
		c := promptSteps(equals(30, 8))
		_, rule := c.play(t, path.Base(t.Name()))
		assert.LessOrEqual(t, rule.mean(ttft(.99)), 650.0)
		assert.LessOrEqual(t, rule.mean(tpot(.99)), 90.0)
	})
	t.Run("42 per s", func(t *testing.T) {
		c := equals(42, 8)
		_, rule := c.play(t, path.Base(t.Name()))
		assert.LessOrEqual(t, rule.mean(ttft(.99)), 700.0)
		assert.LessOrEqual(t, rule.mean(tpot(.99)), 97.0)
		assert.GreaterOrEqual(t, rule.mean(good(100*time.Millisecond)), 98.0)
	})
	t.Run("42 per s, prompt steps", func(t *testing.T) { // the most that such engines can do
		c := promptSteps(equals(42, 8))
		base, rule := c.play(t, path.Base(t.Name()))
		assert.LessOrEqual(t, rule.mean(ttft(.99)), .25*base.mean(ttft(.99)))
		assert.GreaterOrEqual(t, rule.mean(perSecond), .95*base.mean(perSecond))
	})
	t.Run("20 per s", func(t *testing.T) {
		c := equals(20, 8)
		base, rule := c.play(t, path.Base(t.Name()))
		assert.GreaterOrEqual(t, rule.mean(good(50*time.Millisecond)), 99.0)
		assert.Less(t, base.mean(good(50*time.Millisecond)), 50.0)
	})
	t.Run("5 per s", func(t *testing.T) {
		c := equals(5, 8)
		_, rule := c.play(t, path.Base(t.Name()))
		assert.LessOrEqual(t, rule.mean(ttft(.5)), 350.0)
	})
	t.Run("16 ranks, 60 per s", func(t *testing.T) {
		c := equals(60, 16)
		c.seeds = 1
		_, rule := c.play(t, path.Base(t.Name()))
		assert.LessOrEqual(t, rule.mean(step), 62.0)
		assert.GreaterOrEqual(t, rule.mean(prefill), 14.4)
	})
}

// LG5: A saturated group has more output, and no request waits much longer than first come first served:
// prompts that cost the same share steps, of all ranks, and decodes follow each cohort.
func TestGroupSaturated(t *testing.T) {
	skipShort(t)
	t.Parallel()
	type row struct {
		groupCase
		least float64 // % of output more
	}
	rows := map[string]row{
		"equal prompts": {saturated(8, 128, 60, 120, simulate.Equal(200, true)), 40},
		"equal prompts, prompt steps": {
			promptSteps(saturated(8, 128, 60, 120, simulate.Equal(200, true))), 35,
		},
		"mixed lengths":               {saturated(8, 128, 150, 350, simulate.Mixed), 100},
		"mixed lengths, prompt steps": {promptSteps(saturated(8, 128, 150, 350, simulate.Mixed)), 100},
		"conversations":               {saturated(16, 64, 400, 1000, simulate.Chat), 75},
	}
	if accepting() {
		rows["conversations, prompt steps"] = row{promptSteps(rows["conversations"].groupCase), 75}
	}
	for name, c := range rows {
		t.Run(name, func(t *testing.T) {
			base, rule := c.play(t, name)
			assert.GreaterOrEqual(t, gain(base, rule, perSecond), c.least)
			assert.LessOrEqual(t, rule.most(longWait), 1.25*base.most(longWait))
			assert.LessOrEqual(t, rule.most(skips), 512.0)
		})
	}
}

// LG6: A decode pool is levelled, saturated and below.
func TestGroupOfADecodePool(t *testing.T) {
	skipShort(t)
	t.Parallel()
	decode := func(c groupCase) groupCase {
		c.cfg.Decode, c.rule = true, routing.GroupRule.OfDecodePool
		return c
	}
	t.Run("saturated", func(t *testing.T) {
		c := decode(saturated(16, 64, 30, 60, simulate.Chat))
		c.seeds = 2
		base, rule := c.play(t, "decode pool, saturated")
		assert.GreaterOrEqual(t, gain(base, rule, perSecond), 6.0)
		assert.GreaterOrEqual(t, rule.mean(balance), .965)
		assert.LessOrEqual(t, rule.most(longWait), 1.3*base.most(longWait))
		assert.LessOrEqual(t, rule.most(skips), 256.0)
	})
	t.Run("saturated, with memory for all", func(t *testing.T) {
		c := decode(saturated(16, 64, 30, 60, simulate.Chat))
		c.seeds, c.cfg.Engine.Blocks = 2, 2*c.cfg.Engine.Blocks
		base, rule := c.play(t, "decode pool, much memory")
		assert.GreaterOrEqual(t, gain(base, rule, perSecond), 6.0)
		assert.GreaterOrEqual(t, rule.mean(balance), .965)
	})
	t.Run("44 per s", func(t *testing.T) {
		c := decode(equals(44, 16))
		c.seeds, c.cfg.Slots, c.cfg.From, c.cfg.Until = 2, 64, 40*time.Second, 80*time.Second
		c.work = func(seed uint64) []simulate.Request {
			return simulate.Lengths(85*44, 44, seed, simulate.Chat)
		}
		base, rule := c.play(t, "decode pool, 44 per s")
		assert.LessOrEqual(t, rule.mean(step), .94*base.mean(step))
	})
}

// LG7: A pool that only computes prompts matches them from a window of 256.
func TestGroupOfAPrefillPool(t *testing.T) {
	skipShort(t)
	t.Parallel()
	c := saturated(16, 64, 200, 1000, func(rnd *rand.Rand) (prompt, output int) {
		prompt, _ = simulate.Chat(rnd)
		return prompt, 1
	})
	c.seeds, c.cfg.Waiting, c.rule = 3, 256, routing.GroupRule.OfPrefillPool
	base, rule := c.play(t, "prefill pool")
	assert.GreaterOrEqual(t, gain(base, rule, perSecond), 30.0)
	assert.LessOrEqual(t, rule.most(longWait), 1.25*base.most(longWait))
	assert.LessOrEqual(t, rule.most(skips), 512.0)
}

// LG8: Four ingresses over two nodes give what one gives, where the default falls over.
func TestGroupBehindSeveralIngresses(t *testing.T) {
	skipShort(t)
	t.Parallel()
	for name, rate := range map[string]float64{"30 per s": 30, "42 per s": 42} {
		t.Run(name, func(t *testing.T) {
			c := equals(rate, 8)
			c.seeds = 1
			_, one := c.play(t, name+", one ingress")
			c.cfg.Ingresses, c.cfg.Handover, c.cfg.Notice = 4, 2*time.Millisecond, 5*time.Millisecond
			c.cfg.Dispatch[1] += 2 * time.Millisecond
			base, four := c.play(t, name+", four")
			assert.InDelta(t, 0, gain(one, four, step), 5)
			assert.InDelta(t, 0, gain(one, four, perSecond), 5)
			assert.GreaterOrEqual(t, four.mean(good(100*time.Millisecond)), 98.0)
			assert.Less(t, base.mean(good(100*time.Millisecond)), 50.0)
		})
	}
}

// LG8: a run of the group simulation repeats exactly.
func TestGroupRunsRepeat(t *testing.T) {
	c := equals(30, 8)
	c.seeds, c.cfg.Ingresses, c.cfg.Until = 1, 2, 25*time.Second
	base, rule := c.play(t, "once")
	again, ruledAgain := c.play(t, "again")
	assert.Equal(t, base, again)
	assert.Equal(t, rule, ruledAgain)
}

// LG9: Where nothing is to be gained the rule does no harm.
func TestGroupWithNothingToGain(t *testing.T) {
	skipShort(t)
	t.Parallel()
	few := func(rate float64, ranks, slots, from, until int, next func(*rand.Rand) (int, int)) groupCase {
		c := saturated(ranks, slots, from, until, next)
		c.cfg.Waiting, c.seeds = 0, 3
		c.work = func(seed uint64) []simulate.Request {
			return simulate.Lengths(int(rate*float64(until+5)), rate, seed, next)
		}
		return c
	}
	t.Run("mixed lengths, 4.4 per s", func(t *testing.T) {
		c := few(4.4, 8, 128, 60, 400, simulate.Mixed)
		base, rule := c.play(t, path.Base(t.Name()))
		most := good(100 * time.Millisecond)
		assert.GreaterOrEqual(t, rule.mean(most), base.mean(most)+5)
		assert.LessOrEqual(t, rule.mean(ttft(.99)), 1.12*base.mean(ttft(.99)))
	})
	t.Run("conversations, 0.78 per s", func(t *testing.T) {
		c := few(.78, 16, 64, 200, 1000, simulate.Chat)
		base, rule := c.play(t, path.Base(t.Name()))
		assert.LessOrEqual(t, rule.mean(ttft(.5)), 1.01*base.mean(ttft(.5)))
	})
}
