package ingress

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// promptRouter is an appRouter whose policy reads hits, blocks, text and sessions.
func promptRouter(needs routing.Needs) *appRouter {
	in := bareIngress()
	in.setSecret([]byte("secret"))
	ar := newAppRouter(in, "demo")
	a := demoApp()
	a.Model.Adapters = []app.Adapter{{ID: "poet", Source: "s"}}
	ar.revision.Store(&appRevision{app: a, adapters: adaptersOf(&a.Model)})
	ar.policyInputs.Store(&policyInputs{needs: needs, identity: app.IdentityText})
	return ar
}

// readPrompt identifies a body as a live request's.
func readPrompt(t require.TestingT, ar *appRouter, route openai.Route, body string,
	header ...string,
) *prompt {
	var scan openai.Body
	require.NoError(t, scan.Scan(route, []byte(body)))
	h := http.Header{}
	for i := 0; i+1 < len(header); i += 2 {
		h.Set(header[i], header[i+1])
	}
	p := &prompt{}
	adapter := ar.adapterOf(scan.Model)
	require.Nil(t, p.fromBody(context.Background(), ar, route, adapter, &scan, []byte(body), h))
	return p
}

func chat(content string, more ...string) string {
	return `{"model":"demo",` + strings.Join(append(more, ""), ",") +
		`"messages":[{"role":"user","content":"` + content + `"}]}`
}

func shared(a, b *prompt) int {
	n := 0
	for n < min(len(a.blocks), len(b.blocks)) && a.blocks[n] == b.blocks[n] {
		n++
	}
	return n
}

var wantsAll = routing.Needs{Hits: true, Blocks: true, Text: true, Session: true}

// TestKV12NothingIsSharedUnderAnotherSalt: the same words under another cache_salt, LoRA, set of tools or
// image share no block and no text.
func TestKV12NothingIsSharedUnderAnotherSalt(t *testing.T) {
	ar := promptRouter(wantsAll)
	words := strings.Repeat("the same words ", 100)
	ids := strings.TrimSuffix(strings.Repeat("7,", 100), ",")
	image := func(url string) string {
		return `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:` +
			strings.Repeat(url, 30) + `"}},{"type":"text","text":"` + words + `"}]}]}`
	}
	for name, pair := range map[string][2]*prompt{
		"salt": {
			readPrompt(t, ar, openai.Chat, chat(words, `"cache_salt":"a"`)),
			readPrompt(t, ar, openai.Chat, chat(words, `"cache_salt":"b"`)),
		},
		"one salt": {
			readPrompt(t, ar, openai.Chat, chat(words)),
			readPrompt(t, ar, openai.Chat, chat(words, `"cache_salt":"b"`)),
		},
		"LoRA": {
			readPrompt(t, ar, openai.Chat, chat(words)),
			readPrompt(t, ar, openai.Chat, strings.Replace(chat(words), "demo", "poet", 1)),
		},
		"tools": {
			readPrompt(t, ar, openai.Chat, chat(words)),
			readPrompt(t, ar, openai.Chat, chat(words, `"tools":[{"a":1}]`)),
		},
		"image": {
			readPrompt(t, ar, openai.Chat, image("abc")),
			readPrompt(t, ar, openai.Chat, image("xyz")),
		},
		"ids": {
			readPrompt(t, ar, openai.Completions, `{"prompt":[`+ids+`]}`),
			readPrompt(t, ar, openai.Completions, `{"cache_salt":"b","prompt":[`+ids+`]}`),
		},
		"ids and text": {
			readPrompt(t, ar, openai.Completions, `{"prompt":[`+ids+`]}`),
			readPrompt(t, ar, openai.Completions, `{"prompt":"`+ids+`"}`),
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := pair[0], pair[1]
			assert.NotEmpty(t, a.blocks)
			if n := shared(a, b); name == "image" {
				assert.LessOrEqual(t, n, 1, "no more than what stands before the image is the same")
			} else {
				assert.Zero(t, n)
				assert.NotEqual(t, a.text, b.text)
			}
		})
	}
	assert.Equal(t, readPrompt(t, ar, openai.Chat,
		strings.Replace(chat(words), "demo", "demo:poet", 1)).blocks,
		readPrompt(t, ar, openai.Chat, strings.Replace(chat(words), "demo", "poet", 1)).blocks,
		"one adapter by both its names")
}

// TestKV12LongPromptHitsWhole: 4,096 blocks on 32 ranks are found on all ranks, up to the last block that a
// hit may have.
func TestKV12LongPromptHitsWhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newKVRig(t, 32, 1, byScore)
		ids := make([]uint32, 4096*16+1)
		for i := range ids {
			ids[i] = uint32(i % 1000)
		}
		var p prompt
		p.fromTokens(g.router, ids, "")
		require.Len(t, p.blocks, 4096)
		for _, r := range g.feed.replicas {
			r.blockSet(t, kvindex.GPU).Apply(kvindex.Delta{Change: kvindex.Stored, Hashes: p.blocks})
		}
		synctest.Wait()
		var q routing.Request
		g.router.describeRequest(&q, &p)
		require.Len(t, q.Hits, 32)
		for i, h := range q.Hits {
			assert.Equal(t, routing.Hit{Rank: routing.ID(0, i), Tokens: 4096 * 16}, h)
			assert.Equal(t, 4096, p.cachedPrefix(h.Rank))
		}
		p.fromTokens(g.router, ids[:4096*16], "")
		g.router.describeRequest(&q, &p)
		assert.Equal(t, int32(4095*16), q.Hits[0].Tokens,
			"the last token is always computed, and with it its block")
	})
}

// TestHitsByTier: the record of sent blocks counts as GPU; memory and disk count for the blocks after that.
func TestHitsByTier(t *testing.T) {
	p := &prompt{unit: kvindex.Tokens, size: 16, tokens: 1000, perBlock: ratio{16, 1}}
	rows := func(gpu, sent, cpu, disk int32) []kvindex.Hit {
		return []kvindex.Hit{
			{Rank: 5, Tier: kvindex.GPU, Blocks: gpu},
			{Rank: 5, Tier: kvindex.CPU, Blocks: cpu},
			{Rank: 5, Tier: kvindex.Disk, Blocks: disk},
			{Rank: 5, Tier: kvindex.Sent, Blocks: sent},
		}
	}
	assert.Equal(t, routing.Hit{Rank: 5, Tokens: 64, Host: 32, Disk: 16}, p.hitOf(rows(2, 4, 6, 7)))
	assert.Equal(t, routing.Hit{Rank: 5, Tokens: 992}, p.hitOf(rows(1000, 0, 3, 0)))
	p = &prompt{unit: kvindex.Text, tokens: 1000, perBlock: ratio{1000, 4000}}
	assert.Equal(t, routing.Hit{Rank: 5, Tokens: 3 * kvindex.DefaultTextBlock / 4}, p.hitOf(rows(0, 3, 0, 0)),
		"3 blocks of 4 bytes per token")
}

// TestRT14OddPrompts: prompts of every size and kind are identified without a panic, and short ones have no
// blocks.
func TestRT14OddPrompts(t *testing.T) {
	const block = kvindex.DefaultTextBlock
	ar := promptRouter(wantsAll)
	for name, tt := range map[string]struct {
		route  openai.Route
		body   string
		blocks int
	}{
		"short":         {openai.Completions, `{"prompt":"hello"}`, 0},
		"empty":         {openai.Completions, `{"prompt":""}`, 0},
		"no prompt":     {openai.Completions, `{}`, 0},
		"null":          {openai.Completions, `{"prompt":null}`, 0},
		"no ids":        {openai.Completions, `{"prompt":[]}`, 0},
		"empty list":    {openai.Chat, `{"messages":[]}`, 0},
		"empty lists":   {openai.Completions, `{"prompt":[[],[]]}`, 0},
		"ids too large": {openai.Completions, `{"prompt":[` + strings.Repeat("4294967296,", 40) + `1]}`, 0},
		"one block":     {openai.Completions, `{"prompt":"` + strings.Repeat("x", block) + `"}`, 1},
		"two prompts":   {openai.Completions, `{"prompt":["` + strings.Repeat("x", 2*block) + `","y"]}`, 2},
		"ids":           {openai.Completions, `{"prompt":[` + strings.Repeat("5,", 40) + `1]}`, 2},
		"image only": {
			openai.Chat,
			`{"messages":[{"role":"user","content":[{"type":"image_url",` +
				`"image_url":{"url":"data:image/png;base64,` + strings.Repeat("A", 4*block) + `"}}]}]}`, 4,
		},
		"1 MiB": {
			openai.Completions, `{"prompt":"` + strings.Repeat("x", 1<<20) + `"}`,
			80,
		},
		"tokenize":       {openai.Tokenize, `{"prompt":"` + strings.Repeat("x", 640) + `"}`, 0},
		"not text":       {openai.Chat, `{"messages":"` + strings.Repeat("x", 10*block) + `"}`, 10},
		"broken unicode": {openai.Completions, `{"prompt":"` + strings.Repeat("\xff\xfe", block) + `"}`, 2},
	} {
		t.Run(name, func(t *testing.T) {
			p := readPrompt(t, ar, tt.route, tt.body)
			assert.Len(t, p.blocks, tt.blocks)
			var q routing.Request
			ar.describeRequest(&q, p)
			assert.Empty(t, q.Hits)
			assert.GreaterOrEqual(t, q.Tokens, 0)
		})
	}
	a := readPrompt(t, ar, openai.Completions, `{"prompt":"`+strings.Repeat("é", block/2-1)+"\u00e9"+`"}`)
	b := readPrompt(t, ar, openai.Completions, `{"prompt":"`+strings.Repeat("é", block/2-1)+"\u00e8"+`"}`)
	assert.NotEqual(t, a.blocks, b.blocks, "a fork inside a character is a fork")
}

// TestPromptsAreReadAsNeeded: only what the policy reads is made.
func TestPromptsAreReadAsNeeded(t *testing.T) {
	body := chat(strings.Repeat("words ", 100), `"user":"u"`)
	for _, tt := range []struct {
		needs           routing.Needs
		blocks, text, s bool
	}{
		{routing.Needs{}, false, false, false},
		{routing.Needs{Hits: true}, true, false, false},
		{routing.Needs{Blocks: true}, true, false, false},
		{routing.Needs{Text: true}, false, true, false},
		{routing.Needs{Session: true}, false, false, true},
	} {
		p := readPrompt(t, promptRouter(tt.needs), openai.Chat, body)
		assert.Equal(t, tt.blocks, len(p.blocks) > 0)
		assert.Equal(t, tt.text, len(p.text) > 0)
		assert.Equal(t, tt.s, p.session != "")
		assert.Positive(t, p.tokens)
	}
}

func TestSessionOf(t *testing.T) {
	h := func(kv ...string) http.Header {
		out := http.Header{}
		for i := 0; i < len(kv); i += 2 {
			out.Set(kv[i], kv[i+1])
		}
		return out
	}
	assert.Equal(t, "a", sessionOf(h("x-session-id", "a", "x-dpserve-session", "b"), []byte("u")))
	assert.Equal(t, "b", sessionOf(h("x-dpserve-session", "b"), []byte("u")))
	assert.Equal(t, "u", sessionOf(h("x-session-id", ""), []byte("u")))
	assert.Empty(t, sessionOf(nil, nil))
	assert.Len(t, sessionOf(nil, []byte(strings.Repeat("u", 1000))), maxSession)
}

func TestWishes(t *testing.T) {
	h := func(name, value string) http.Header { return http.Header{name: {value}} }
	var w routingHeaders
	require.Nil(t, w.parse(h(headerTTFT, "250.5")))
	assert.Equal(t, routingHeaders{ttftMs: 250.5}, w)
	require.Nil(t, w.parse(h(headerTPOT, "30")))
	require.Nil(t, w.parse(h(headerPriority, "-3")))
	assert.Equal(t, routingHeaders{priority: -3}, w)
	require.Nil(t, w.parse(h(headerRank, "1/2")))
	assert.Equal(t, routingHeaders{direct: routing.ID(1, 2), hasDirect: true}, w)
	for _, name := range []string{headerTTFT, headerTPOT} {
		for _, bad := range []string{"", "x", "0", "-1", "NaN", "Inf", "1e99"} {
			assert.NotNil(t, w.parse(h(name, bad)), "%s: %q", name, bad)
		}
	}
	for _, bad := range []string{"", "x", "1.5", "99999999999"} {
		assert.NotNil(t, w.parse(h(headerPriority, bad)), bad)
	}
}

// FuzzWishes: parsing never panics, and an accepted number is one that a policy can calculate with.
func FuzzWishes(f *testing.F) {
	f.Add("250", "0/3", "1")
	f.Fuzz(func(t *testing.T, ms, rank, priority string) {
		var w routingHeaders
		if w.parse(http.Header{
			headerTTFT: {ms}, headerTPOT: {ms}, headerRank: {rank},
			headerPriority: {priority},
		}) == nil {
			require.Greater(t, w.ttftMs, 0.0)
			require.LessOrEqual(t, w.tpotMs, 86_400_000.0)
		}
	})
}

// TestBlocksAreKeyedByTheSecret: processes with one secret make the same blocks of a prompt; without the
// secret they cannot be predicted.
func TestBlocksAreKeyedByTheSecret(t *testing.T) {
	a, b, c := promptRouter(wantsAll), promptRouter(wantsAll), promptRouter(wantsAll)
	c.in.setSecret([]byte("another"))
	body := chat(strings.Repeat("words ", 100), `"tools":[1]`)
	assert.Equal(t, readPrompt(t, a, openai.Chat, body).blocks, readPrompt(t, b, openai.Chat, body).blocks)
	assert.NotEqual(t, readPrompt(t, a, openai.Chat, body).blocks, readPrompt(t, c, openai.Chat, body).blocks)
}

// TestBlockSizeFollowsTheRanks: token prompts are cut into the block size of most ranks' events, which has
// priority over the size that engines report.
func TestBlockSizeFollowsTheRanks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newKVRig(t, 3, 1, byScore)
		assert.Equal(t, 16, g.router.tokensPerBlock(), "as reported")
		for i, want := range []int{64, 32, 32} {
			r := g.feed.replicas[i]
			r.emit(&msg.Record{
				Kind: msg.RecKVBegin,
				KV:   msg.KV{Tier: kvindex.GPU, BlockSize: []int{64, 32, 32}[i]},
			})
			r.emit(&msg.Record{Kind: msg.RecStatus, Status: msg.Status{BlockSize: 16}})
			assert.Equal(t, want, g.router.tokensPerBlock(), fmt.Sprint(i))
		}
		var p prompt
		p.fromTokens(g.router, make([]uint32, 100), "")
		assert.Len(t, p.blocks, 3)
	})
}

// RP33: the tokenizer has one token per byte, four times as many as dpserve assumes at first. After two dozen
// requests the prediction is near what the engine holds, and the command `route explain` estimates as the
// live request does.
func TestCachedTokensFollowWhatEnginesCount(t *testing.T) {
	words := strings.Repeat("some words of a document ", 140)
	var counted atomic.Int64
	g := newRig(t, options{
		engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
			var body struct{ Prompt string }
			assert.NoError(t, json.NewDecoder(r.Body).Decode(&body))
			counted.Store(int64(len(body.Prompt)))
			w.Header().Set("Content-Type", "application/json")
			_, _ = fmt.Fprintf(w, `{"id":"c","choices":[{"index":0,"text":"a","finish_reason":"stop"}],`+
				`"usage":{"prompt_tokens":%d,"total_tokens":1,"completion_tokens":1}}`, len(body.Prompt))
		}},
		app: withRouting("scoring"),
	})
	remembers(t, g.replicas[0])
	share := func(question int) float64 {
		body := fmt.Sprintf(`{"model":"demo","prompt":"%s %d"}`, words, question)
		x, err := g.in.ExplainRoute(t.Context(), "demo", &client.Query{Request: json.RawMessage(body)})
		require.NoError(t, err)
		a := g.post("/v1/completions", body)
		require.Equal(t, 200, a.status)
		assert.Equal(t, strconv.Itoa(x.Ranks[0].HitTokens), a.header.Get(headerCached))
		return float64(x.Ranks[0].HitTokens) / float64(counted.Load())
	}
	assert.Zero(t, share(0))
	for i := range 22 {
		share(i + 1)
	}
	assert.InDelta(t, 0.95, share(23), 0.05, "all but the end of the text, which fills no block")
}
