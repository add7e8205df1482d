package inprocess

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/harness"
)

// KV8: four ranks, ports base + rank, a store on rank 2 only.
func TestKV8EventsBelongToTheirRank(t *testing.T) {
	t.Parallel()
	for _, coupling := range []string{"independent", "lockstep"} {
		t.Run(coupling, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newKVRig(t)
				r.Deploy(simApp("a", 4, coupling, "sim_step_ms: 5", kvLocality))
				r.WaitStatus("a", "RUNNING")
				r.Until("four streams of events", func() error {
					for i := range 4 {
						if kv := r.Rank("a", 0, i).KV; kv == nil || kv.Events == nil ||
							kv.Events.State != client.EventsLive {
							return fmt.Errorf("rank %d: %+v", i, kv)
						}
					}
					return nil
				})
				ids := kvDoc(1, 40*blockTokens)
				r.must(kvAsk{app: "a", rank: "0/2", ids: ids})
				v := r.settled("a")
				time.Sleep(3 * time.Second) // the rank's own record of it is over
				x := r.explain("a", ids)
				assert.Equal(t, []int{0, 0, 39 * blockTokens, 0}, kvHits(&x),
					"the last token is always computed: 39 whole blocks")
				assert.Equal(t, "0/2", x.Pick)
				out := r.must(kvAsk{app: "a", ids: ids})
				assert.Equal(t, "0/2", out.rank)
				assert.Equal(t, 39*blockTokens, out.cached, "what the Router expected")
				r.idle()
				t.Logf("KV8 %s: index %v, hits %v, engine reported %d cached", coupling, v.sizes(),
					kvHits(&x), out.cached)
			})
		})
	}
}

// KV5, RP51: one rank of four clears its cache, by an event; then another by going to sleep, without any.
func TestKV5ClearedAndAsleep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newKVRig(t)
		yaml := strings.Replace(simApp("a", 4, "independent", "", kvLocality),
			"engine: {kind: sim, args: {}}", kvDevMode, 1)
		r.Deploy(yaml)
		r.WaitStatus("a", "RUNNING")
		for i := range 4 {
			r.must(kvAsk{app: "a", rank: fmt.Sprintf("0/%d", i), ids: kvDoc(1, 20*blockTokens)})
		}
		before := r.settled("a")
		time.Sleep(3 * time.Second)

		r.engine(http.MethodPost, r.Rank("a", 0, 2).URL+"/reset_prefix_cache", "")
		// the event stands in front of this one's
		r.must(kvAsk{app: "a", rank: "0/2", ids: kvDoc(2, 5*blockTokens)})
		time.Sleep(3 * time.Second)
		after := r.settled("a")
		x := r.explain("a", kvDoc(1, 20*blockTokens))
		assert.Equal(t, []int{19 * blockTokens, 19 * blockTokens, 0, 19 * blockTokens}, kvHits(&x))
		for _, i := range []int{0, 1, 3} {
			key := fmt.Sprintf("0/%d gpu", i)
			assert.Equal(t, before[key], after[key], "rank %d is untouched", i)
		}

		asleep := r.Rank("a", 0, 1)
		began := time.Now()
		r.engine(http.MethodPost, asleep.URL+"/_sim/fail", `{"mode":"kv-sleep"}`)
		took := soon(t, 10*time.Second, "sleep is noticed", func() error {
			x := r.explain("a", kvDoc(1, 20*blockTokens))
			if got := kvHits(&x); got[1] != 0 || got[0] == 0 || got[3] == 0 {
				return fmt.Errorf("hits %v", got)
			}
			return nil
		})
		assert.Less(t, time.Since(began), 10*time.Second)
		now := r.Rank("a", 0, 1)
		assert.Equal(t, asleep.Epoch, now.Epoch)
		assert.Equal(t, "asleep", now.Away)
		for range 8 {
			assert.NotEqual(t, "0/1", r.must(kvAsk{app: "a", ids: kvDoc(3, blockTokens)}).rank)
		}
		r.engine(http.MethodPost, asleep.URL+"/_sim/recover", `{"mode":"kv-sleep"}`)
		soon(t, 10*time.Second, "it is awake", func() error {
			if why := r.Rank("a", 0, 1).Away; why != "" {
				return errors.New(why)
			}
			return nil
		})
		r.must(kvAsk{app: "a", rank: "0/1", ids: kvDoc(3, blockTokens)})
		r.idle()
		t.Logf("KV5: hits after AllBlocksCleared on rank 2 %v; sleep of rank 1 noticed after %s", kvHits(&x),
			took)
	})
}

// KV4, an engine that dpserve started: killed and started again, its events begin anew.
func TestKV4RestartOfALaunchedEngine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newKVRig(t)
		r.Expect(harness.EngineFails)
		r.Deploy(simApp("a", 4, "independent", "sim_step_ms: 5", kvLocality))
		st := r.WaitStatus("a", "RUNNING")
		r.spread("a", 4, 0, 40, 10*blockTokens)
		before := r.settled("a")
		old := r.Rank("a", 0, 1)
		require.True(t, r.Kill("a", 0, 1))
		took := soon(t, time.Second, "its blocks are gone", func() error {
			if n := len(r.dump("a")["0/1 gpu"]); n != 0 {
				return fmt.Errorf("%d blocks of the rank", n)
			}
			return nil
		})
		r.WaitUnit("a/0/1", "ready", 2)
		now := r.Rank("a", 0, 1)
		assert.Equal(t, old.Epoch+1, now.Epoch)
		assert.NotEqual(t, old.Incarnation, now.Incarnation)
		after := r.settled("a")
		for _, i := range []int{0, 2, 3} {
			key := fmt.Sprintf("0/%d gpu", i)
			assert.Equal(t, before[key], after[key])
			assert.Equal(t, st.Units[i].Ranks[0].Incarnation, r.Rank("a", 0, i).Incarnation)
		}
		r.must(kvAsk{app: "a", rank: "0/1", ids: kvDoc(500, 10*blockTokens)})
		assert.Len(t, r.settled("a")["0/1 gpu"], len(after["0/1 gpu"])+10,
			"events of the new incarnation count")
		r.idle()
		t.Logf("KV4 launched: %v; rank 1 empty after %s, epoch %d to %d", before.sizes(), took, old.Epoch,
			now.Epoch)
	})
}

// KV4, engines that somebody else restarts in their place: numbers from 0, and no replay to ask.
func TestKV4RestartOfAnAttachedEngine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newKVRig(t)
		r.Expect(harness.EngineReplaced)
		var ranks []string
		for i := range 3 {
			r.byHand(handFlags(i, "a", false, "--sim-step-ms", "5")...)
			api, events, _ := handPorts(i)
			ranks = append(ranks, fmt.Sprintf(`{url: "http://%s", kv_events: {connect: "tcp://%s"}}`, api,
				events))
		}
		r.Deploy(attached("a", kvLocality, ranks...))
		r.WaitStatus("a", "RUNNING")
		// many batches: a restart is not seen if as many are published until the events are followed again
		r.spread("a", 3, 0, 90, 10*blockTokens)
		before := r.settled("a")
		old := []client.RankStatus{r.Rank("a", 0, 0), r.Rank("a", 0, 1), r.Rank("a", 0, 2)}
		require.NotEmpty(t, before["0/1 gpu"])

		r.engine(http.MethodPost, old[1].URL+"/_sim/fail", `{"mode":"kv-restart"}`)
		n := 900
		took := soon(t, time.Second, "its blocks are gone, and its incarnation", func() error {
			r.must(kvAsk{app: "a", rank: "0/1", ids: kvDoc(n, 4*blockTokens)})
			n++
			for hash := range r.dump("a")["0/1 gpu"] {
				if before["0/1 gpu"][hash] {
					return fmt.Errorf("%s is still there", hash)
				}
			}
			if r.Rank("a", 0, 1).Incarnation == old[1].Incarnation {
				return fmt.Errorf("the incarnation is %s", old[1].Incarnation)
			}
			return nil
		})
		now := r.Rank("a", 0, 1)
		assert.Equal(t, old[1].Epoch, now.Epoch, "whoever runs the engine keeps its epoch")
		r.must(kvAsk{app: "a", rank: "0/1", ids: kvDoc(800, 4*blockTokens)})
		r.Until("events of the new incarnation count", func() error {
			if x := r.explain("a", kvDoc(800, 4*blockTokens)); kvHits(&x)[1] != 3*blockTokens ||
				len(r.dump("a")["0/1 gpu"]) < 4 {
				return fmt.Errorf("hits %v", kvHits(&x))
			}
			return nil
		})
		after := r.dump("a").only("gpu")
		for _, i := range []int{0, 2} {
			key := fmt.Sprintf("0/%d gpu", i)
			assert.Equal(t, before[key], after[key])
			assert.Equal(t, old[i].Incarnation, r.Rank("a", 0, i).Incarnation)
		}
		r.Quiet()
		t.Logf("KV4 attached: %v before, %v after; rank 1 cleared after %s, epoch %d kept", before.sizes(),
			after.sizes(), took, now.Epoch)
	})
}
