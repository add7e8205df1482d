package inprocess

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
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

// share counts prompt tokens and those of them that engines found in their caches.
type share struct {
	mu             sync.Mutex
	prompt, cached int
}

func (s *share) add(a *kvAnswer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.prompt, s.cached = s.prompt+a.prompt, s.cached+a.cached
}

func (s *share) rate() float64 { return float64(s.cached) / float64(max(1, s.prompt)) }

// converse plays conversations of several turns, some at a time. The prompt of a turn is everything said
// before and new text. It returns the share of prompt tokens that engines found in their caches.
func (r *kvRig) converse(app string, first, sessions, turns int, think time.Duration) *share {
	out := &share{}
	var wg sync.WaitGroup
	for k := range sessions {
		wg.Go(func() {
			time.Sleep(time.Duration(k) * 150 * time.Millisecond)
			said := kvDoc(first+k, 12*blockTokens)
			for turn := range turns {
				a := r.complete(kvAsk{app: app, ids: said, tokens: 100})
				if assert.Equal(r.t, http.StatusOK, a.status, a.code) {
					out.add(&a)
				}
				said = slices.Concat(said, a.ids, kvDoc(10_000+first+k*100+turn, 3*blockTokens))
				time.Sleep(think)
			}
		})
	}
	wg.Wait()
	return out
}

// KV10: no events come under traffic. Status and metrics show it, and routing goes by the ranks' own record.
func TestKV10SilentEvents(t *testing.T) {
	if testing.Short() {
		t.Skip("tens of thousands of batches")
	}
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newKVRig(t, harness.Slots(16))
		r.Expect(harness.Fault{{
			Msg: "no kv event comes though requests complete.*", With: `"app":"mute"`,
			Why: "what the test looks for",
		}})
		args := "sim_step_ms: 10, num_gpu_blocks_override: 4096"
		r.Deploy(simApp("live", 4, "independent", args, kvLocality) + simApp("mute", 4, "independent", args,
			kvLocality)[len("applications:\n"):])
		r.WaitStatus("live", "RUNNING")
		r.WaitStatus("mute", "RUNNING")
		for i := range 4 {
			r.Fail("mute", 0, i, sim.Fault{Mode: sim.ModeKVDrop})
			r.Fail("mute", 0, i, sim.Fault{Mode: sim.ModeKVNoReplay})
		}
		began := time.Now()
		var firstSilent time.Duration
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := range 40 {
				r.spread("mute", 4, 100+4*i, 4, 20*blockTokens)
				time.Sleep(time.Second)
			}
		})
		r.Until("a rank is called silent", func() error {
			if kv := r.Rank("mute", 0, 0).KV; kv == nil || kv.Events.State != client.EventsSilent {
				return fmt.Errorf("%+v", kv)
			}
			return nil
		})
		firstSilent = time.Since(began)
		wg.Wait()
		metrics := r.metrics("dpserve_kv_silent")
		for i := range 4 {
			kv := r.Rank("mute", 0, i).KV
			require.NotNil(t, kv.Events)
			assert.Equal(t, client.EventsSilent, kv.Events.State)
			assert.GreaterOrEqual(t, kv.Events.SilentFor, 30.0)
			assert.Contains(t, kv.Note, "no kv event for")
			assert.Equal(t, client.EventsLive, r.Rank("live", 0, i).KV.Events.State)
			assert.Equal(t, "1", metrics[fmt.Sprintf(`app="mute",group="0",rank="%d"`, i)], metrics)
			assert.Equal(t, "0", metrics[fmt.Sprintf(`app="live",group="0",rank="%d"`, i)], metrics)
		}
		assert.Len(t, r.Journal.Find(`"level":"WARN"`, "no kv event comes"), 4, "one line per rank")

		var with, without *share
		wg.Go(func() { with = r.converse("live", 5000, 16, 7, 3*time.Second) })
		wg.Go(func() { without = r.converse("mute", 5000, 16, 7, 3*time.Second) })
		wg.Wait()
		assert.Greater(t, with.rate(), 0.5, "the conversations repeat themselves")
		assert.GreaterOrEqual(t, without.rate(), 0.9*with.rate())
		r.idle()
		t.Logf("KV10: silent after %s; hit rate with events %.4f, without %.4f: %.1f%% of it",
			firstSilent.Round(time.Millisecond),
			with.rate(), without.rate(), 100*without.rate()/with.rate())
	})
}

// metrics are the values of a metric of the node by its labels.
func (r *kvRig) metrics(name string) map[string]string {
	r.t.Helper()
	code, text := r.Do(http.MethodGet, "/metrics", "")
	require.Equal(r.t, http.StatusOK, code)
	out := map[string]string{}
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name+"{"); ok {
			labels, value, _ := strings.Cut(rest, "} ")
			out[labels] = strings.TrimSpace(value)
		}
	}
	return out
}

// KV9: the engine uses another block size than the file asks for, and goes on reporting the file's.
func TestKV9BlockSizeOfTheEngine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const real = 768
		r := newKVRig(t)
		r.Deploy(simApp("a", 2, "independent",
			fmt.Sprintf("sim_step_ms: 10, block_size: 16, sim_settle_block_size: %d", real), kvLocality))
		r.WaitStatus("a", "RUNNING")
		ids := kvDoc(1, 6*real+100)
		r.must(kvAsk{app: "a", rank: "0/1", ids: ids})
		r.settled("a")
		time.Sleep(3 * time.Second) // what it was sent is over: from here on events alone count
		x := r.explain("a", ids)
		assert.Equal(t, real, x.BlockSize, "learned")
		assert.Equal(t, []int{0, 6 * real}, kvHits(&x))
		out := r.must(kvAsk{app: "a", ids: ids})
		assert.Equal(t, "0/1", out.rank)
		assert.Equal(t, 6*real, out.cached, "predicted is reported")
		kv := r.Rank("a", 0, 1).KV
		r.Until("status names both sizes", func() error {
			if kv = r.Rank("a", 0, 1).KV; !strings.Contains(kv.Note, "768") ||
				!strings.Contains(kv.Note, "16") {
				return fmt.Errorf("%+v", kv)
			}
			return nil
		})
		assert.Equal(t, real, kv.BlockSize)
		r.idle()
		t.Logf("KV9: block size %d, hits %v, cached %d; status: %s", x.BlockSize, kvHits(&x), out.cached,
			kv.Note)
	})
}

// KV16: no prefix caching in the engine; no weight for overlap; no events wanted.
func TestKV16WithoutCachesOrEvents(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newKVRig(t)
		r.Expect(harness.CachingOff)
		list := func(yaml string) string { return yaml[len("applications:\n"):] }
		r.Deploy("applications:\n" +
			list(simApp("uncached", 2, "independent", "sim_step_ms: 10, enable_prefix_caching: false",
				kvLocality)) +
			list(simApp("weightless", 2, "independent", "sim_step_ms: 10",
				"routing: {policy: kv, params: {overlap_score_weight: 0}}")) +
			list(strings.Replace(simApp("off", 2, "independent", "sim_step_ms: 10", kvLocality),
				"{kind: sim,", "{kind: sim, kv_events: off,", 1)) +
			list(simApp("usual", 1, "independent", "sim_step_ms: 10", kvLocality)))
		apps := []string{"uncached", "weightless", "off"}
		for _, app := range append(apps, "usual") {
			r.WaitStatus(app, "RUNNING")
		}
		for _, e := range r.Engines.Live() {
			told := slices.Contains(e.Argv, "--kv-events-config")
			assert.Equal(t, strings.HasPrefix(e.String(), "usual/"), told, "%s: %v", e, e.Argv)
		}
		for range 60 { // twice the time after which silence would be told
			for _, app := range apps {
				r.must(kvAsk{app: app, ids: kvDoc(3, 10*blockTokens), tokens: 20})
			}
			time.Sleep(time.Second)
		}
		x := r.explain("uncached", kvDoc(3, 10*blockTokens))
		assert.Equal(t, "prefix_caching_off", x.Reason, "the load profile")
		for _, k := range x.Ranks {
			require.Len(t, k.Terms, 2)
			assert.InDelta(t, 0.10, k.Terms[0].Weight, 1e-9)
			assert.InDelta(t, 0.90, k.Terms[1].Weight, 1e-9)
		}
		said := r.Journal.Find(`"app":"uncached"`, "without prefix caching")
		assert.Len(t, said, 1, "it says so once")
		weightless, _ := r.App("weightless")
		assert.Nil(t, weightless.Index, "nothing asks an index")
		x = r.explain("off", kvDoc(3, 10*blockTokens))
		assert.Contains(t, kvHits(&x), 9*blockTokens, "the record of what was sent carries on")
		for _, app := range apps {
			st, _ := r.App(app)
			for _, u := range st.Units {
				if kv := u.Ranks[0].KV; kv != nil {
					assert.Nil(t, kv.Events, "%s", app)
				}
			}
		}
		assert.Empty(t, r.Journal.Find("no kv event"))
		assert.NotContains(t, fmt.Sprint(r.metrics("dpserve_kv_silent")), ":1")
		r.idle()
		t.Logf("KV16: uncached decides by the load profile, says so %d time(s); weightless index %v; "+
			"off: hits %v without events", len(said), weightless.Index, kvHits(&x))
	})
}
