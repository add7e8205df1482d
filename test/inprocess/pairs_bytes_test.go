package inprocess

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/pairengine"
)

// oddParams changes the parameters of a prefill's answer to what no program would write: spaces, numbers that
// no float holds, escapes, fields of another version.
func oddParams(params string) string {
	return strings.Replace(params, `"tp_size":1`, `"tp_size":1 , "x_int":9007199254740993, `+
		`"x_text":"\u0041\/\\ \"quoted\"", "x_new" : {"a" : [ 1.50, -0, 1e3, true, null ], "": {} }`, 1)
}

// PD3: parameters pass byte for byte, with fields that dpserve does not know; the first token of a stream is
// not held back until the second one.
func TestPD3ParametersPassByteForByte(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newPairRig(t, "nixl", 1, 1, "decide: always")
		r.engines.Params = oddParams
		let := make(chan struct{})
		r.decode[0].Do(func(l *pairengine.Leg) bool { return l.AnswerAfterFirst(l.Prompt, let) })
		body := pairBody("a stream", 8)
		began := time.Now()
		resp, err := r.Post(t.Context(), "/v1/chat/completions", body)
		require.NoError(t, err)
		first := ""
		for buf := make([]byte, 1); !strings.Contains(first, `"content":" `); first += string(buf) {
			_, err := resp.Body.Read(buf)
			require.NoError(t, err, first)
		}
		assert.Less(t, time.Since(began), time.Second, "the engine has not sent its second token yet")
		close(let)
		rest, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		assert.Contains(t, string(rest), "data: [DONE]")

		r.decode[0].Do(nil)
		for i, whole := range []string{
			pairBody("a first body", 8),
			harness.Chat("pd", pairengine.Mark+" there was a body that is not streamed", 5, false),
			`{"model":"pd", "prompt" : "` + pairengine.Mark + ` \u00e9\/ ", "max_tokens":4,"x":[1, 2]}`,
		} {
			path := "/v1/chat/completions"
			if i == 2 {
				path = "/v1/completions"
			}
			r.forget()
			a := r.askFor(t.Context(), path, whole)
			r.right(a)
			assert.Equal(t, "remote", a.Way)
			p, d := r.engines.Legs(pairengine.Prefill), r.engines.Legs(pairengine.Decode)
			require.Len(t, p, 1)
			require.Len(t, d, 1)
			assert.Contains(t, string(d[0].Fields["kv_transfer_params"]), `9007199254740993`)
			delete(d[0].Fields, "kv_transfer_params")
			var sent map[string]json.RawMessage
			require.NoError(t, json.Unmarshal([]byte(whole), &sent))
			assert.Equal(t, sent, d[0].Fields, "the decode leg is the client's body, and the parameters")
			assert.Equal(t, p[0].Prompt, d[0].Prompt)
		}
		r.rest()
	})
}

// newGroups are SGLang engines: four prefill ranks behind one address, two decode ranks behind another.
func newGroups(t *testing.T, prefillFirst bool) *pairRig {
	t.Helper()
	r := newPairEngines(t, "sglang")
	add := []func(){
		func() { r.addPrefill(4) },
		func() { r.addDecode(pairengine.Decode, 2) },
	}
	if !prefillFirst {
		add[0], add[1] = add[1], add[0]
	}
	for _, f := range add {
		f()
	}
	r.serve("decide: always")
	return r
}

// PD4: a prefill rank of four and a decode rank of two are named, 400 times.
func TestPD4RoomsNameTheRank(t *testing.T) {
	for _, prefillFirst := range []bool{true, false} {
		bubble(t, fmt.Sprintf("prefill first %v", prefillFirst), func(t *testing.T) {
			r := newGroups(t, prefillFirst)
			used := map[string]int{}
			rooms := map[uint64]bool{}
			for i := range 400 {
				p, d := i%4, i/4%2
				r.forget()
				a := r.ask(pairBody(fmt.Sprintf("guest %d", i), 2), "x-dpserve-rank", fmt.Sprintf("0/%d", d),
					"x-dpserve-prefill-rank", fmt.Sprintf("0/%d", p))
				r.right(a)
				require.Equal(t, fmt.Sprintf("0/%d", d), a.Rank, "%v", a)
				require.Equal(t, fmt.Sprintf("0/%d", p), a.Prefill, "%v", a)
				used[a.Prefill+" "+a.Rank]++
				for _, l := range r.engines.Legs("") {
					room := l.Rooms()
					require.Len(t, room, 1)
					assert.EqualValues(t, p, room[0]%4)
					if l.Side == pairengine.Prefill {
						assert.Equal(t, p, l.Rank(), "header and body name the rank")
						assert.False(t, rooms[room[0]], "no room is used twice")
						rooms[room[0]] = true
					} else {
						assert.Equal(t, d, l.Rank())
					}
				}
			}
			assert.Len(t, used, 8, "%v", used)
			for pair, n := range used {
				assert.Equal(t, 50, n, pair)
			}
			r.rest()
		})
	}
}

// PD4: the turns of a conversation stay on the prefill rank that has computed them, whatever was registered
// first.
func TestPD4TurnsStayOnTheirPrefillRank(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		seen := map[bool][]string{}
		for _, prefillFirst := range []bool{true, false} {
			r := newPairEngines(t, "nixl")
			if !prefillFirst {
				r.addDecode(pairengine.Decode, 1)
			}
			for range 4 {
				r.addPrefill(1)
			}
			if prefillFirst {
				r.addDecode(pairengine.Decode, 1)
			}
			r.serve("decide: always", "routing: {policy: scoring, params: {profile: locality}}")
			homes := make([]string, 8)
			for _, p := range r.prefill { // the sessions begin side by side
				p.Do(func(*pairengine.Leg) bool { time.Sleep(time.Second); return false })
			}
			var begin sync.WaitGroup
			for s := range homes {
				begin.Go(func() { homes[s] = r.playTurns(s, 0, 1) })
			}
			begin.Wait()
			for _, p := range r.prefill {
				p.Do(nil)
			}
			for s := range homes {
				assert.Equal(t, homes[s], r.playTurns(s, 1, 5), "session %d", s)
			}
			seen[prefillFirst] = homes
			r.rest()
			r.Delete("pd")
			r.Until("pd is gone", gone(r.Cluster, "pd"))
		}
		for _, homes := range seen {
			assert.Len(t, distinct(homes), 4, "all prefill ranks are used: %v", seen)
		}
	})
}

// playTurns sends some turns of a conversation, and returns the prefill rank of all of them.
func (r *pairRig) playTurns(session, from, to int) (home string) {
	text := fmt.Sprintf("%s there was session %d. ", pairengine.Mark, session)
	for turn := range to {
		text += strings.Repeat(fmt.Sprintf("turn %d of session %d goes on. ", turn, session), 40)
		if turn < from {
			continue
		}
		a := r.ask(harness.Chat("pd", text, 2, true))
		r.right(a)
		if turn == from {
			home = a.Prefill
		}
		assert.Equal(r.t, home, a.Prefill, "session %d, turn %d", session, turn)
	}
	return home
}

// clientFields are what only dpserve may set. Any one of them, from a client, ends an engine or selects the
// memory of another request.
const clientFields = `"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[7]]},` +
	`"bootstrap_host":"10.9.9.9","bootstrap_port":1,"bootstrap_room":42,"routed_dp_rank":3,` +
	`"disagg_prefill_dp_rank":3,"data_parallel_rank":1,"transfer_id":"xfer-mine",` +
	`"ec_transfer_params":{"a":1},` +
	`"remote_host":"10.9.9.9","do_remote_decode":true`

// PD5: a client brings transfer fields of its own. They are taken out, and those of the transfer stand once.
func TestPD5FieldsOfAClient(t *testing.T) {
	for _, transfer := range append(pairTransfers(), "sglang") {
		bubble(t, transfer, func(t *testing.T) {
			r := newPairRig(t, transfer, 1, 1, "decide: always")
			r.Expect(harness.RequestRefused)
			rooms := map[uint64]bool{}
			for i := range 3 {
				body := pairBody(fmt.Sprintf("intruder %d", i), 8)
				a := r.ask(strings.Replace(body, "{", "{"+clientFields+",", 1))
				r.right(a)
				assert.Equal(t, "remote", a.Way, "%v", a)
			}
			for _, l := range r.engines.Legs("") {
				assert.NotContains(t, string(l.Body), "10.9.9.9")
				assert.NotContains(t, string(l.Body), "xfer-mine")
				for _, room := range l.Rooms() {
					rooms[room] = true
					assert.NotEqual(t, uint64(42), room)
				}
			}
			if transfer == "sglang" {
				assert.Len(t, rooms, 3, "three requests, three rooms")
			}
			a := r.ask(strings.Replace(pairBody("hidden", 8), "{",
				`{"vllm_xargs":{"kv_transfer_params":{"do_remote_prefill":true}},`, 1))
			assert.Equal(t, http.StatusBadRequest, a.Status, "a nested one is refused: %v", a)
			r.rest()
			assert.True(t, r.ask(pairBody("a good guest", 8)).OK(), "the engines are up")
		})
	}
}

// PD5: three choices are one request at one rank, three prompts are three rooms.
func TestPD5SeveralAnswers(t *testing.T) {
	for _, transfer := range append(pairTransfers(), "sglang") {
		bubble(t, transfer, func(t *testing.T) {
			r := newPairEngines(t, transfer)
			r.addPrefill(1)
			r.addDecode(pairengine.Decode, 1)
			if transfer == "sglang" { // its pairs take nothing without a room
				r.addDecode(pairengine.Both, 1)
			}
			r.serve("decide: always")
			texts := func(body, path string) []string {
				resp, err := r.Post(t.Context(), path, body)
				require.NoError(t, err)
				defer resp.Body.Close()
				text, err := io.ReadAll(resp.Body)
				require.NoError(t, err)
				require.Equal(t, http.StatusOK, resp.StatusCode, "%s", text)
				var answer struct{ Choices []struct{ Text string } }
				require.NoError(t, json.Unmarshal(text, &answer))
				var out []string
				for _, c := range answer.Choices {
					out = append(out, c.Text)
				}
				return out
			}
			one := func(prompt string) string { return `"` + pairengine.Mark + " " + prompt + `"` }
			got := texts(`{"model":"pd","max_tokens":4,"n":3,"prompt":`+one("n")+`}`, "/v1/completions")
			assert.Len(t, got, 3)
			assert.NotEqual(t, got[0], got[1])
			require.Len(t, r.engines.Legs(""), 1, "one rank computes all three")
			assert.Equal(t, pairengine.Plain, r.engines.Legs("")[0].Side)
			assert.InDelta(t, 1, r.total("dpserve_pd_not_split_total", `reason="several_choices"`), 0)

			r.forget()
			prompts := []string{one("a"), one("b"), one("c")}
			got = texts(`{"model":"pd","max_tokens":4,"prompt":[`+strings.Join(prompts, ",")+`]}`,
				"/v1/completions")
			var want []string
			for _, p := range prompts {
				want = append(want, r.engines.Unbroken(`{"max_tokens":4,"prompt":`+p+`}`))
			}
			assert.Equal(t, want, got)
			if transfer == "sglang" {
				for _, l := range r.engines.Legs(pairengine.Prefill) {
					assert.Len(t, l.Rooms(), 3, "the fleet checks that they are distinct")
				}
				assert.Len(t, r.engines.Legs(""), 2)
			} else {
				assert.Equal(t, pairengine.Plain, r.engines.Legs("")[0].Side)
			}
			r.rest()
		})
	}
}
