package ingress

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// remembers makes a fake replica record the blocks that it was sent, as a DPServer does, and publish them in
// its stream.
func remembers(tb testing.TB, r *replica) {
	tb.Helper()
	ix, err := kvindex.New(kvindex.Config{
		Bytes: 64 << 20,
		OnChange: func(_ *kvindex.BlockSet, d kvindex.Delta) {
			r.emit(&msg.Record{Kind: msg.RecKV, KV: msg.KV{Tier: kvindex.Sent, Delta: d}})
		},
	})
	require.NoError(tb, err)
	c, err := ix.Open(kvindex.Owner{Rank: uint32(r.id), Tier: kvindex.Sent},
		kvindex.Options{Feed: kvindex.FromRecords})
	require.NoError(tb, err)
	r.mu.Lock()
	r.emit(&msg.Record{Kind: msg.RecKVBegin, KV: msg.KV{
		Tier: kvindex.Sent, BlockSize: kvindex.DefaultTextBlock,
	}})
	r.emit(&msg.Record{Kind: msg.RecKVEnd, KV: msg.KV{Tier: kvindex.Sent}})
	r.mu.Unlock()
	began := time.Now()
	r.setRefuse(func(m *msg.Admit) msg.Refusal {
		c.Record(m.Blocks, time.Since(began))
		return msg.Granted
	})
}

func withRouting(policy string, more ...func(*app.Application)) func(*app.Application) {
	return func(a *app.Application) {
		a.Routing = app.Routing{Policy: policy, Preset: "documented", Identity: app.IdentityText}
		for _, m := range more {
			m(a)
		}
	}
}

func engines(n int, h http.HandlerFunc) []http.HandlerFunc {
	return slices.Repeat([]http.HandlerFunc{h}, n)
}

// TestPromptGoesToItsHolder: a longer prompt goes to the rank that holds its beginning; the answer, the
// admission and the account show the length of the hit.
func TestPromptGoesToItsHolder(t *testing.T) {
	g := newRig(t, options{
		engines: engines(4, sends(textChunk, stopChunk, usageChunk, doneEvent)),
		app:     withRouting("lpwl"),
	})
	for _, r := range g.replicas {
		remembers(t, r)
	}
	words := strings.Repeat("shared words ", 200)
	first := g.post("/v1/chat/completions", chat(words, `"stream":true`))
	assert.Equal(t, "0", first.header.Get(headerCached))
	for turn := range 6 {
		next := g.post("/v1/chat/completions", chat(words+strings.Repeat("more ", turn), `"stream":true`))
		assert.Equal(t, first.header.Get(headerRank), next.header.Get(headerRank))
		assert.NotEqual(t, "0", next.header.Get(headerCached))
	}
	var last msg.Done
	for _, r := range g.replicas {
		if r.granted() > 0 {
			last = r.lastDone(t)
		}
	}
	assert.True(t, last.HasCached)
	assert.Equal(t, 3, last.CachedTokens)
	assert.NotZero(t, g.in.Index("demo").Blocks)
}

// TestAdmitCarriesBlocksAndHit: the hit in an Admit is the hit that the policy saw.
func TestAdmitCarriesBlocksAndHit(t *testing.T) {
	g := newRig(t, options{engines: engines(1, replies(200, wholeAnswer)), app: withRouting("scoring")})
	var mu sync.Mutex
	var seen []msg.Admit
	remembers(t, g.replicas[0])
	record := g.replicas[0].refuse
	g.replicas[0].setRefuse(func(m *msg.Admit) msg.Refusal {
		mu.Lock()
		defer mu.Unlock()
		kept := *m
		kept.Blocks = slices.Clone(m.Blocks)
		seen = append(seen, kept)
		return record(m)
	})
	ids := strings.Repeat("5,", 100)
	g.post("/v1/completions", `{"prompt":[`+ids+`1]}`)
	g.post("/v1/completions", `{"prompt":[`+ids+ids+`1]}`)
	g.post("/tokenize", `{"prompt":"`+strings.Repeat("x", 640)+`"}`)
	require.Len(t, seen, 2, "a text to be tokenized takes no ticket, and leaves nothing in a cache")
	assert.Equal(t, []int{101, 0, 6, 0}, []int{
		seen[0].Tokens, seen[0].Hit, len(seen[0].Blocks),
		seen[0].HitBlocks,
	})
	assert.Equal(t, []int{201, 96, 12, 6}, []int{
		seen[1].Tokens, seen[1].Hit, len(seen[1].Blocks),
		seen[1].HitBlocks,
	})
	assert.Equal(t, seen[0].Blocks, seen[1].Blocks[:6])
}

// RA5: a session that another ingress sent to a rank stays on that rank here too, whether its header or the
// body's user names it, and the rank is told the session of each request.
func TestSessionsOfOtherIngressesStay(t *testing.T) {
	g := newRig(t, options{
		engines: engines(4, replies(200, wholeAnswer)),
		app:     withRouting("session-affinity", func(a *app.Application) { a.Routing.Preset = "tuned" }),
	})
	var mu sync.Mutex
	told := map[uint64]int{}
	for _, r := range g.replicas {
		r.setRefuse(func(m *msg.Admit) msg.Refusal {
			mu.Lock()
			defer mu.Unlock()
			told[m.Session]++
			return msg.Granted
		})
	}
	for n := range 12 {
		name, home := fmt.Sprint("session-", n), g.replicas[n%4]
		home.mu.Lock()
		home.emit(&msg.Record{
			Kind: msg.RecAdmitted, ReqID: uint64(n), Ingress: "n9", Tokens: 10,
			Session: routing.SessionKey(name),
		})
		home.emit(&msg.Record{Kind: msg.RecDone, ReqID: uint64(n), Ingress: "n9", Tokens: 10})
		home.mu.Unlock()
		body, header := chatBody, []string{[]string{headerSessionID, headerSession}[n%2], name}
		if n%3 == 0 {
			body, header = chat("hi", `"user":"`+name+`"`), nil
		}
		a := g.post("/v1/chat/completions", body, header...)
		assert.Equal(t, strconv.Itoa(n%4), a.header.Get(headerRank))
		assert.Equal(t, 1, told[routing.SessionKey(name)])
	}
	g.post("/v1/chat/completions", chatBody)
	assert.Equal(t, 1, told[0])
}

// RA7: package app names the default policy without importing package routing.
func TestTheDefaultPolicyExists(t *testing.T) {
	for _, c := range []app.Coupling{app.Independent, app.Lockstep} {
		p, err := routing.New(app.DefaultPolicy(c), routing.PresetDocumented, nil)
		require.NoError(t, err)
		assert.Equal(t, app.DefaultPolicy(c), p.Name())
	}
}

// TestAttemptsOfThePolicy: cache-aware, documented, gives a request six attempts, three of them on one rank.
func TestAttemptsOfThePolicy(t *testing.T) {
	g := newRig(t, options{
		engines: engines(3, replies(500, `{}`)),
		app:     withRouting("cache-aware"),
	})
	a := g.post("/v1/chat/completions", chat(strings.Repeat("words ", 50)))
	assert.Equal(t, http.StatusInternalServerError, a.status)
	assert.Equal(t, "6", a.header.Get(headerAttempts))
	counts := []int{}
	for _, r := range g.replicas {
		counts = append(counts, r.granted())
		assert.LessOrEqual(t, r.granted(), 3)
	}
	assert.Equal(t, 6, counts[0]+counts[1]+counts[2])
}

// TestCachingOffMeansNoHits: engines without prefix caching have no hits, whatever they were sent.
func TestCachingOffMeansNoHits(t *testing.T) {
	g := newRig(t, options{engines: engines(2, replies(200, wholeAnswer)), app: withRouting("scoring")})
	for _, r := range g.replicas {
		remembers(t, r)
	}
	ar := g.in.findAppRouter("demo")
	body := chat(strings.Repeat("words ", 100))
	g.post("/v1/chat/completions", body)
	assert.NotEqual(t, "0", g.post("/v1/chat/completions", body).header.Get(headerCached))
	ar.mu.Lock()
	for _, r := range ar.ranks {
		r.cachingOff = true
	}
	ar.updateCachingOff()
	ar.mu.Unlock()
	a := g.post("/v1/chat/completions", body)
	assert.Empty(t, a.header.Get(headerCached))
	assert.True(t, ar.router.Load().Snapshot().PrefixCachingOff)
}

// TestBlocksOfAnUnansweredAdmitStay: blocks that an Admit without a reply may still hold are not reused.
func TestBlocksOfAnUnansweredAdmitStay(t *testing.T) {
	t.Parallel()
	g := newRig(t, options{
		engines: engines(1, replies(200, wholeAnswer)), app: withRouting("scoring"),
		timers: Timers{Admit: 20 * time.Millisecond, LateTicket: 50 * time.Millisecond},
	})
	r := g.replicas[0]
	r.mu.Lock()
	r.mute = true
	r.mu.Unlock()
	for n := range 20 {
		g.post("/v1/chat/completions", chat(strings.Repeat(fmt.Sprintf("words of %d ", n), 50)))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	require.NotEmpty(t, r.held)
	seen := map[uint64]bool{}
	for _, m := range r.held {
		require.NotEmpty(t, m.Blocks)
		assert.False(t, seen[m.Blocks[0]], "each has its own")
		seen[m.Blocks[0]] = true
	}
	r.mute = false
}

// tokenizing is an engine whose tokenizer makes one token of four bytes, and counts its calls.
type tokenizing struct {
	mu    sync.Mutex
	asked []string
	fail  int // status; 0: none
	wait  chan struct{}
}

func (e *tokenizing) serve(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/tokenize" {
		replies(200, wholeAnswer)(w, r)
		return
	}
	var body json.RawMessage
	if json.NewDecoder(r.Body).Decode(&body) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	e.mu.Lock()
	e.asked = append(e.asked, string(body))
	fail, wait := e.fail, e.wait
	e.mu.Unlock()
	if wait != nil {
		<-wait
	}
	if fail != 0 {
		w.WriteHeader(fail)
		return
	}
	ids := []uint32{}
	for b := []byte(body); len(b) >= 4; b = b[4:] {
		ids = append(ids, uint32(b[0])<<16|uint32(b[1])<<8|uint32(b[2]))
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"count": len(ids), "tokens": ids})
}

func (e *tokenizing) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.asked)
}

func tokenRig(t *testing.T, e *tokenizing) (*rig, func() []msg.Admit) {
	g := newRig(t, options{
		engines: engines(1, e.serve),
		app:     withRouting("scoring", func(a *app.Application) { a.Routing.Identity = app.IdentityTokens }),
	})
	var mu sync.Mutex
	var seen []msg.Admit
	g.replicas[0].setRefuse(func(m *msg.Admit) msg.Refusal {
		mu.Lock()
		defer mu.Unlock()
		kept := *m
		kept.Blocks = slices.Clone(m.Blocks)
		seen = append(seen, kept)
		return msg.Granted
	})
	return g, func() []msg.Admit {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(seen)
	}
}

// TestTokenIdentity: an engine tokenizes a text once, then the answer is known. Its blocks are those of its
// ids.
func TestTokenIdentity(t *testing.T) {
	e := &tokenizing{}
	g, admits := tokenRig(t, e)
	body := chat(strings.Repeat("words ", 100), `"tools":[{"a":1}]`)
	for range 3 {
		require.Equal(t, http.StatusOK, g.post("/v1/chat/completions", body).status)
	}
	g.post("/v1/completions", `{"model":"demo","prompt":"`+strings.Repeat("text ", 50)+`"}`)
	g.post("/v1/completions", `{"prompt":[`+strings.Repeat("9,", 50)+`1]}`)
	require.Equal(t, 2, e.count(), "ids of the client are not asked for")
	assert.Contains(t, e.asked[0], `"tools":[{"a":1}]`)
	all := admits()
	ids := make([]uint32, 0, 300)
	for b := []byte(e.asked[0]); len(b) >= 4; b = b[4:] {
		ids = append(ids, uint32(b[0])<<16|uint32(b[1])<<8|uint32(b[2]))
	}
	var want prompt
	want.fromTokens(g.in.findAppRouter("demo"), ids, "")
	assert.Equal(t, want.blocks, all[0].Blocks)
	assert.Equal(t, all[0].Blocks, all[2].Blocks)
	assert.Equal(t, len(ids), all[0].Tokens)
	assert.False(t, all[0].Estimated)
	assert.Equal(t, app.IdentityTokens, g.in.Identity("demo"))
}

// RP39: equal prompts that arrive together share one call, which goes on when the client leaves that came
// first.
func TestTokenizeFliesOnce(t *testing.T) {
	e := &tokenizing{wait: make(chan struct{})}
	g, admits := tokenRig(t, e)
	body := chat(strings.Repeat("words ", 100))
	var first, all sync.WaitGroup
	ctx, leave := context.WithCancel(t.Context())
	first.Go(func() { g.postCtx(ctx, "/v1/chat/completions", body) })
	eventually(t, func() bool { return e.count() == 1 }, "asked")
	for range 8 {
		all.Go(func() { g.post("/v1/chat/completions", body) })
	}
	eventually(t, func() bool { _, _, inflight := g.in.Totals(); return inflight == 9 }, "all have come")
	leave()
	first.Wait()
	close(e.wait)
	all.Wait()
	assert.Equal(t, 1, e.count())
	for _, m := range admits() {
		assert.False(t, m.Estimated)
	}
}

// TestTokenizeFallsBackToText: a prompt is identified by its text if it has images, or if the engine refuses
// or fails. After a failure there is no call for a while.
func TestTokenizeFallsBackToText(t *testing.T) {
	e := &tokenizing{fail: http.StatusBadRequest}
	g, admits := tokenRig(t, e)
	g.post("/v1/chat/completions", chat(strings.Repeat("words ", 100)))
	g.post("/v1/chat/completions", chat(strings.Repeat("other words ", 100)))
	assert.Equal(t, 2, e.count(), "a refusal is about one prompt")
	g.post("/v1/chat/completions",
		`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:`+strings.Repeat(
			"a", 300)+`"}}]}]}`)
	assert.Equal(t, 2, e.count())
	e.mu.Lock()
	e.fail = http.StatusInternalServerError
	e.mu.Unlock()
	for n := range 5 {
		g.post("/v1/chat/completions", chat(strings.Repeat(fmt.Sprint("words ", n), 100)))
	}
	assert.Equal(t, 3, e.count())
	for _, m := range admits() {
		assert.True(t, m.Estimated)
		assert.NotEmpty(t, m.Blocks)
	}
}

// TestMembersBesideThePromptAreOfItsIdentity: some fields of a body change the prompt's tokens, and no
// /tokenize accepts them. Such a prompt is identified by its text, and prompts that differ in one of these
// fields share nothing, whatever their identity.
func TestMembersBesideThePromptAreOfItsIdentity(t *testing.T) {
	text := strings.Repeat("words ", 100)
	for _, member := range []string{
		`"documents":[{"text":"a"}]`, `"reasoning_effort":"high"`,
		`"truncate_prompt_tokens":16`, `"tool_choice":"none"`,
	} {
		e := &tokenizing{}
		g, admits := tokenRig(t, e)
		for _, body := range []string{
			chat(text), chat(text, member), chat(text, member),
			chat(text, `"tool_choice":"auto","documents":null`),
		} {
			require.Equal(t, http.StatusOK, g.post("/v1/chat/completions", body).status)
		}
		assert.Equal(t, 1, e.count(), "asked for the two without it")
		all := admits()
		assert.NotEmpty(t, all[1].Blocks)
		assert.Equal(t, all[1].Blocks, all[2].Blocks)
		assert.NotEqual(t, all[0].Blocks[0], all[1].Blocks[0])
		assert.Equal(t, all[0].Blocks, all[3].Blocks)

		ar := promptRouter(wantsAll)
		plain, with, again := readPrompt(t, ar, openai.Chat, chat(text)),
			readPrompt(t, ar, openai.Chat, chat(text, member)),
			readPrompt(t, ar, openai.Chat, chat(text, member))
		assert.Zero(t, shared(plain, with), member)
		assert.Equal(t, with.blocks, again.blocks, member)
	}
}

// TestTokenizedIsBounded: the cache of tokenized prompts keeps its limit and evicts the least recently used.
func TestTokenizedIsBounded(t *testing.T) {
	c := newChainCache(10 * (tokenizedBytes + 80))
	key := func(n int) tokenizeKey { return tokenizeKey{root: uint64(n)} }
	for n := range 100 {
		c.put(key(n), &tokenChain{blocks: make([]uint64, 10)})
		assert.LessOrEqual(t, c.bytes, c.limit)
		require.NotNil(t, c.get(key(0)), "used all the time")
	}
	assert.Len(t, c.at, 10)
	assert.Equal(t, 10, c.order.Len())
	c.put(key(1000), &tokenChain{blocks: make([]uint64, 1000)})
	assert.Nil(t, c.get(key(1000)), "too large to be kept")
}
