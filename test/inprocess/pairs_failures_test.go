package inprocess

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/pairengine"
)

// pairTransfers are those whose engines take requests without a partner.
func pairTransfers() []string { return []string{"nixl", "nixl-push", "mooncake"} }

// PD1: every prefill engine refuses with 400, fails with 500, or breaks the connection.
func TestPD1PrefillFails(t *testing.T) {
	for _, transfer := range append(pairTransfers(), "sglang") {
		bubble(t, transfer+" 400", func(t *testing.T) {
			r := newPairRig(t, transfer, 2, 2, "decide: always")
			r.Expect(harness.RequestRefused)
			for _, p := range r.prefill {
				p.Do(func(l *pairengine.Leg) bool { return l.Fail(http.StatusBadRequest) })
			}
			a := r.ask(pairBody("a 400", 8))
			assert.Equal(t, http.StatusBadRequest, a.Status, "%v", a)
			assert.LessOrEqual(t, a.Total, 100*time.Millisecond)
			assert.Len(t, r.engines.Legs(pairengine.Prefill), 1, "nobody else is asked")
			r.rest()
			for _, l := range r.engines.Legs(pairengine.Decode) {
				cancelled(t, &l, l.Began)
			}
		})
	}
	for _, transfer := range pairTransfers() {
		for name, isReset := range map[string]bool{"500": false, "reset": true} {
			for _, fallback := range []string{"local", "fail"} {
				bubble(t, transfer+" "+name+" "+fallback, func(t *testing.T) {
					prefillBreaks(t, transfer, fallback, isReset)
				})
			}
		}
	}
	bubble(t, "two resets", func(t *testing.T) { twoPrefillsDie(t) })
}

// breakPrefills has all prefill engines answer 500; if isReset, the first one that is asked breaks the
// connection instead, each time.
func (r *pairRig) breakPrefills(isReset bool) {
	var broken atomic.Pointer[pairengine.Engine]
	for _, p := range r.prefill {
		p.Do(func(l *pairengine.Leg) bool {
			broken.CompareAndSwap(nil, l.At)
			if isReset && broken.Load() == l.At {
				return l.Reset()
			}
			return l.Fail(http.StatusInternalServerError)
		})
	}
}

// twoPrefillsDie: a request whose connections to two engines broke may kill engines, as without pools. It is
// not sent to a third one.
func twoPrefillsDie(t *testing.T) {
	t.Helper()
	r := newPairRig(t, "nixl", 3, 2, "decide: always")
	r.Expect(harness.PairsFail, harness.RequestRefused)
	for _, p := range r.prefill {
		p.Do((*pairengine.Leg).Reset)
	}
	a := r.ask(pairBody("a killer", 8))
	assert.Equal(t, http.StatusBadGateway, a.Status, "%v", a)
	assert.Len(t, distinct(engineNames(r.engines.Legs(pairengine.Prefill))), 2)
	assert.Empty(t, r.engines.Legs(pairengine.Plain))
	r.rest()
}

// distinct are the names of a list, each once.
func distinct(names []string) []string {
	slices.Sort(names)
	return slices.Compact(names)
}

// prefillBreaks: one other prefill rank is asked, then the decode rank computes the prompt, or the client
// hears that nobody does.
func prefillBreaks(t *testing.T, transfer, fallback string, isReset bool) {
	t.Helper()
	r := newPairRig(t, transfer, 3, 2, "decide: always, fallback: "+fallback)
	r.Expect(harness.PairsFail, harness.RequestRefused)
	r.breakPrefills(isReset)
	a := r.ask(pairBody("nobody to prefill", 8))
	if fallback == "local" {
		r.right(a)
		assert.Equal(t, "fallback", a.Way)
		assert.Empty(t, a.Prefill, "no prefill rank has computed it")
		assert.Len(t, r.engines.Legs(pairengine.Plain), 1)
		assert.InDelta(t, 1, r.total("dpserve_pd_requests_total", `way="fallback"`, `outcome="ok"`), 0)
	} else {
		assert.Equal(t, http.StatusServiceUnavailable, a.Status, "%v", a)
		assert.Empty(t, r.engines.Legs(pairengine.Plain))
	}
	assert.LessOrEqual(t, a.Total, time.Second)
	prefills := engineNames(r.engines.Legs(pairengine.Prefill))
	assert.Len(t, distinct(prefills), 2, "one other prefill rank: %v", prefills)
	r.rest()
	for _, l := range r.engines.Legs(pairengine.Decode) { // of attempts whose prefill failed
		cancelled(t, &l, l.Began)
	}
	for _, p := range r.prefill {
		p.Do(nil)
	}
	a = r.ask(pairBody("a prefill rank again", 8))
	r.right(a)
	assert.Equal(t, "remote", a.Way)
	r.rest()
}

// PD2, RP24: the decode engine refuses, fails or stalls when the prompt is computed. The prefill leg, if it
// runs, is cancelled; the prompt is computed again, and another decode leg answers, long before a lease ends.
func TestPD2DecodeFails(t *testing.T) {
	for _, transfer := range append(pairTransfers(), "sglang") {
		for name, fail := range map[string]func(l *pairengine.Leg) bool{
			"500":         func(l *pairengine.Leg) bool { return l.Fail(http.StatusInternalServerError) },
			"error event": (*pairengine.Leg).FailStream,
			"reset":       (*pairengine.Leg).Reset,
			"stall":       (*pairengine.Leg).Stall,
		} {
			bubble(t, transfer+" "+name, func(t *testing.T) {
				decodeFailsOnce(t, transfer, 2, name == "reset" && transfer != "nixl", fail)
			})
		}
		bubble(t, transfer+" always", func(t *testing.T) { decodeFailsAlways(t, transfer) })
		bubble(t, transfer+" one decode rank", func(t *testing.T) {
			decodeFailsOnce(t, transfer, 1, false, func(l *pairengine.Leg) bool {
				return l.Fail(http.StatusInternalServerError)
			})
		})
	}
}

// decodeFailsOnce: mayKill says that both engines may die of the request. The prefill leg is heard for a
// second more then.
func decodeFailsOnce(t *testing.T, transfer string, ranks int, mayKill bool,
	fail func(l *pairengine.Leg) bool,
) {
	t.Helper()
	r := newPairRig(t, transfer, 2, ranks, "decide: always", "timeouts: {first_token_s: 5}")
	r.Expect(harness.PairsFail)
	var decodes, prefills atomic.Int32
	var failedAt atomic.Pointer[time.Time]
	never := make(chan struct{})
	for _, d := range r.decode {
		d.Do(func(l *pairengine.Leg) bool {
			if decodes.Add(1) > 1 {
				return false
			}
			time.Sleep(100 * time.Millisecond) // the prefill leg is under way
			defer func() { now := time.Now(); failedAt.Store(&now) }()
			return fail(l)
		})
	}
	if transfer != "nixl" {
		for _, p := range r.prefill { // its leg is under way when the decode leg fails
			p.Do(func(l *pairengine.Leg) bool { return prefills.Add(1) == 1 && l.StallUntil(never) })
		}
	}
	a := r.ask(pairBody("a second chance", 8))
	r.right(a)
	assert.Equal(t, "remote", a.Way, "%v", a)
	assert.Less(t, a.Total, 25*time.Second)
	r.rest() // a leg that was cancelled may end just after the answer
	legs, cancelledBy := r.engines.Legs(pairengine.Prefill), *failedAt.Load()
	if mayKill {
		cancelledBy = cancelledBy.Add(time.Second)
	}
	require.Len(t, legs, 2, "parameters are used once: the prompt is computed again")
	asked := engineNames(r.engines.Legs(pairengine.Decode))
	require.Len(t, asked, 2)
	assert.Len(t, distinct(asked), ranks, "another decode rank if there is one")
	if transfer != "nixl" {
		cancelled(t, &legs[0], cancelledBy)
	}
	assert.Zero(t, r.total("dpserve_pd_requests_total", `outcome="failed"`))
}

// decodeFailsAlways: a bounded number of legs, then a typed error.
func decodeFailsAlways(t *testing.T, transfer string) {
	t.Helper()
	r := newPairRig(t, transfer, 2, 2, "decide: always", "timeouts: {first_token_s: 5}")
	r.Expect(harness.PairsFail, harness.RequestRefused)
	for _, d := range r.decode {
		d.Do(func(l *pairengine.Leg) bool { return l.Fail(http.StatusInternalServerError) })
	}
	a := r.ask(pairBody("no decode rank at all", 8))
	assert.GreaterOrEqual(t, a.Status, 500)
	assert.Contains(t, []string{"500", "upstream_failed", "no_ready_rank", "overloaded"}, a.Error, "%v", a)
	assert.LessOrEqual(t, a.Total, time.Second)
	assert.LessOrEqual(t, len(r.engines.Legs(pairengine.Prefill)), 2)
	assert.LessOrEqual(t, len(r.engines.Legs(pairengine.Decode))+len(r.engines.Legs(pairengine.Plain)), 5)
	r.rest()
	for _, l := range r.engines.Legs(pairengine.Prefill) {
		assert.LessOrEqual(t, l.Ended.Sub(l.Began), time.Second)
	}
}

// PD2: the decode engine's process is gone when the prompt is computed. Another decode rank answers.
func TestPD2DecodeIsGone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newPairRig(t, "nixl", 1, 3, "decide: always")
		r.Expect(harness.PairsFail)
		stop := r.decode[0]
		r.prefill[0].Do(func(*pairengine.Leg) bool {
			stop.Stop()
			return false
		})
		for i := range 6 { // some of them are for the rank that is gone
			a := r.ask(pairBody(fmt.Sprintf("guest %d", i), 8))
			r.right(a)
			assert.Equal(t, "remote", a.Way, "%v", a)
		}
		// a request on a connection that breaks may have been read: its prompt is computed again
		assert.LessOrEqual(t, len(r.engines.Legs(pairengine.Prefill)), 7)
		r.rest()
	})
}

// PD10: ten requests fail at the decode engines, and the prefill engine has done its part each time.
func TestPD10FailuresOfDecodeAreNotChargedToPrefill(t *testing.T) {
	for _, transfer := range append(pairTransfers(), "sglang") {
		bubble(t, transfer, func(t *testing.T) {
			r := newPairRig(t, transfer, 1, 2, "decide: always, fallback: fail")
			r.Expect(harness.PairsFail, harness.RequestsFail)
			for _, d := range r.decode {
				d.Do(func(l *pairengine.Leg) bool {
					time.Sleep(100 * time.Millisecond) // the prefill leg has ended or waits
					return l.FailStream()
				})
			}
			for i := range 10 {
				a := r.ask(pairBody(fmt.Sprintf("failure %d", i), 8))
				assert.GreaterOrEqual(t, a.Status, 500, "%v", a)
			}
			// two pairs, which have to meet again after three failures each
			assert.GreaterOrEqual(t, len(r.engines.Legs(pairengine.Prefill)), 6)
			r.Quiet()
			time.Sleep(10 * time.Second) // probes and health checks
			assert.Empty(t, r.Journal.Find("rank is ejected", "pd.prefill"))
			assert.Empty(t, r.Journal.Find("is fenced", "pd.prefill"))
			assert.Zero(t, r.total("dpserve_rank_ejected", `app="pd.prefill"`))
			for _, u := range r.units("pd.prefill/") {
				assert.Equal(t, "ready", u.Phase)
				assert.Zero(t, u.Restarts)
			}
			for _, d := range r.decode {
				d.Do(nil)
			}
			r.Until("a pair answers again", func() error {
				if a := r.ask(pairBody("peace", 8)); !a.OK() || a.Way != "remote" {
					return fmt.Errorf("%v", a)
				}
				return nil
			})
			r.rest()
		})
	}
}

// PD8: the client leaves while its request waits for room, in the prefill, in the transfer, in the answer. No
// leg begins after that, those that run are cancelled within a second, and each request is counted once.
func TestPD8ClientLeaves(t *testing.T) {
	for _, transfer := range append(pairTransfers(), "sglang") {
		for _, stage := range []string{"queue", "prefill", "transfer", "decode"} {
			bubble(t, transfer+" "+stage, func(t *testing.T) { clientLeaves(t, transfer, stage) })
		}
	}
}

func clientLeaves(t *testing.T, transfer, stage string) {
	t.Helper()
	r := newPairRig(t, transfer, 1, 1, "decide: always", "max_ongoing_requests: 1")
	stall := func(l *pairengine.Leg) bool { return l.Stall() }
	switch stage {
	case "queue", "prefill":
		r.prefill[0].Do(stall)
	case "transfer":
		r.decode[0].Do(stall)
	case "decode":
		r.engines.Pause = time.Second
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	replies := make(chan *pairReply, 2)
	go func() {
		replies <- r.askFor(ctx, "/v1/chat/completions", pairBody("a guest who leaves", 60))
	}()
	time.Sleep(3 * time.Second)
	want := 1
	if stage == "queue" { // the first one has the only place
		late, end := context.WithCancel(t.Context())
		go func() { replies <- r.askFor(late, "/v1/chat/completions", pairBody("a guest in the queue", 8)) }()
		time.Sleep(time.Second)
		legs := len(r.engines.Legs(""))
		end()
		<-replies
		time.Sleep(time.Second)
		assert.Len(t, r.engines.Legs(""), legs, "no engine was asked")
		want = 2
	}
	before := len(r.engines.Legs(""))
	require.Positive(t, before)
	leave()
	left := time.Now()
	<-replies
	r.rest()
	legs := r.engines.Legs("")
	assert.Len(t, legs, before, "no leg begins for a client that has left")
	for _, l := range legs {
		if !l.Ended.Before(left) {
			cancelled(t, &l, left)
		}
	}
	assert.InDelta(t, want, r.total("dpserve_pd_requests_total"), 0)
	assert.InDelta(t, want, r.total("dpserve_pd_requests_total", `outcome="client_gone"`), 0)
	r.prefill[0].Do(nil)
	r.decode[0].Do(nil)
	r.engines.Pause = 0
	r.right(r.ask(pairBody("the next guest", 8)))
	r.rest()
}

// units are the units of a pool, by the prefix of their names.
func (r *pairRig) units(prefix string) (out []unitState) {
	r.t.Helper()
	st, _ := r.App("pd")
	for _, u := range st.Units {
		if len(u.Unit) > len(prefix) && u.Unit[:len(prefix)] == prefix {
			out = append(out, unitState{u.Unit, u.Phase, u.Restarts})
		}
	}
	require.NotEmpty(r.t, out, "%+v", st.Units)
	return out
}

type unitState struct {
	Unit, Phase string
	Restarts    int
}
