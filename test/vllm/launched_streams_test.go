package vllm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// streamed is what a client saw of one stream.
type streamed struct {
	answer
	status int
	events int      // without [DONE]
	shapes []string // of the events, in order; equal neighbours count once
	finish string
	done   bool // [DONE] came
	err    error
}

func (s *streamed) whole() bool { return s.err == nil && s.done && s.finish != "" }

// stream sends a request that asks for a stream, and reads it as far as it comes.
func stream(ctx context.Context, addr, path string, body map[string]any) (s streamed) {
	b, err := json.Marshal(body)
	if err != nil {
		return streamed{err: err}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+path, bytes.NewReader(b))
	if err != nil {
		return streamed{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return streamed{err: err}
	}
	defer resp.Body.Close()
	s.status = resp.StatusCode
	s.Rank = resp.Header.Get("x-dpserve-group") + "/" + resp.Header.Get("x-dpserve-rank")
	s.Predicted = -1
	if v := resp.Header.Get("x-dpserve-cached-tokens"); v != "" {
		s.Predicted, s.err = strconv.Atoi(v)
	}
	if s.status != http.StatusOK {
		s.err = fmt.Errorf("%w: %s", errStatus, resp.Status)
		return s
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() && s.err == nil && !s.done {
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			s.event(data)
		}
	}
	if s.err == nil {
		s.err = lines.Err()
	}
	return s
}

func (s *streamed) event(data string) {
	if data == "[DONE]" {
		s.done = true
		return
	}
	var v map[string]any
	if err := json.Unmarshal([]byte(data), &v); err != nil {
		s.err = fmt.Errorf("%w: %s", err, data)
		return
	}
	if v["error"] != nil {
		s.err = fmt.Errorf("%w: %s", errStatus, data)
		return
	}
	s.events++
	if shape := shapeOf(v); len(s.shapes) == 0 || s.shapes[len(s.shapes)-1] != shape {
		s.shapes = append(s.shapes, shape)
	}
	s.err = s.add([]byte(data))
	choices, _ := v["choices"].([]any)
	for _, c := range choices {
		if choice, ok := c.(map[string]any); ok {
			if reason, ok := choice["finish_reason"].(string); ok {
				s.finish = reason
			}
		}
	}
}

// shapeOf is a value of JSON without what it says: keys and kinds.
func shapeOf(v any) string {
	switch v := v.(type) {
	case map[string]any:
		var members []string
		for _, k := range slices.Sorted(maps.Keys(v)) {
			members = append(members, k+":"+shapeOf(v[k]))
		}
		return "{" + strings.Join(members, " ") + "}"
	case []any:
		if len(v) == 0 {
			return "[]"
		}
		return "[" + shapeOf(v[0]) + "]"
	case nil:
		return "null"
	}
	return fmt.Sprintf("%T", v)
}

// A kind of request that is streamed.
type streamKind struct {
	name, path string
	body       map[string]any
}

// streamKinds are requests for a stream, by route and by what is asked of the stream.
func streamKinds(rng *rand.Rand) []streamKind {
	prompt := someWords(rng, 80)
	talk := []message{{Role: "user", Content: prompt}}
	usage := map[string]any{"include_usage": true}
	running := map[string]any{"include_usage": true, "continuous_usage_stats": true}
	return []streamKind{
		{"completion", "/v1/completions", map[string]any{"prompt": prompt}},
		{"completion, usage", "/v1/completions", map[string]any{"prompt": prompt, "stream_options": usage}},
		{"completion, token ids", "/v1/completions", map[string]any{
			"prompt": randomIDs(rng, 80), "return_token_ids": true, "stream_options": running,
		}},
		{"completion, logprobs", "/v1/completions", map[string]any{"prompt": prompt, "logprobs": 1}},
		{"chat", "/v1/chat/completions", map[string]any{"messages": talk}},
		{"chat, usage", "/v1/chat/completions", map[string]any{"messages": talk, "stream_options": usage}},
		{"chat, usage in each", "/v1/chat/completions", map[string]any{
			"messages": talk, "stream_options": running,
		}},
		{"chat, logprobs", "/v1/chat/completions", map[string]any{
			"messages": talk, "logprobs": true, "top_logprobs": 1,
		}},
	}
}

const (
	streamTokens = 24
	askTime      = 5 * time.Minute // for one request of a busy machine
)

// testStreams: eight streams at once through dpserve have the events of a stream from the engine itself.
func testStreams(t *testing.T, a *launched) {
	rank := a.alive(0, 0)
	kinds := streamKinds(rand.New(rand.NewPCG(3, 3)))
	direct, through := make([]streamed, len(kinds)), make([]streamed, len(kinds))
	var all sync.WaitGroup
	ctx, cancel := context.WithTimeout(t.Context(), askTime)
	defer cancel()
	for i, k := range kinds {
		k.body["model"], k.body["stream"], k.body["temperature"] = a.model(), true, 0
		k.body["max_tokens"], k.body["ignore_eos"] = streamTokens, true
		direct[i] = stream(ctx, rank.addr(), k.path, k.body)
		all.Go(func() { through[i] = stream(ctx, a.dp.HTTP, k.path, k.body) })
	}
	all.Wait()
	for i, k := range kinds {
		require.True(t, direct[i].whole(), "%s, direct: %+v", k.name, direct[i])
		assert.True(t, through[i].whole(), "%s: %+v", k.name, through[i])
		assert.Equal(t, direct[i].shapes, through[i].shapes, k.name)
		assert.Equal(t, direct[i].finish, through[i].finish, k.name)
		t.Logf("%-22s %d events direct, %d through dpserve by rank %s, %d shapes, finish %s", k.name,
			direct[i].events, through[i].events, through[i].Rank, len(through[i].shapes), through[i].finish)
	}
}

// model is what clients call the model.
func (a *launched) model() string {
	st, err := a.status()
	require.NoError(a.t, err)
	return st.Model
}

// cachedPrompt is a prompt of several blocks.
const cachedPrompt = 200

// testCached: of two equal prompts the second one finds its blocks, dpserve has predicted how many, and it
// knows that from the engine's events.
func testCached(t *testing.T, a *launched) {
	for n := range a.ranks() {
		a.wait("events are followed", func() error { return live(a.dp, a.app, n) })
	}
	ids := randomIDs(rand.New(rand.NewPCG(4, 4)), cachedPrompt)
	ask := func() answer {
		got, err := complete(t.Context(), a.dp.HTTP, ids, 4, "")
		require.NoError(t, err)
		return got
	}
	first := ask()
	assert.Zero(t, first.Cached, "%+v", first)
	a.dp.Quiet()
	var second answer
	a.wait("the engine's events are in", func() error {
		if second = ask(); second.Predicted != second.Cached {
			return fmt.Errorf("predicted %d, reported %d", second.Predicted, second.Cached)
		}
		return nil
	})
	assert.Positive(t, second.Cached)
	assert.Equal(t, first.Rank, second.Rank)
	t.Logf("two equal prompts of %d tokens: cached %d, then %d (predicted %d), both by rank %s", cachedPrompt,
		first.Cached, second.Cached, second.Predicted, second.Rank)
	var batches uint64
	for n := range a.ranks() {
		kv := kvOf(a.dp, a.app, n)
		t.Logf("rank 0/%d: events %s, %d batches, %d blocks", n, kv.Events.State, kv.Events.Batches,
			kv.Blocks)
		assert.Zero(t, kv.Events.Dropped)
		batches += kv.Events.Batches
	}
	assert.Positive(t, batches)
}

// clients are requests that come all the time until they are told to stop.
type clients struct {
	cancel func()
	work   sync.WaitGroup

	mu                  sync.Mutex
	whole, refused, cut int
	ranks               map[string]int
	why                 []string
}

const (
	clientsAtOnce = 4
	clientPause   = 100 * time.Millisecond
	maxReasons    = 20
)

// clients begins to send streams.
func (a *launched) clients() *clients {
	stop, cancel := context.WithCancel(a.t.Context())
	c := &clients{cancel: cancel, ranks: map[string]int{}}
	name := a.model()
	for worker := range clientsAtOnce {
		c.work.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(worker), 5))
			for stop.Err() == nil {
				// a group that starts again serves nothing meanwhile: its clients wait that long
				ctx, done := context.WithTimeout(context.WithoutCancel(stop), startTimeout)
				c.add(stream(ctx, a.dp.HTTP, "/v1/completions", map[string]any{
					"model": name, "prompt": randomIDs(rng, 40+rng.IntN(100)), "stream": true,
					"max_tokens": streamTokens, "ignore_eos": true,
				}))
				done()
				sleep(stop, clientPause)
			}
		})
	}
	return c
}

func (c *clients) add(s streamed) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case s.whole():
		c.whole++
		c.ranks[s.Rank]++
		return
	case s.events == 0:
		c.refused++
	default:
		c.cut++
	}
	if len(c.why) < maxReasons {
		c.why = append(c.why, fmt.Sprintf("rank %s after %d events: %v", s.Rank, s.events, s.err))
	}
}

// some waits until n more streams have ended well.
func (a *launched) some(c *clients, n int) {
	a.t.Helper()
	c.mu.Lock()
	want := c.whole + n
	c.mu.Unlock()
	a.wait(fmt.Sprintf("%d streams have ended", want), func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.whole < want {
			return fmt.Errorf("%d of %d; %v", c.whole, want, c.why)
		}
		return nil
	})
}

// end stops the clients. No request may have failed before its first byte; cut says how many may have been
// cut after it.
func (c *clients) end(t *testing.T, what string, cut int) {
	t.Helper()
	c.cancel()
	c.work.Wait()
	t.Logf("%s: %d streams whole, %d failed before their first byte, %d cut; by rank %v", what, c.whole,
		c.refused, c.cut, c.ranks)
	assert.Zero(t, c.refused, "%s: %v", what, c.why)
	assert.LessOrEqual(t, c.cut, cut, "%s: %v", what, c.why)
}
