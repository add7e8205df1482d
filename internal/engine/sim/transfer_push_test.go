package sim

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/test/ports"
)

// async is ask in the background, with headers; the answer's body, or the error's text.
func async(t testing.TB, s *Server, body string, headers ...string) <-chan string {
	done := make(chan string, 1)
	go func() {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/completions",
			strings.NewReader(body))
		if err != nil {
			done <- err.Error()
			return
		}
		req.Header.Set("Content-Type", "application/json")
		for i := 0; i+1 < len(headers); i += 2 {
			req.Header.Set(headers[i], headers[i+1])
		}
		resp, err := client.Do(req)
		if err != nil {
			done <- err.Error()
			return
		}
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		done <- string(b)
	}()
	return done
}

// leave starts a request and returns how its client leaves.
func leave(t testing.TB, s *Server, body string) (cancel func()) {
	ctx, stop := context.WithCancel(t.Context())
	left := make(chan struct{})
	go func() {
		defer close(left)
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/completions",
			strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		if resp, err := client.Do(req); err == nil {
			_ = resp.Body.Close()
		}
	}()
	return func() {
		stop()
		<-left
	}
}

func pushConfig(c *Config) { c.Transfer.Connector = ConnectorNixlPush }

func pushParams(p *Server) string {
	ex := p.ranks[0].exchange
	return fmt.Sprintf(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":%q,`+
		`"remote_host":"127.0.0.1","remote_port":%d,"tp_size":1,"pp_size":1,"remote_request_id":"any"}`,
		ex.id, ex.side.port())
}

func TestPush(t *testing.T) {
	p, d := startPair(t, pushConfig)
	prompt := words(1, 70)
	want := unbroken(t, prompt)
	prefillBody := `{"prompt":"` + prompt + `","max_tokens":1,"kv_transfer_params":` + prefillParams + `}`
	decodeBody := completionBody(prompt, `,"cache_salt":"%s","kv_transfer_params":`+pushParams(p))

	answer := async(t, d, fmt.Sprintf(decodeBody, "a"), "X-Request-Id", "r1") // the decode leg first
	eventually(t, func() bool { return d.Stats().Loading == 1 })
	_, first := ask(t, p, "/v1/completions", prefillBody, "X-Request-Id", "r1")
	assert.Contains(t, string(readLeg(t, first).Params), `"transfer_mode":"push"`)
	assert.NotContains(t, first, "remote_blocks_expiry_time")
	second := <-answer
	assert.Equal(t, want, textOf(t, second))
	assert.Equal(t, 70, readLeg(t, second).Usage.Details.Cached)
	leasesEnd(t, p)

	ask(t, p, "/v1/completions", prefillBody, "X-Request-Id", "r2") // the prefill leg first
	assert.Equal(t, 1, p.Stats().Leases)
	assert.Equal(t, want, textOf(t, <-async(t, d, fmt.Sprintf(decodeBody, "b"), "X-Request-Id", "r2")))
	leasesEnd(t, p)

	t.Run("other request ids never meet", func(t *testing.T) {
		gone := leave(t, d, fmt.Sprintf(decodeBody, "c"))
		eventually(t, func() bool { return d.Stats().Loading == 1 })
		ask(t, p, "/v1/completions", prefillBody, "X-Request-Id", "r3")
		assert.Equal(t, 1, p.Stats().Leases)
		assert.Equal(t, 1, d.Stats().Loading)
		gone()
		eventually(t, func() bool { return d.Stats().Loading == 0 })
		assert.False(t, d.dead.Load())
	})
	t.Run("a dead prefill engine is not noticed", func(t *testing.T) {
		gone := leave(t, d, fmt.Sprintf(decodeBody, "d"))
		eventually(t, func() bool { return d.Stats().Loading == 1 })
		require.NoError(t, p.Close())
		assert.Equal(t, 1, d.Stats().Loading)
		gone()
		eventually(t, func() bool { return d.Stats().Loading == 0 })
	})
	t.Run("a missing key ends the engine", func(t *testing.T) {
		for _, key := range append(pullKeys(), "tp_size", "pp_size") {
			p, d := startPair(t, pushConfig)
			status, body := decode(t, d, prompt, member(t, pushParams(p), key, ""), "")
			assert.Equal(t, http.StatusInternalServerError, status)
			isBody(t, deadBody, body, key)
		}
	})
}

// mooncakePair has its legs' parameters made by the package that dpserve uses.
func mooncakePair(t *testing.T) (p, d *Server, legs func(id, prompt, more string) (prefill, decode string)) {
	p, d = startPair(t, func(c *Config) { c.Transfer.Connector = ConnectorMooncake })
	tr, _ := transfer.Named(transfer.MooncakeName)
	query, err := tr.(transfer.Bootstrapper).Query(p.bootstrap.url())
	require.NoError(t, err)
	status, body := fetch(t, query.Method, query.URL, "")
	peer, err := tr.(transfer.Bootstrapper).ReadPeer(p.bootstrap.url(), 0, status, []byte(body))
	require.NoError(t, err)
	assert.Equal(t, p.ranks[0].exchange.id, peer.EngineID)
	return p, d, func(id, prompt, more string) (string, string) {
		return legsOf(t, tr, peer, id, completionBody(prompt, more))
	}
}

// legsOf makes the bodies of both legs as dpserve sends them.
func legsOf(t testing.TB, tr transfer.Transfer, peer transfer.Peer, id, body string) (string, string) {
	t.Helper()
	var q transfer.Request
	require.NoError(t, q.Scan(tr, transfer.Completions, []byte(body)))
	require.Equal(t, transfer.CanSplit, q.Reason)
	n := uint64(time.Now().UnixNano())
	a, err := tr.Begin(&q, id, peer, func(of uint64) uint64 { n++; return n % of })
	require.NoError(t, err)
	return string(a.AppendPrefill(nil, &q)), string(a.AppendDecode(nil, &q, nil))
}

func fetch(t testing.TB, method, url, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	require.NoError(t, err)
	resp, err := client.Do(req)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(b)
}

func TestMooncake(t *testing.T) {
	p, d, legs := mooncakePair(t)
	prompt := words(1, 70)
	want := unbroken(t, prompt)
	first, second := legs("a", prompt, `,"cache_salt":"a"`)
	answer := async(t, d, second)
	assert.Equal(t, "null", string(readLeg(t, <-async(t, p, first)).Params))
	assert.Equal(t, want, textOf(t, <-answer))
	leasesEnd(t, p)

	_, second = legs("b", prompt, `,"cache_salt":"b"`)
	second = strings.ReplaceAll(second, p.ranks[0].exchange.id, "unknown")
	status, body := ask(t, d, "/v1/completions", second)
	assert.Equal(t, http.StatusInternalServerError, status)
	isBody(t, failedBody, body)

	first, _ = legs("c", prompt, "") // a leg that stops keeps nothing
	first = strings.Replace(first, `"ignore_eos":true`, `"stop":["`+want[:1]+`"]`, 1)
	_, body = ask(t, p, "/v1/completions", first)
	assert.Equal(t, "stop", readLeg(t, body).Choices[0].Finish)
	assert.Zero(t, p.Stats().Leases)

	_, second = legs("d", prompt, `,"cache_salt":"d"`)
	gone := leave(t, d, strings.Replace(second, `"transfer_id"`, `"x"`, 1))
	eventually(t, func() bool { return d.Stats().Loading == 1 })
	gone()
	eventually(t, func() bool { return d.Stats().Loading == 0 })
	assert.False(t, d.dead.Load())

	_, body = ask(t, p, "/v1/completions", second)
	isBody(t, deadBody, body, "a decode leg ends a kv_producer")
	first, _ = legs("e", prompt, "")
	_, body = ask(t, d, "/v1/completions", first)
	isBody(t, deadBody, body, "a prefill leg ends a kv_consumer")
}

func sglangPair(t *testing.T, change ...func(*Config)) (
	p, d *Server, legs func(body string) (prefill, decode string),
) {
	p, d = startPair(t, append(change, func(c *Config) {
		c.Transfer.Connector = ConnectorSGLang
		if c.Transfer.Role == RoleConsumer {
			c.InternalLB = 0
		}
	})...)
	tr, _ := transfer.Named(transfer.SGLangName)
	query, err := tr.(transfer.Bootstrapper).Query(p.bootstrap.url())
	require.NoError(t, err)
	status, body := fetch(t, query.Method, query.URL, "")
	peer, err := tr.(transfer.Bootstrapper).ReadPeer(p.bootstrap.url(), max(0, len(p.ranks)-1), status,
		[]byte(body))
	require.NoError(t, err, body)
	return p, d, func(body string) (string, string) { return legsOf(t, tr, peer, "id", body) }
}

func TestSGLang(t *testing.T) {
	p, d, legs := sglangPair(t)
	prompt := words(1, 70)
	want := unbroken(t, prompt)
	for _, more := range []string{"", `,"stream":true`} {
		first, second := legs(completionBody(prompt, more))
		leg := async(t, p, first)
		eventually(t, func() bool { return p.Stats().InFlight == 1 })
		answer := <-async(t, d, second)
		if more != "" {
			assert.Equal(t, want, streamText(t, answer))
			assert.Equal(t, 1, strings.Count(<-leg, `"text"`), "one token")
		} else {
			assert.Equal(t, want, textOf(t, answer))
			assert.Equal(t, 1, strings.Count(<-leg, `"completion_tokens":1`))
		}
		leasesEnd(t, p)
	}
	two := `{"prompt":["` + prompt + `","` + words(2, 40) + `"],"max_tokens":24}`
	first, second := legs(two)
	answer := async(t, d, second)
	<-async(t, p, first)
	got := readLeg(t, <-answer)
	assert.Equal(t, want, got.Choices[0].Text)
	assert.Equal(t, unbroken(t, words(2, 40)), got.Choices[1].Text)

	for _, s := range []*Server{p, d} {
		status, body := ask(t, s, "/v1/completions", completionBody(prompt, ""))
		assert.Equal(t, http.StatusBadRequest, status)
		assert.Contains(t, body, msgNoRoom)
	}
	healthy := strings.Replace(second, `"127.0.0.1"`, `"`+fakeBootstrap+`"`, 2)
	status, _ := ask(t, d, "/v1/completions", healthy)
	assert.Equal(t, http.StatusOK, status)

	answer = async(t, d, second)
	isBody(t, deadBody, <-async(t, p, first), "a room that is used twice ends both")
	isBody(t, deadBody, <-answer)
}

func TestSGLangFailures(t *testing.T) {
	p, d, legs := sglangPair(t, func(c *Config) {
		c.Transfer.HandshakeMax, c.Model.Speed = time.Second, 1000 // what is scaled is quick
	})
	prompt := words(1, 70)
	_, second := legs(completionBody(prompt, ""))
	answer := async(t, d, second)
	eventually(t, func() bool { return d.Stats().Loading == 1 })
	first, _ := legs(completionBody(prompt, "")) // another room: its decode leg never comes
	gone := leave(t, p, first)
	eventually(t, func() bool { return p.Stats().InFlight == 1 })
	gone()
	eventually(t, func() bool { return p.Stats().InFlight == 0 })
	eventually(t, func() bool { return waitsFor(p) == 1 }) // d
	require.NoError(t, p.Close())
	assert.Contains(t, <-answer, msgLostPeer)
	_, second = legs(completionBody(prompt, ""))
	status, body := ask(t, d, "/v1/completions", second)
	assert.Equal(t, http.StatusInternalServerError, status)
	assert.Contains(t, body, msgNoRoute)

	c := pairConfig(RoleProducer)
	c.Transfer.Connector, c.Model.BlockSize = ConnectorSGLang, 16
	other := start(t, c)
	_, port, _ := strings.Cut(strings.TrimPrefix(other.bootstrap.url(), "http://"), ":")
	status, body = ask(t, d, "/v1/completions", completionBody(prompt, `,"bootstrap_host":"127.0.0.1",`+
		`"bootstrap_room":5,"bootstrap_port":`+port))
	assert.Equal(t, http.StatusInternalServerError, status)
	assert.Contains(t, body, "page size mismatch: prefill 16, decode 32")
}

// waitsFor is how many keys are waited for or offered.
func waitsFor(s *Server) int {
	o := &s.ranks[0].exchange.offers
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.byKey)
}

// Two ranks behind one port: the room says which one computes the prompt, and a contradiction is refused.
func TestSGLangRanks(t *testing.T) {
	p, d, legs := sglangPair(t, func(c *Config) { c.InternalLB = 2 })
	first, second := legs(completionBody(words(1, 70), ""))
	assert.Contains(t, first, `"disagg_prefill_dp_rank":1`)
	answer := async(t, d, second)
	<-async(t, p, first)
	assert.Equal(t, unbroken(t, words(1, 70)), textOf(t, <-answer))
	assert.Zero(t, p.ranks[0].stats().PromptTokens)
	assert.EqualValues(t, 70, p.ranks[1].stats().PromptTokens)
	status, body := ask(t, p, "/v1/completions", completionBody("x",
		`,"bootstrap_host":"127.0.0.1","bootstrap_room":4,"routed_dp_rank":1`))
	assert.Equal(t, http.StatusInternalServerError, status)
	assert.Contains(t, body, fmt.Sprintf(msgOtherRank, 1, 4, 0))
	for _, bad := range []string{`"bootstrap_room":-1`, `"bootstrap_room":[1,2]`, `"bootstrap_room":"x"`} {
		status, _ := ask(t, p, "/v1/completions", completionBody("x", `,"bootstrap_host":"h",`+bad))
		assert.Equal(t, http.StatusBadRequest, status, bad)
	}
}

// The ranks of a lockstep group register at the bootstrap server of rank 0; it says nothing before all did.
func TestSGLangGroup(t *testing.T) {
	c := pairConfig(RoleProducer)
	c.RPCAddr = ports.TakeAddr(t)
	c.Transfer.Connector, c.Transfer.BootstrapPort = ConnectorSGLang, ports.Take(t, 1)
	group, err := startGroup(t.Context(), c, 2)
	require.NoError(t, err)
	for _, s := range group {
		t.Cleanup(func() { assert.NoError(t, s.Close()) })
	}
	assert.Nil(t, group[1].bootstrap)
	base := "http://127.0.0.1:" + strconv.Itoa(c.Transfer.BootstrapPort)
	route := base + "/route?prefill_dp_rank=%d&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
	var info routeInfo
	for i := range 2 {
		status, body := fetch(t, http.MethodGet, fmt.Sprintf(route, i), "")
		require.Equal(t, http.StatusOK, status, body)
		require.NoError(t, json.Unmarshal([]byte(body), &info))
		assert.Equal(t, [2]int{2, group[i].ranks[0].exchange.side.port()}, [2]int{info.DPSize, info.RankPort})
	}
	for _, c := range []struct {
		method, path, body string
		status             int
	}{
		{"GET", "/health", "", 200},
		{"GET", "/query", "", 404},
		{"GET", "/route?prefill_dp_rank=7", "", 404},
		{"GET", "/route?prefill_dp_rank=-2", "", 400},
		{"GET", "/route", "", 400},
		{"PUT", "/route", `{"dp_rank":7,"rank_ip":"h","rank_port":1}`, 400},
		{"PUT", "/route", `[`, 400},
		{"POST", "/register_dp_rank", `{"bootstrap_room":9,"dp_rank":1}`, 200},
		{"POST", "/register_dp_rank", `{"dp_rank":1}`, 400},
		{"POST", "/query_dp_ranks", `{"bootstrap_rooms":"x"}`, 400},
	} {
		status, body := fetch(t, c.method, base+c.path, c.body)
		assert.Equal(t, c.status, status, "%s %s %s: %s", c.method, c.path, c.body, body)
	}
	_, body := fetch(t, http.MethodPost, base+"/query_dp_ranks", `{"bootstrap_rooms":[8,9]}`)
	assert.JSONEq(t, `{"9":1}`, body)

	b := &bootstrap{server: group[0], ranks: map[int]routeInfo{}}
	require.NoError(t, b.register(routeInfo{Rank: 1, RankIP: "h", RankPort: 1}))
	w := &recorded{header: http.Header{}}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf(route, -1), nil)
	require.NoError(t, err)
	b.ServeHTTP(w, req)
	assert.Equal(t, http.StatusServiceUnavailable, w.status)
}

// Two lockstep groups: each rank gives and takes blocks by itself, under its own engine id.
func TestPullBetweenGroups(t *testing.T) {
	groups := [2][]*Server{}
	for i, role := range []string{RoleProducer, RoleConsumer} {
		c := pairConfig(role)
		c.RPCAddr = ports.TakeAddr(t)
		group, err := startGroup(t.Context(), c, 2)
		require.NoError(t, err)
		for _, s := range group {
			t.Cleanup(func() { assert.NoError(t, s.Close()) })
		}
		groups[i] = group
	}
	prompt := words(1, 70)
	want := unbroken(t, prompt)
	for i, p := range groups[0] {
		params := prefill(t, p, prompt)
		assert.Regexp(t, `"remote_engine_id":"[0-9a-f-]{36}_dp`+strconv.Itoa(i)+`"`, params)
		for k, d := range groups[1] {
			_, body := decode(t, d, prompt, params, fmt.Sprintf(`,"cache_salt":"%d%d"`, i, k))
			assert.Equal(t, want, textOf(t, body))
			params = prefill(t, p, prompt)
		}
	}
}

type recorded struct {
	header http.Header
	status int
	body   []byte
}

func (r *recorded) Header() http.Header { return r.header }

func (r *recorded) WriteHeader(status int) { r.status = status }

func (r *recorded) Write(b []byte) (int, error) {
	r.body = append(r.body, b...)
	return len(b), nil
}
