package system

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// stubPairs are two prefill and two decode stub engines behind a node.
func stubPairs(t *testing.T, transfer, disaggregation string) (*harness.Real, *harness.PairEngines) {
	t.Helper()
	f := harness.NewPairEngines(t, transfer, "pd")
	for _, role := range []string{harness.PairPrefill, harness.PairDecode} {
		for range 2 {
			f.Add(role, ports.TakeAddr(t), 1)
		}
	}
	r := harness.Start(t)
	r.Deploy(f.App(disaggregation, "timeouts: {first_token_s: 2}"))
	r.WaitStatus("pd", "RUNNING")
	waitMet(r)
	f.Forget()
	return r, f
}

// stubBody is the body of a streamed chat.
func stubBody(thing string) string {
	return harness.Chat("pd", harness.PairMark+" there was "+thing, 8, true)
}

// restPairs waits until neither the node nor an engine has anything in hand.
func restPairs(t *testing.T, r *harness.Real, f *harness.PairEngines) {
	t.Helper()
	r.Quiet()
	require.Eventually(t, func() bool { return f.Open() == 0 }, harness.Patience, 10*time.Millisecond)
	assert.Empty(t, f.Faults())
}

// doAll has all engines of a side answer in the same way.
func doAll(f *harness.PairEngines, side string, act func(l *harness.PairLeg) bool) {
	for _, e := range f.Side(side) {
		e.Do(act)
	}
}

// PD1, PD2, PD3, PD5, PD10: PD1, PD2, PD3, PD5 and PD10 on sockets, with the built binary: test/inprocess has
// the exact times and the other transfers.
func TestPD1To10OnSockets(t *testing.T) {
	t.Parallel()
	r, f := stubPairs(t, "nixl", "decide: always")
	r.Expect(harness.PairsFail, harness.RequestsFail)
	right := func(t *testing.T, body, way string) *harness.Stream {
		t.Helper()
		s := askAt(http.DefaultClient, r.HTTP, body)
		assert.True(t, s.OK(), s)
		assert.Equal(t, f.Unbroken(body), s.Text, s)
		assert.Equal(t, way, s.Way, s)
		return s
	}
	// the parts follow one another: each changes what the engines do
	t.Run("400", func(t *testing.T) {
		doAll(f, harness.PairPrefill, func(l *harness.PairLeg) bool { return l.Fail(http.StatusBadRequest) })
		s := askAt(http.DefaultClient, r.HTTP, stubBody("a 400"))
		assert.Equal(t, http.StatusBadRequest, s.Status)
		assert.Empty(t, f.Legs(harness.PairDecode))
		restPairs(t, r, f)
	})
	for name, breaks := range map[string]bool{"500": false, "reset": true} {
		t.Run(name, func(t *testing.T) {
			f.Forget()
			// one engine breaks the connection each time; two would end the request, as without pools
			doAll(f, harness.PairPrefill, func(l *harness.PairLeg) bool {
				if breaks && l.At == f.Side(harness.PairPrefill)[0] {
					return l.Reset()
				}
				return l.Fail(http.StatusInternalServerError)
			})
			right(t, stubBody("a broken prefill: "+name), "fallback")
			restPairs(t, r, f)
			asked := map[string]bool{}
			for _, l := range f.Legs(harness.PairPrefill) {
				asked[l.At.Name] = true
			}
			assert.Len(t, asked, 2, "one other prefill rank")
		})
	}
	doAll(f, harness.PairPrefill, nil)
	for name, fail := range map[string]func(l *harness.PairLeg) bool{
		"decode error event": (*harness.PairLeg).FailStream,
		"decode reset":       (*harness.PairLeg).Reset,
		"decode stall":       (*harness.PairLeg).Stall,
	} {
		t.Run(name, func(t *testing.T) {
			f.Forget()
			failed := make(chan struct{}, 1)
			failed <- struct{}{}
			doAll(f, harness.PairDecode, func(l *harness.PairLeg) bool {
				select {
				case <-failed:
					return fail(l)
				default:
					return false
				}
			})
			s := right(t, stubBody("a broken decode: "+name), "remote")
			assert.Less(t, s.Total, 25*time.Second)
			assert.Len(t, f.Legs(harness.PairPrefill), 2, "fresh parameters")
			restPairs(t, r, f)
		})
	}
	doAll(f, harness.PairDecode, nil)
	t.Run("bytes", func(t *testing.T) { firstTokenIsNotHeldBack(t, r, f) })
	t.Run("fields of a client", func(t *testing.T) {
		body := strings.Replace(stubBody("an intruder"), "{",
			`{"kv_transfer_params":{"do_remote_prefill":true},"bootstrap_room":42,"routed_dp_rank":1,`, 1)
		s := askAt(http.DefaultClient, r.HTTP, body)
		assert.True(t, s.OK(), s)
		assert.Equal(t, f.Unbroken(body), s.Text)
		restPairs(t, r, f)
	})
	t.Run("decode fails ten times", func(t *testing.T) {
		doAll(f, harness.PairDecode, (*harness.PairLeg).FailStream)
		for range 10 {
			s := askAt(http.DefaultClient, r.HTTP, stubBody("a failure"))
			assert.False(t, s.FirstByte(), s)
		}
		doAll(f, harness.PairDecode, nil)
		st := r.App("pd")
		for unit, k := range poolRanks(&st, "prefill") {
			assert.False(t, k.Tripped, unit)
			assert.Equal(t, "ready", k.Phase, unit)
			assert.EqualValues(t, 1, k.Epoch, unit)
		}
		r.Eventually(func() error {
			body := stubBody("peace")
			if s := askAt(http.DefaultClient, r.HTTP, body); !s.OK() || s.Way != "remote" {
				return assert.AnError
			}
			return nil
		}, "a pair answers again")
		restPairs(t, r, f)
	})
}

// firstTokenIsNotHeldBack: the client has the first token before the engine has made the second one.
func firstTokenIsNotHeldBack(t *testing.T, r *harness.Real, f *harness.PairEngines) {
	t.Helper()
	f.Forget()
	let := make(chan struct{})
	doAll(f, harness.PairDecode, func(l *harness.PairLeg) bool { return l.AnswerAfterFirst(l.Prompt, let) })
	defer doAll(f, harness.PairDecode, nil)
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	resp, err := r.Post(ctx, "/v1/chat/completions", stubBody("a stream"))
	require.NoError(t, err)
	defer resp.Body.Close()
	assert.NotEmpty(t, resp.Header.Get("x-dpserve-prefill-rank"))
	first := ""
	for buf := make([]byte, 1); !strings.Contains(first, `"content":" `); first += string(buf) {
		_, err := resp.Body.Read(buf)
		require.NoError(t, err, first)
	}
	close(let)
	_, err = io.Copy(io.Discard, resp.Body)
	require.NoError(t, err)
	p, d := f.Legs(harness.PairPrefill), f.Legs(harness.PairDecode)
	require.Len(t, p, 1)
	require.Len(t, d, 1)
	assert.Equal(t, p[0].Prompt, d[0].Prompt)
	restPairs(t, r, f)
}
