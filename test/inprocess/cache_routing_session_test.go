package inprocess

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/harness"
)

// The sessions of RT7: turns of one conversation, each behind the whole of the ones before.
const (
	rt7Ranks    = 4
	rt7Turns    = 10
	rt7Opening  = 2000 // tokens of the first turn
	rt7Question = 200  // tokens of each further turn
	rt7Output   = 8
	rt7Think    = 100 * time.Millisecond
	rt7Token    = 47 * time.Microsecond // of prefill, by the reference law
)

// turns is how the turns of sessions went.
type turns struct {
	stayed, left   int
	prompt, cached int // tokens
	cold           int // of prompt: those of first turns, which nobody can know
}

// hitRate is cached tokens over those that an earlier turn could have left behind.
func (s *turns) hitRate() float64 { return float64(s.cached) / float64(max(1, s.prompt-s.cold)) }

func (s *turns) stay() float64 { return float64(s.stayed) / float64(max(1, s.stayed+s.left)) }

// add counts a turn whose session was at home, "" for the first one.
func (s *turns) add(a *idAnswer, home string) {
	s.prompt, s.cached = s.prompt+a.prompt, s.cached+a.cached
	switch home {
	case "":
		s.cold += a.prompt
	case a.rank:
		s.stayed++
	default:
		s.left++
	}
}

// conversations are sessions of one app, before and after one rank is overloaded. Safe for concurrent use.
type conversations struct {
	mu    sync.Mutex
	few   bool // fewer sessions run than at the load asked for: nothing is counted
	hot   bool
	calm  turns
	after turns
	away  turns // of after: sessions that were at home on the overloaded rank
}

// session is one conversation.
func (s *conversations) session(t *testing.T, c *harness.Cluster, number int, overloaded string) {
	r := rand.New(rand.NewPCG(70, uint64(number)))
	prompt, home := freshPrompt(r, rt7Opening), ""
	for range rt7Turns {
		a := idPrompt{Model: "a", Prompt: prompt, MaxTokens: rt7Output, ReturnIDs: true}.ask(t.Context(), c)
		if !assert.True(t, a.ok(), a) {
			return
		}
		s.note(a, home, overloaded)
		home = a.rank
		prompt = append(append(prompt, a.ids...), freshPrompt(r, rt7Question)...)
		time.Sleep(rt7Think)
	}
}

func (s *conversations) note(a *idAnswer, home, overloaded string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.few:
		return
	case !s.hot:
		s.calm.add(a, home)
		return
	case home == overloaded:
		s.away.add(a, home)
	}
	s.after.add(a, home)
}

// RT7: sessions of ten turns at 60 % of what the ranks can prefill: 95 % of the turns stay at home. Then one
// rank is sent twice what it can do, and the hit rate falls by no more than 5 points. When a turn should
// leave is the business of the test behind this one. The policies that go by prefill work alone are not here:
// with openings of 2000 tokens in between, the wait at home often exceeds what a turn of 2200 saves there,
// and 70 to 83 % of the turns stay.
func TestRT7TurnsStayHome(t *testing.T) {
	skipShort(t)
	sessions := 60
	if accepting() {
		sessions = 120
	}
	const work = rt7Opening + (rt7Turns-1)*rt7Question // tokens to prefill per session
	const gap, overloaded = work * rt7Token * 10 / 6 / rt7Ranks, "0/1"
	for _, routing := range []string{"{policy: sticky, preset: tuned}", "{policy: scoring}"} {
		t.Run(routing, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := harness.New(t)
				c.Deploy(simApp("a", rt7Ranks, "independent", "", "routing: "+routing))
				c.WaitStatus("a", "RUNNING")
				var s conversations
				var overload sync.WaitGroup
				r, stop := rand.New(rand.NewPCG(7, 70)), make(chan struct{})
				arrive(r, sessions, gap, func(i int) {
					if i == sessions/2 {
						s.mu.Lock()
						s.hot = true
						s.mu.Unlock()
						overload.Go(func() { overloadRank(t, c, overloaded, stop) })
					}
					s.session(t, c, i, overloaded)
				})
				close(stop)
				overload.Wait()
				assert.GreaterOrEqual(t, s.calm.stay(), 0.95, "turns at home")
				assert.GreaterOrEqual(t, s.after.hitRate(), s.calm.hitRate()-0.05)
				t.Logf("60 %% load: %.1f %% of %d turns stay, hit rate %.3f; "+
					"one home at twice its capacity: %.1f %% stay, %d of %d leave it, hit rate %.3f",
					100*s.calm.stay(), s.calm.stayed+s.calm.left, s.calm.hitRate(), 100*s.after.stay(),
					s.away.left, s.away.left+s.away.stayed, s.after.hitRate())
				c.Quiet()
			})
		})
	}
}

// overloadRank sends a rank twice the prompts that it can prefill, until stop; what waits is bounded by ten
// seconds of work.
func overloadRank(t *testing.T, c *harness.Cluster, rank string, stop <-chan struct{}) {
	const prompt, most = 2048, 100
	const gap = prompt * rt7Token / 2
	r, slots := rand.New(rand.NewPCG(7, 1)), make(chan struct{}, most)
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		select {
		case <-stop:
			return
		case <-time.After(gap):
		}
		select {
		case slots <- struct{}{}:
			ids := freshPrompt(r, prompt)
			wg.Go(func() {
				defer func() { <-slots }()
				assert.NoError(t, askOn(c, "a", rank, ids, 1))
			})
		default:
		}
	}
}

// RT7: a turn leaves its home exactly when the prompts in front of it there exceed what the home saves it.
func TestRT7TurnLeavesWhenTheWaitExceedsThePrefillItSaves(t *testing.T) {
	const block, opening = 16, 4000
	for _, queued := range []int{0, 2000, opening - 4*block, opening + 4*block, 8000} {
		t.Run(fmt.Sprintf("%d tokens in front", queued), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := harness.New(t)
				c.Deploy(simApp("a", rt7Ranks, "independent", "", "routing: {policy: lpwl}"))
				c.WaitStatus("a", "RUNNING")
				r := rand.New(rand.NewPCG(7, 2))
				prompt := freshPrompt(r, opening)
				first := askIDs(t.Context(), c, "a", prompt, 1)
				require.True(t, first.ok(), first)
				time.Sleep(time.Second) // its end, and what it left in the cache, have reached the ingress
				var home int
				_, err := fmt.Sscanf(first.rank, "0/%d", &home)
				require.NoError(t, err)
				c.Fail("a", 0, home, sim.Fault{Mode: sim.ModeHang})
				var wg sync.WaitGroup
				if queued > 0 {
					wg.Go(func() { assert.NoError(t, askOn(c, "a", first.rank, freshPrompt(r, queued), 1)) })
					synctest.Wait()
				}
				var second *idAnswer
				wg.Go(func() {
					second = askIDs(t.Context(), c, "a", append(prompt,
						freshPrompt(rand.New(rand.NewPCG(7, 3)), rt7Question)...), 1)
				})
				synctest.Wait()
				c.Recover("a", 0, home)
				wg.Wait()
				require.True(t, second.ok(), second)
				assert.Equal(t, queued <= opening, second.rank == first.rank)
				t.Logf("%d tokens in front of %d that are cached: home %v", queued, opening,
					second.rank == first.rank)
				c.Quiet()
			})
		})
	}
}

// leaving is a turn's decision as the Router explains it in front of it.
type leaving struct {
	pick   string
	leaves bool // by the rule: home's score, wait and prefill, is above the lowest of the others
	even   bool // both scores are the same
}

// explainTurn asks where a turn would go, and decides by the terms whether the wait at home exceeds the
// prefill that it saves.
func explainTurn(t *testing.T, c *harness.Cluster, prompt []uint32, home string) (out leaving) {
	body, err := json.Marshal(map[string]any{"token_ids": prompt})
	require.NoError(t, err)
	code, text := c.Do(http.MethodPost, "/api/v1/routers/a/explain", string(body))
	require.Equal(t, http.StatusOK, code, text)
	var x client.Explanation
	require.NoError(t, json.Unmarshal([]byte(text), &x))
	wait, prefill := map[string]float64{}, map[string]float64{}
	for _, r := range x.Ranks {
		require.NotEmpty(t, r.Terms, r.Why)
		wait[r.Worker] = r.Terms[0].Value
		for _, term := range r.Terms[1:] { // its own, and what it costs those behind it
			prefill[r.Worker] += term.Value
		}
	}
	out.pick = x.Pick
	for other := range wait {
		longer, saved := wait[home]-wait[other], prefill[other]-prefill[home]
		out.leaves = out.leaves || other != home && longer > saved
		out.even = out.even || other != home && math.Abs(longer-saved) < 1e-6
	}
	return out
}

// unknown takes tokens of a later turn that no earlier one has left behind off what could have been cached.
func (s *conversations) unknown(tokens int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.few:
	case s.hot:
		s.after.cold += tokens
	default:
		s.calm.cold += tokens
	}
}

// ruleCheck counts the decisions that were compared with the rule.
type ruleCheck struct{ all, left, wrong int }

// talk plays a session whose turns each add half an opening. While a rank is overloaded, it compares the
// Router's decisions with the rule.
func (s *conversations) talk(
	t *testing.T, c *harness.Cluster, r *rand.Rand, overloaded string, j *ruleCheck,
) {
	const opening, more = 1000, 500
	prompt, home, known := freshPrompt(r, opening), "", 0
	for range rt7Turns {
		s.mu.Lock()
		judge := s.hot && home != ""
		s.mu.Unlock()
		var rule leaving
		if judge {
			rule = explainTurn(t, c, prompt, home)
		}
		a := idPrompt{Model: "a", Prompt: prompt, MaxTokens: rt7Output, ReturnIDs: true}.ask(t.Context(), c)
		if !assert.True(t, a.ok(), a) {
			return
		}
		s.note(a, home, overloaded)
		if known > 0 {
			s.unknown(a.prompt - known)
		}
		if judge && !rule.even {
			s.mu.Lock()
			j.all++
			if rule.leaves {
				j.left++
			}
			if rule.leaves != (a.rank != home) {
				j.wrong++
			}
			s.mu.Unlock()
		}
		home, prompt = a.rank, append(prompt, a.ids...)
		known, prompt = len(prompt), append(prompt, freshPrompt(r, more)...)
		time.Sleep(time.Second + time.Duration(r.Int64N(int64(2*time.Second))))
	}
}

// RT7, all of it, by predicted time to first token: a conversation of 1000 tokens and 500 more with every
// turn, seconds apart. The prefill that a turn saves is its own and, by eta, that of those behind it. What is
// counted begins after 20 s at this load: eta is measured over periods of 5 s, and until it is known fewer
// turns stay (94 to 96 % were seen within 10 s).
func TestRT7ConversationsStayUnlessTheWaitExceedsThePrefillTheySave(t *testing.T) {
	if os.Getenv("DPSERVE_ACCEPTANCE") == "" {
		t.Skip("an acceptance run: 6000 requests for each seed")
	}
	// of 20 s each, a third of which are as many as run at once
	const sessions, work, overloaded = 600, 1000 + (rt7Turns-1)*500, "0/1"
	const gap = work * rt7Token * 10 / 6 / rt7Ranks
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed ", seed+1), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := harness.New(t)
				c.Deploy(simApp("a", rt7Ranks, "independent", "",
					"routing: {policy: min-ttft, params: {eta: true}}"))
				c.WaitStatus("a", "RUNNING")
				s := conversations{few: true}
				var j ruleCheck
				var overload sync.WaitGroup
				r, stop := rand.New(rand.NewPCG(seed+1, 70)), make(chan struct{})
				arrive(r, sessions, gap, func(i int) {
					s.mu.Lock()
					s.few, s.hot = s.few && i < sessions/3, s.hot || i == 2*sessions/3
					s.mu.Unlock()
					if i == 2*sessions/3 {
						overload.Go(func() { overloadRank(t, c, overloaded, stop) })
					}
					s.talk(t, c, rand.New(rand.NewPCG(seed+1, uint64(1000+i))), overloaded, &j)
				})
				close(stop)
				overload.Wait()
				assert.GreaterOrEqual(t, s.calm.stay(), 0.95, "turns at home")
				assert.GreaterOrEqual(t, s.after.hitRate(), s.calm.hitRate()-0.05)
				assert.Zero(t, j.wrong, "decisions against the rule, of %d", j.all)
				assert.Positive(t, j.left)
				t.Logf("60 %% load: %.1f %% of %d turns stay, %.3f of what they left is cached; "+
					"one home at twice its capacity: %.1f %% stay, %d of %d leave it, %.3f cached; rule: %+v",
					100*s.calm.stay(), s.calm.stayed+s.calm.left, s.calm.hitRate(), 100*s.after.stay(),
					s.away.left, s.away.left+s.away.stayed, s.after.hitRate(), j)
				c.Quiet()
			})
		})
	}
}
