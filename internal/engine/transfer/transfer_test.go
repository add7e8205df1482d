package transfer

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

var start = time.Unix(1_800_000_000, 0)

var names = []string{NixlName, NixlPushName, MooncakeName, SGLangName, SimName}

// peer has what every transfer needs.
var peer = Peer{
	EngineID: "e", Host: "10.0.0.6", Port: 8998, TPSize: 2, PPSize: 1, Bootstrap: "http://10.0.0.6:8998",
	Rank: 1, DPSize: 4,
}

func begin(t testing.TB, name string, q *Request) Attempt {
	t.Helper()
	a, err := transfer(t, name).Begin(q, "id-1", peer, rand.New(rand.NewPCG(1, 2)).Uint64N)
	require.NoError(t, err)
	return a
}

func TestNamesOfTransfers(t *testing.T) {
	for _, name := range names {
		assert.Equal(t, name, transfer(t, name).Traits().Name)
	}
	_, ok := Named("nccl")
	assert.False(t, ok)
}

// TestClientsOwnFieldsReachNoEngine: fields that select ranks or feed connectors are in neither leg, however
// they are spelled, and all other bytes are in the decode leg as the client sent them.
func TestClientsOwnFieldsReachNoEngine(t *testing.T) {
	own := `"kv_transfer_params":{"do_remote_prefill":true},"bootstrap_host":"2.2.2.2","bootstrap_port":1,` +
		`"bootstrap_room":7,"routed_dp_rank":3,"disagg_prefill_dp_rank":3,"data_parallel_rank":1,` +
		`"ec_transfer_params":{},"remote_block_ids":[[1]],"do_remote_prefill":true,"transfer_id":"x",` +
		`"disagg_spec":{},"\u006bv_transfer_params":{"do_remote_prefill":true}`
	for _, name := range names {
		for _, body := range []string{
			`{` + own + `,"prompt":"p \u0041","x":[1.50, {"a" :1}]}`,
			`{"prompt":"p \u0041",` + own + `,"x":[1.50, {"a" :1}]}`,
			`{"prompt":"p \u0041","x":[1.50, {"a" :1}],` + own + ` }`,
		} {
			q := scan(t, name, Completions, body)
			plain := string(q.AppendPlain(nil))
			assert.Contains(t, []string{
				`{"prompt":"p \u0041","x":[1.50, {"a" :1}]}`, `{"prompt":"p \u0041","x":[1.50, {"a" :1}] }`,
			}, plain)
			a := begin(t, name, q)
			for _, leg := range [][]byte{a.AppendPrefill(nil, q), a.AppendDecode(nil, q, nil)} {
				assert.Contains(t, string(leg), `"prompt":"p \u0041","x":[1.50, {"a" :1}]`)
				m := fields(t, leg)
				for _, gone := range []string{
					"routed_dp_rank", "data_parallel_rank", "ec_transfer_params", "remote_block_ids",
					"do_remote_prefill", "transfer_id", "disagg_spec",
				} {
					assert.NotContains(t, m, gone, name)
				}
				assert.NotContains(t, string(leg), "2.2.2.2")
				assert.NotContains(t, string(leg), `\u006bv`)
			}
		}
	}
}

func TestHiddenTransferFieldsAreRefused(t *testing.T) {
	for _, c := range []struct{ route, member, param string }{
		{"/v1/completions", `"vllm_xargs":{"kv_transfer_params":{}}`, "vllm_xargs"},
		{"/v1/chat/completions", `"vllm_xargs":{"a":1,"\u006bv_transfer_params":{}}`, "vllm_xargs"},
		{"/v1/responses", `"vllm_xargs":{"kv_cache_report_mode":"full"}`, "vllm_xargs"},
		{"/v1/messages", `"vllm_xargs":{"bootstrap_room":1}`, "vllm_xargs"},
		{
			"/v1/completions", `"sampling_params":{"extra_args":{"kv_transfer_params":{}}}`,
			"sampling_params",
		},
		{"/v1/completions", `"sampling_params":{"remote_host":"x"}`, "sampling_params"},
		{"/v1/completions", `"extra_body":{"a":{"do_remote_prefill":true}}`, "extra_body"},
	} {
		var q Request
		err := q.Scan(transfer(t, NixlName), RouteOf(c.route), []byte(`{`+c.member+`}`))
		var body *openai.BodyError
		require.ErrorAs(t, err, &body, c.member)
		assert.Equal(t, c.param, body.Param)
		assert.Equal(t, openai.CodeInvalidRequest, body.Code)
		assert.Contains(t, body.Message, " must not hold ")
	}
	scan(t, NixlName, Completions, `{"vllm_xargs":{"kv":1},"prompt":"say kv_transfer_params"}`)
}

func TestRequestsThatCannotBeSplit(t *testing.T) {
	for _, c := range []struct {
		name  string
		route Route
		body  string
		want  Reason
	}{
		{NixlName, Completions, `{"prompt":"x"}`, CanSplit},
		{NixlName, Completions, `{"prompt":["x"],"n":1,"best_of":1,"n":null}`, CanSplit},
		{NixlName, Completions, `{"prompt":[1,2,3]}`, CanSplit},
		{NixlName, Completions, `{"prompt":"x","echo":true}`, CanSplit},
		{NixlName, Completions, `{"prompt":"x","logprobs":2}`, CanSplit},
		{NixlName, Completions, `{"prompt":["x","y"]}`, PromptList},
		{NixlName, Completions, `{"prompt":[[1],[2]]}`, PromptList},
		{NixlName, Completions, `{"prompt":["x","y"],"prompt":"z"}`, PromptList},
		{NixlName, Completions, `{"prompt":"x","n":3}`, SeveralChoices},
		{NixlName, Completions, `{"prompt":"x","n":"3"}`, SeveralChoices},
		{NixlName, Completions, `{"prompt":"x","\u006e":2}`, SeveralChoices},
		{NixlName, Completions, `{"prompt":"x","best_of":2}`, SeveralChoices},
		{NixlName, Chat, `{"messages":[],"use_beam_search":1}`, SeveralChoices},
		{NixlName, Completions, `{"prompt_embeds":"AAAA"}`, PromptEmbeds},
		{NixlName, Completions, `{"prompt":"x","prompt_logprobs":0}`, PromptLogprobs},
		{NixlName, Completions, `{"prompt":"x","echo":true,"logprobs":0}`, PromptLogprobs},
		{NixlName, Completions, `{"prompt":"x","max_tokens":0}`, NoOutput},
		{NixlName, Completions, `{"prompt":"x","max_tokens":1}`, CanSplit},
		{NixlName, Chat, `{"messages":[{"content":[{"type":"text","text":"a"}]}]}`, CanSplit},
		{NixlName, Chat, `{"messages":[{"content":[{"image_url":{"url":"x"}}]}]}`, MediaParts},
		{NixlName, RouteOf("/v1/embeddings"), `{"input":"x"}`, OnRoute},
		{SGLangName, Completions, `{"prompt":["x","y"]}`, CanSplit},
		{SGLangName, Completions, `{"prompt":["x","y"],"n":3}`, SeveralChoices},
		{SimName, Completions, `{"prompt":["x","y"]}`, PromptList},
	} {
		assert.Equal(t, c.want, scan(t, c.name, c.route, c.body).Reason, "%s %s", c.name, c.body)
	}
	seen := map[string]bool{}
	for r := OnRoute; r < numReasons; r++ {
		assert.NotEmpty(t, r.String())
		seen[r.String()] = true
	}
	assert.Len(t, seen, int(numReasons)-1)
}

// TestPrefillBodies pins the bytes of the prefill leg.
func TestPrefillBodies(t *testing.T) {
	const ask = `,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,` +
		`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`
	for _, c := range []struct {
		route      Route
		body, want string
	}{
		{
			Completions,
			`{"prompt":"x","stream":true,"stream_options":{},"max_tokens":9,"min_tokens":4,"stop":"y"}`,
			`{"prompt":"x","stop":"y","stream":false,"max_tokens":1` + ask,
		},
		{
			Chat, `{"max_completion_tokens":9,"messages":[],"min_completion_tokens":4,"max_tokens":8}`,
			`{"messages":[],"stream":false,"max_tokens":1,"max_completion_tokens":1` + ask,
		},
	} {
		q := scan(t, NixlName, c.route, c.body)
		a := begin(t, NixlName, q)
		assert.Equal(t, c.want, string(a.AppendPrefill(nil, q)))
		assert.Equal(t, c.body, string(a.AppendDecode(nil, q, nil)), "without params it is a plain request")
	}
}

func TestMooncakeLegs(t *testing.T) {
	q := scan(t, MooncakeName, Completions,
		`{"prompt":"x","stop":["a"],"stop_token_ids":[1],"max_tokens":9}`)
	a := begin(t, MooncakeName, q)
	assert.JSONEq(t, `{"prompt":"x","stream":false,"max_tokens":1,"ignore_eos":true,"kv_transfer_params":`+
		`{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-id-1"}}`,
		string(a.AppendPrefill(nil, q)))
	assert.JSONEq(t, `{"prompt":"x","stop":["a"],"stop_token_ids":[1],"max_tokens":9,"kv_transfer_params":`+
		`{"do_remote_decode":false,"do_remote_prefill":true,"transfer_id":"xfer-id-1",`+
		`"remote_engine_id":"e","remote_bootstrap_addr":"http://10.0.0.6:8998"}}`,
		string(a.AppendDecode(nil, q, nil)))

	tr := transfer(t, MooncakeName)
	for ending, want := range map[string]Failure{
		"length": NoFailure, "stop": PrefillStopped, "abort": PrefillBroken,
	} {
		_, got := ReadPrefill(tr, q, []byte(`{"choices":[{"finish_reason":"`+ending+`"}]}`))
		assert.Equal(t, want, got, ending)
	}
}

func TestMooncakeBootstrap(t *testing.T) {
	b, ok := transfer(t, MooncakeName).(Bootstrapper)
	require.True(t, ok)
	query, err := b.Query("http://10.0.0.6:8998/")
	require.NoError(t, err)
	assert.Equal(t, "GET http://10.0.0.6:8998/query", query.Method+" "+query.URL)
	const two = `{"0":{"engine_id":"e0","worker_addr":{"0":{"0":"tcp://x"}}},` +
		`"1":{"engine_id":"e1","worker_addr":{"0":{"0":"tcp://y"}}}}`
	got, err := b.ReadPeer("http://10.0.0.6:8998", 1, 200, []byte(two))
	require.NoError(t, err)
	assert.Equal(t, Peer{EngineID: "e1", Bootstrap: "http://10.0.0.6:8998", Rank: 1}, got)
	_, err = b.ReadPeer("http://10.0.0.6:8998", 2, 200, []byte(two))
	require.ErrorIs(t, err, ErrNotRegistered)
	_, err = b.ReadPeer("http://10.0.0.6:8998", 0, 200, []byte(`[]`))
	require.ErrorIs(t, err, ErrBootstrap)
	_, err = b.ReadPeer("http://10.0.0.6:8998", 0, 404, nil)
	require.ErrorIs(t, err, ErrBootstrap)
}

// TestSGLangRooms: each room has the prefill rank as its remainder, none is there twice, and both legs name
// the same.
func TestSGLangRooms(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for _, dp := range []int{1, 2, 3, 4, 7, 64} {
		for p := range dp {
			rooms := drawRooms(40, dp, p, random.Uint64N)
			seen := map[uint64]bool{}
			for _, room := range rooms {
				assert.Equal(t, uint64(p), room%uint64(dp))
				assert.LessOrEqual(t, room, uint64(maxRoom))
				seen[room] = true
			}
			assert.Len(t, seen, len(rooms))
		}
		same := drawRooms(9, dp, dp-1, func(uint64) uint64 { return 0 })
		assert.Equal(t, uint64(8*dp+dp-1), same[8], "equal draws give different rooms")
		last := drawRooms(1, dp, dp-1, func(n uint64) uint64 { return n - 1 })
		assert.LessOrEqual(t, last[0], uint64(maxRoom))
		assert.Greater(t, last[0], uint64(maxRoom-dp))
	}

	q := scan(t, SGLangName, Chat, `{"messages":[],"stream":true,"max_tokens":9,"bootstrap_room":5}`)
	a := begin(t, SGLangName, q)
	leg := a.AppendPrefill(nil, q)
	assert.Equal(t, leg, a.AppendDecode(nil, q, nil), "both legs have one body")
	m := fields(t, leg)
	assert.JSONEq(t, `"10.0.0.6"`, string(m["bootstrap_host"]))
	assert.Equal(t, "true", string(m["stream"]))
	assert.Equal(t, "9", string(m["max_tokens"]))
	assert.Equal(t, "1", string(m["disagg_prefill_dp_rank"]))

	list := scan(t, SGLangName, Completions, `{"prompt":["a","b","c"]}`)
	a = begin(t, SGLangName, list)
	m = fields(t, a.AppendDecode(nil, list, nil))
	var rooms []uint64
	require.NoError(t, json.Unmarshal(m["bootstrap_room"], &rooms))
	assert.Len(t, rooms, 3)
	assert.JSONEq(t, `[8998,8998,8998]`, string(m["bootstrap_port"]))
	assert.JSONEq(t, `["10.0.0.6","10.0.0.6","10.0.0.6"]`, string(m["bootstrap_host"]))
}

func TestSGLangPrefillAnswersAreDrained(t *testing.T) {
	tr := transfer(t, SGLangName)
	q := scan(t, SGLangName, Chat, `{"messages":[]}`)
	for body, want := range map[string]Failure{
		"":                                   NoFailure,
		`{"choices":[{"text":"\"error\""}]}`: NoFailure,
		"data: {\"choices\":[]}\n\ndata: [DONE]\n\n":                                          NoFailure,
		`{"error":{"message":"KVTransferError","code":500}}`:                                  PrefillBroken,
		"data: {\"choices\":[]}\n\ndata: {\"error\":{\"message\":\"x\"}}\n\ndata: [DONE]\n\n": PrefillBroken,
	} {
		_, got := ReadPrefill(tr, q, []byte(body))
		assert.Equal(t, want, got, body)
	}
}

func TestSGLangBootstrap(t *testing.T) {
	b, ok := transfer(t, SGLangName).(Bootstrapper)
	require.True(t, ok)
	query, err := b.Query("http://[::1]:8998")
	require.NoError(t, err)
	assert.Equal(t, "http://[::1]:8998/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1"+
		"&target_pp_rank=-1", query.URL)
	got, err := b.ReadPeer("http://[::1]:8998", 1, 200, []byte(`{"dp_size":2,"page_size":64}`))
	require.NoError(t, err)
	assert.Equal(t, Peer{Host: "::1", Port: 8998, Rank: 1, DPSize: 2}, got)
	_, err = b.ReadPeer("http://[::1]:8998", 1, 503, nil)
	require.ErrorIs(t, err, ErrNotRegistered)
	_, err = b.ReadPeer("http://[::1]:8998", 2, 200, []byte(`{"dp_size":2}`))
	require.ErrorIs(t, err, ErrBootstrap)
	for _, bad := range []string{
		"", "10.0.0.6:8998", "http://x", "http://x:0", "http://x:70000", "http://x:1/p",
	} {
		_, err = b.Query(bad)
		require.ErrorIs(t, err, ErrPeer, bad)
	}
}

// TestNoLegWithoutThePeersData: a missing field ends an engine or lets it wait for ever.
func TestNoLegWithoutThePeersData(t *testing.T) {
	q := scan(t, SGLangName, Completions, `{"prompt":"x"}`)
	for name, spoil := range map[string][]func(p *Peer){
		NixlPushName: {
			func(p *Peer) { p.EngineID = "" }, func(p *Peer) { p.Host = "" }, func(p *Peer) { p.Port = 0 },
			func(p *Peer) { p.TPSize = 0 }, func(p *Peer) { p.PPSize = 0 },
		},
		MooncakeName: {func(p *Peer) { p.EngineID = "" }, func(p *Peer) { p.Bootstrap = "x" }},
		SGLangName: {
			func(p *Peer) { p.Host = "" }, func(p *Peer) { p.Port = 1 << 16 }, func(p *Peer) { p.Rank = 4 },
			func(p *Peer) { p.DPSize = 0 },
		},
	} {
		for i, f := range spoil {
			bad := peer
			f(&bad)
			_, err := transfer(t, name).Begin(q, "id", bad, rand.Uint64N)
			require.ErrorIs(t, err, ErrPeer, "%s %d", name, i)
		}
	}
	for _, name := range []string{NixlPushName, MooncakeName} {
		_, err := transfer(t, name).Begin(q, "", peer, rand.Uint64N)
		require.ErrorIs(t, err, ErrPeer)
	}
}

func TestParamsAreTakenOnce(t *testing.T) {
	raw := []byte(`{"remote_port" : 1, "x":"\u0041"}`)
	source := Source{"app/g/0", 7}
	p := NewParams(raw, source, start, 0)
	copy(raw, "overwritten")
	got, err := p.Take(start.Add(25*time.Second-1), source)
	require.NoError(t, err)
	assert.Equal(t, `"kv_transfer_params":{"remote_port" : 1, "x":"\u0041"}`, string(got))
	_, err = p.Take(start, source)
	require.ErrorIs(t, err, ErrTaken)

	p.PutBack()
	_, err = p.Take(start, source)
	require.NoError(t, err, "after a failed dial they may be taken again")
	p.Discard()
	p.PutBack()
	_, err = p.Take(start, source)
	require.ErrorIs(t, err, ErrDead)
}

func TestParamsEndWithTheirEngineAndTheirLease(t *testing.T) {
	source := Source{"app/g/0", 7}
	for lease, limit := range map[time.Duration]time.Duration{
		0: 25 * time.Second, 30 * time.Second: 25 * time.Second, 10 * time.Second: 5 * time.Second,
		120 * time.Second: 115 * time.Second,
	} {
		p := NewParams([]byte(`{}`), source, start, lease)
		assert.Equal(t, start.Add(limit), p.deadline)
		_, err := p.Take(start.Add(limit), source)
		require.ErrorIs(t, err, ErrLate)
		_, err = p.Take(start, source)
		require.ErrorIs(t, err, ErrDead, "a clock that goes back revives nothing")
	}
	p := NewParams([]byte(`{}`), source, start, 0)
	_, err := p.Take(start, Source{"app/g/0", 8})
	require.ErrorIs(t, err, ErrFenced)
	_, err = p.Take(start, source)
	require.ErrorIs(t, err, ErrDead)
}

func TestParamsHaveOneTaker(t *testing.T) {
	source := Source{"app/g/0", 7}
	p := NewParams([]byte(`{}`), source, start, 0)
	var took atomic.Int32
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			if _, err := p.Take(start, source); err == nil {
				took.Add(1)
			} else if !errors.Is(err, ErrTaken) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	assert.Equal(t, int32(1), took.Load())
}
