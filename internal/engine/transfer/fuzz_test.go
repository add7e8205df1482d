package transfer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// FuzzLegsOfAnyBody: for each body that Scan accepts, both legs of each transfer are JSON, hold no field that
// the client may not set, and have the client's prompt byte for byte.
func FuzzLegsOfAnyBody(f *testing.F) {
	for _, body := range []string{
		`{}`, `{"prompt":"a","max_tokens":5,"stream":true}`, `{"prompt":["a","b"],"n":2}`,
		` { "prompt" : [1,2] } `, `{"messages":[],"prompt":"\u00e9"}`,
		`{"sampling_params":{"max_tokens":3,"extra_args":{"x":1}},"token_ids":[1]}`,
		`{"kv_transfer_params":{},"prompt":"x","bootstrap_room":1}`,
		`{"sampling_params":{},"sampling_params":3}`,
	} {
		for route := range uint8(len(routes)) {
			f.Add(body, route)
		}
	}
	f.Fuzz(func(t *testing.T, body string, number uint8) {
		route := Route(int(number) % len(routes))
		for _, name := range names {
			tr := transfer(t, name)
			var q Request
			if q.Scan(tr, route, []byte(body)) != nil {
				continue
			}
			if q.Prompts > 64 {
				return
			}
			a, err := tr.Begin(&q, "id", peer, rand.New(rand.NewPCG(1, 2)).Uint64N)
			require.NoError(t, err)
			ours := map[string]bool{"kv_transfer_params": true, "disagg_prefill_dp_rank": true}
			client := members(t, []byte(body))
			for _, leg := range [][]byte{
				a.AppendPrefill(nil, &q), a.AppendDecode(nil, &q, nil), q.AppendPlain(nil),
				a.AppendDecode(nil, &q, []byte(kvParams+`{}`)),
			} {
				require.True(t, json.Valid(leg), "%s: %s", name, leg)
				got := members(t, leg)
				for key := range got {
					if isOurs([]byte(key)) && !strings.HasPrefix(key, "bootstrap_") {
						require.True(t, ours[key], "%s: %s", name, leg)
					}
				}
				if p := routes[route].prompt; p != "" {
					require.Equal(t, client[p], got[p])
				}
			}
		}
	})
}

// members are the raw values of an object; the last one of a name counts.
func members(t *testing.T, body []byte) map[string]string {
	out := map[string]string{}
	d := map[string]json.RawMessage{}
	require.NoError(t, json.Unmarshal(body, &d), "%s", body)
	for k, v := range d {
		out[k] = string(v)
	}
	return out
}

// FuzzPrefillAnswers: params that are accepted are bytes of the answer, and those of a real engine have what
// a decode engine takes without a default.
func FuzzPrefillAnswers(f *testing.F) {
	for _, name := range []string{
		"completions.p", "chat.p", "p_leg_stop", "push_decode_first.p",
	} {
		_, body := answer(f, name)
		for route := range uint8(len(routes)) {
			f.Add(body, route)
		}
	}
	f.Add([]byte("data: {}\n\n"), uint8(1))
	f.Fuzz(func(t *testing.T, body []byte, number uint8) {
		route := Route(int(number) % len(routes))
		for _, name := range names {
			tr := transfer(t, name)
			got, failure := ReadPrefill(tr, &Request{Route: route, traits: tr.Traits()}, body)
			PeerOfAnswer(got.Params)
			if failure != NoFailure || !tr.Traits().HasParams {
				continue
			}
			require.True(t, bytes.Contains(body, got.Params))
			require.True(t, json.Valid(got.Params))
			if name != NixlName {
				continue
			}
			var p struct {
				Flag   bool      `json:"do_remote_prefill"`
				Blocks [][]int64 `json:"remote_block_ids"`
			}
			exact := members(t, got.Params)
			require.Equal(t, "true", exact["do_remote_prefill"])
			if json.Unmarshal([]byte(`{"remote_block_ids":`+exact["remote_block_ids"]+`}`), &p) == nil {
				require.NotEmpty(t, p.Blocks)
			}
			for _, key := range []string{
				"remote_engine_id", "remote_request_id", "remote_host", "remote_port",
			} {
				require.NotEmpty(t, exact[key])
			}
		}
	})
}

// FuzzBootstrapAnswers: what is read from a bootstrap server is enough to begin an attempt.
func FuzzBootstrapAnswers(f *testing.F) {
	f.Add("http://10.0.0.6:8998", 1, 200,
		[]byte(`{"1":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://x"}}}}`))
	f.Add("http://[::1]:8998/", 0, 200, []byte(`{"dp_size":2}`))
	f.Add("x", 0, 503, []byte(``))
	f.Fuzz(func(t *testing.T, address string, rank, status int, body []byte) {
		for _, name := range []string{MooncakeName, SGLangName} {
			tr := transfer(t, name)
			b, ok := tr.(Bootstrapper)
			require.True(t, ok)
			p, err := b.ReadPeer(address, rank, status, body)
			if err != nil {
				continue
			}
			if _, err := b.Query(address); err != nil {
				continue
			}
			_, err = tr.Begin(&Request{Prompts: 1}, "id", p, rand.New(rand.NewPCG(1, 2)).Uint64N)
			require.NoError(t, err)
		}
	})
}

// TestBothLegsOfALongPromptTakeFewAllocations: the prompt is copied once per leg and never encoded again.
func TestBothLegsOfALongPromptTakeFewAllocations(t *testing.T) {
	body := longBody()
	tr := transfer(t, NixlName)
	var q Request
	require.NoError(t, q.Scan(tr, Chat, body))
	var prefill, decode []byte
	allocations := testing.AllocsPerRun(20, func() {
		if q.Scan(tr, Chat, body) != nil {
			t.Fail()
		}
		a, _ := tr.Begin(&q, "id", Peer{}, nil)
		prefill = a.AppendPrefill(prefill[:0], &q)
		decode = a.AppendDecode(decode[:0], &q, []byte(kvParams+`{"a":1}`))
	})
	assert.LessOrEqual(t, allocations, 8.0)
}

// longBody is a chat with a prompt of 100 kB.
func longBody() []byte {
	return fmt.Appendf(nil, `{"model":"tiny","messages":[{"role":"user","content":"%s"}],"stream":true,`+
		`"max_tokens":64}`, strings.Repeat(`the quick brown fox\n`, 5000))
}

// BenchmarkBothLegs makes both bodies of a prompt of 100 kB.
func BenchmarkBothLegs(b *testing.B) {
	body := longBody()
	_, text := answer(b, "chat.p")
	for _, name := range []string{NixlName, SGLangName} {
		b.Run(name, func(b *testing.B) {
			tr, random := transfer(b, name), rand.New(rand.NewPCG(1, 2))
			var q Request
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if err := q.Scan(tr, Chat, body); err != nil {
					b.Fatal(err)
				}
				a, err := tr.Begin(&q, "id", peer, random.Uint64N)
				if err != nil {
					b.Fatal(err)
				}
				a.AppendPrefill(nil, &q)
				var params []byte
				if tr.Traits().HasParams {
					got, failure := ReadPrefill(tr, &q, text)
					if failure != NoFailure {
						b.Fatal(failure)
					}
					params, err = NewParams(got.Params, Source{}, start, 0).Take(start, Source{})
					if err != nil {
						b.Fatal(err)
					}
				}
				a.AppendDecode(nil, &q, params)
			}
		})
	}
}
