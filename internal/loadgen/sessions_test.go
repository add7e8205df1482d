package loadgen

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
)

// ask is a request body as an engine parses it.
type ask struct {
	Stream   bool `json:"stream"`
	Options  any  `json:"stream_options"`
	Messages []struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	} `json:"messages"`
}

// tokens splits the messages into tokens of 4 bytes, with one token at each end of a message.
func (a *ask) tokens() []string {
	var out []string
	for _, m := range a.Messages {
		out = append(out, "<"+m.Role+">")
		for part := range slices.Chunk([]byte(m.Content), bytesPerToken) {
			out = append(out, string(part))
		}
		out = append(out, "<end>")
	}
	return append(out, "<assistant>")
}

// perfect is a server with one unlimited cache in its simplest form: it stores every prefix of whole blocks.
type perfect struct {
	mu       sync.Mutex
	prefixes map[string]bool
	sessions map[string]int // requests per session
	bodies   map[string]string
	n        int
	fail     func(n int) bool
}

// lookup returns the number of cached tokens of a prompt and stores the prompt.
func (e *perfect) lookup(tokens []string) int {
	hit := 0
	for i := oracleBlock; i < len(tokens) && e.prefixes[strings.Join(tokens[:i], "|")]; i += oracleBlock {
		hit = i
	}
	e.store(tokens)
	return hit
}

func (e *perfect) store(tokens []string) {
	for i := oracleBlock; i <= len(tokens); i += oracleBlock {
		e.prefixes[strings.Join(tokens[:i], "|")] = true
	}
}

func (e *perfect) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body ask
	text := &bytes.Buffer{}
	_, _ = text.ReadFrom(r.Body)
	if json.Unmarshal(text.Bytes(), &body) != nil || !body.Stream || body.Options == nil {
		http.Error(w, "{}", http.StatusBadRequest)
		return
	}
	const answer = 5
	id := r.Header.Get("x-session-id")
	e.mu.Lock()
	e.n++
	n, turn := e.n, e.sessions[id]
	e.sessions[id]++
	e.bodies[id+"/"+strconv.Itoa(turn)] = text.String()
	tokens := body.tokens()
	cached := e.lookup(tokens)
	// The last token of an answer is never computed.
	e.store(append(tokens, slices.Repeat([]string{"wörd"[:4]}, answer-1)...))
	e.mu.Unlock()
	if e.fail != nil && e.fail(n) {
		http.Error(w, `{"error":{"message":"secret","type":"x","code":"overloaded"}}`,
			http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("x-dpserve-app", "demo")
	w.Header().Set("x-dpserve-group", "0")
	w.Header().Set("x-dpserve-rank", strconv.Itoa(n%2))
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(w, "data: "+format+"\n\n", args...) }
	say(`{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`)
	for range answer - 1 {
		say(`{"choices":[{"index":0,"delta":{"content":%q},"finish_reason":null}]}`, "wörd"[:4])
	}
	say(`{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"length"}]}`)
	say(`{"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,`+
		`"prompt_tokens_details":{"cached_tokens":%d}}}`, len(tokens), answer, cached)
	say("[DONE]")
}

func newPerfect(t *testing.T) (*perfect, string) {
	t.Helper()
	e := &perfect{prefixes: map[string]bool{}, sessions: map[string]int{}, bodies: map[string]string{}}
	srv := httptest.NewServer(e)
	t.Cleanup(srv.Close)
	return e, srv.URL
}

var quickTalk = Conversation{
	Sessions: 12, Turns: 4, SystemPrompts: 3, SystemTokens: 400, TurnTokens: 60, Think: time.Millisecond,
}

func TestSessionsReachTheOracleOnAPerfectCache(t *testing.T) {
	t.Parallel()
	e, url := newPerfect(t)
	r, err := RunSessions(t.Context(),
		Config{URL: url, Model: "demo", Rate: 300, Stream: true, Seed: 7}, quickTalk)
	require.NoError(t, err)
	assert.Equal(t, []int{48, 48, 0}, []int{r.Offered, r.OK, r.Failed}, r.Errors)
	assert.Equal(t, []int{12, 12, 0}, []int{r.Sessions.Begun, r.Sessions.Whole, r.Sessions.Cut})
	assert.Len(t, e.sessions, 12)
	for id, n := range e.sessions {
		assert.Equal(t, 4, n, id)
	}
	assert.Greater(t, r.HitShare, 0.5)
	assert.InDelta(t, r.HitShare, r.Sessions.OracleShare, 0.02)
	assert.InDelta(t, 1, r.Sessions.OfOracle, 0.02)
	assert.Equal(t, map[string]int{"demo/0/0": 24, "demo/0/1": 24}, r.Ranks)
	assert.InDelta(t, 1, r.Busiest, 1e-9)
	assert.Equal(t, []int{48, 48}, []int{r.TTFT.Count, r.TPOT.Count})

	var table bytes.Buffer
	require.NoError(t, r.WriteTable(&table))
	assert.Contains(t, table.String(),
		"12 sessions of 4 turns, 300/s, poisson; 3 system prompts of 400 tokens, 60 tokens a message")
	assert.Contains(t, table.String(), "a perfect cache holds")
	assert.Contains(t, table.String(), "demo/0/1        24")
	text, err := json.Marshal(r)
	require.NoError(t, err)
	assert.Contains(t, string(text), `"of_oracle":`)
	assert.Contains(t, string(text), `"p95_ms":`)
}

// Every body of every turn is equal, whatever the times of the run are.
func TestSessionsAreEqualForASeed(t *testing.T) {
	t.Parallel()
	run := func(seed uint64, rate float64) map[string]string {
		e, url := newPerfect(t)
		conversation := quickTalk
		conversation.LongShare, conversation.LongTokens = 0.3, 500
		_, err := RunSessions(t.Context(),
			Config{URL: url, Model: "demo", Rate: rate, Stream: true, Seed: seed}, conversation)
		require.NoError(t, err)
		return e.bodies
	}
	first := run(7, 1000)
	assert.Len(t, first, 48)
	assert.Equal(t, first, run(7, 200))
	assert.NotEqual(t, first, run(8, 1000))
}

// A prefix cache can only reuse a turn that begins with the previous one.
func TestATurnStartsWithThePreviousTurn(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		conversation := Conversation{
			Sessions: 1, Turns: 3, SystemPrompts: rapid.IntRange(0, 3).
					Draw(t, "systems"), SystemTokens: rapid.IntRange(1, 50).Draw(t, "system"),
			TurnTokens: rapid.IntRange(1, 50).Draw(t, "turn"), LongShare: rapid.SampledFrom([]float64{0, 1}).
					Draw(t, "share"), LongTokens: 30,
		}
		s := newScript(Config{Model: "m", Stream: true, Seed: rapid.Uint64().Draw(t, "seed")}, conversation)
		x := s.begin(rapid.IntRange(0, 1000).Draw(t, "session"))
		before := []string{}
		for turn := range 3 {
			var body ask
			require.NoError(t, json.Unmarshal(x.nextBody(), &body))
			tokens := body.tokens()
			require.Equal(t, before, tokens[:len(before)])
			want := 2*turn + 1
			if conversation.SystemPrompts > 0 {
				want++
			}
			require.Len(t, body.Messages, want)
			size := 0
			for _, m := range body.Messages {
				size += len(m.Content)
			}
			require.Equal(t, size, x.bytes)
			answer := rapid.String().Draw(t, "answer")
			x.addAnswer([]byte(strings.ToValidUTF8(answer, "?")))
			before = tokens // with the marker that opens the answer
		}
	})
}

func TestSystemPromptsAreTakenWithASkew(t *testing.T) {
	t.Parallel()
	s := newScript(Config{Seed: 3}, Conversation{SystemPrompts: 8, SystemTokens: 1, TurnTokens: 1})
	var taken [8]int
	for n := range 8000 {
		taken[s.begin(n).system]++
	}
	assert.InDelta(t, 0.389, float64(taken[0])/8000, 0.03) // (1/8)^(1/2.2)
	assert.Greater(t, taken[1], taken[3])
	assert.Positive(t, taken[7])
}

func TestOracle(t *testing.T) {
	t.Parallel()
	o := newOracle(2)
	assert.Equal(t, []bool{false, false, true, false, false},
		[]bool{o.markSent(0), o.markSent(1), o.markSent(1), o.markSent(-1), o.markSent(-1)})
	for _, c := range [][3]int{
		{0, 100, 0}, {15, 100, 0}, {16, 100, 16}, {100, 100, 96}, {96, 96, 80}, {500, 97, 96}, {
			-1, 0, 0,
		}, {50, 0, 0},
	} {
		assert.Equal(t, c[2], reusableTokens(c[0], c[1]), "%v", c)
	}
}

// scripted is a turnSender whose answers take a second.
type scripted struct {
	mu     sync.Mutex
	busy   map[string]bool
	times  []time.Duration
	origin time.Time
	fail   string // session
}

func (f *scripted) turn(ctx context.Context, _ []byte, session string, intended time.Time) *sample {
	f.mu.Lock()
	if f.busy[session] {
		panic("turns of a session overlap")
	}
	f.busy[session] = true
	f.times = append(f.times, time.Since(f.origin))
	f.mu.Unlock()
	s := &sample{intended: intended, sent: time.Now(), usage: usage{Prompt: 1600, Completion: 1}}
	if pause.For(ctx, time.Second) != nil {
		s.fail(failureStopped)
	} else if session == f.fail {
		s.fail("cut stream")
	}
	s.first, s.last, s.end, s.chunks = time.Now(), time.Now(), time.Now(), 1
	f.mu.Lock()
	defer f.mu.Unlock()
	f.busy[session] = false
	return s
}

func fakeSessionRun(
	t *testing.T, cfg Config, conversation Conversation, f *scripted,
) (*sessionRun, *collector) {
	t.Helper()
	cfg.URL, cfg.Model, cfg.Stream = "http://localhost", "demo", true
	cfg, err := sessionConfig(cfg, &conversation)
	require.NoError(t, err)
	out := newCollector(cfg)
	p := newSessionRun(cfg, conversation, f.turn, out.add)
	p.sleep, p.started = time.Sleep, time.Now()
	f.origin, f.busy = p.started, map[string]bool{}
	return p, out
}

func TestSessionsWaitForTheirUsers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &scripted{fail: "bench-0-3"}
		p, out := fakeSessionRun(t, Config{Rate: 10},
			Conversation{
				Sessions: 20, Turns: 5, SystemPrompts: 1, SystemTokens: 9, TurnTokens: 9,
				Think: 2 * time.Second,
			}, f)
		p.drive(t.Context())
		r := out.report(p.cfg, p.measureStart())
		s := p.report(out)
		assert.Equal(t, []int{20, 19, 1}, []int{s.Begun, s.Whole, s.Cut})
		assert.Equal(t, 19*5+1, r.Offered)
		assert.Equal(t, map[string]int{"cut stream": 1}, r.Errors)
		assert.InDelta(t, 1000, r.TTFT.Max, 1)
		// 19 sessions: all but a block of later turns, and half of each first prompt but the very first: 9
		// tokens of 9 and some.
		assert.GreaterOrEqual(t, s.ReusableTokens, 19*4*1584)
		// Five answers and four pauses of 2 s on average after a start within 2 s.
		assert.InDelta(t, 15, slices.Max(f.times).Seconds(), 12)
	})
}

func TestSessionsEndWithTheMeasurement(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &scripted{}
		p, out := fakeSessionRun(t, Config{Rate: 5, Warmup: 2 * time.Second, Duration: 10 * time.Second},
			Conversation{Sessions: 1000, Turns: 100, TurnTokens: 9}, f)
		p.drive(t.Context())
		r := out.report(p.cfg, p.measureStart())
		assert.Less(t, slices.Max(f.times), 12*time.Second)
		assert.Less(t, time.Since(p.started), 13*time.Second)
		assert.Greater(t, len(f.times), r.Offered, "warm-up does not count")
		assert.Positive(t, r.Offered)
		s := p.report(out)
		assert.Zero(t, s.Whole+s.Cut)
		assert.Less(t, s.Begun, 100)
	})
}

func TestSessionsAreStopped(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(3500*time.Millisecond, func() { cancel(errors.New("enough")) })
		f := &scripted{}
		p, out := fakeSessionRun(t, Config{Rate: 5, Concurrency: 3},
			Conversation{Sessions: 1000, Turns: 100, TurnTokens: 9, Think: time.Hour}, f)
		p.drive(ctx)
		assert.Less(t, time.Since(p.started), 4*time.Second)
		assert.LessOrEqual(t, len(f.times), 3)
		assert.Zero(t, out.report(p.cfg, p.measureStart()).Failed)
	})
}

func TestAFailedTurnEndsItsSession(t *testing.T) {
	t.Parallel()
	e, url := newPerfect(t)
	e.fail = func(n int) bool { return n == 5 }
	r, err := RunSessions(t.Context(), Config{URL: url, Model: "demo", Rate: 300, Stream: true}, quickTalk)
	require.NoError(t, err)
	assert.Equal(t, map[string]int{"http 503 overloaded": 1}, r.Errors)
	assert.Equal(t, []int{11, 1}, []int{r.Sessions.Whole, r.Sessions.Cut})
}

func TestSessionsAreChecked(t *testing.T) {
	t.Parallel()
	good := Config{URL: "http://127.0.0.1:8000", Model: "demo", Stream: true}
	conversation := Conversation{
		Sessions: 40, Turns: DefaultTurns, SystemPrompts: DefaultSystemPrompts,
		SystemTokens: DefaultSystemTokens,
		TurnTokens:   DefaultTurnTokens, Think: DefaultThink,
	}
	cfg, err := sessionConfig(good, &conversation)
	require.NoError(t, err)
	assert.InDelta(t, defaultSessionRate, cfg.Rate, 0)
	assert.Zero(t, cfg.Duration)

	bad := good
	bad.Stream, bad.Requests = false, 5
	_, err = RunSessions(t.Context(), bad, Conversation{SystemPrompts: -1, Think: -1, LongShare: 2})
	var p *problem.Error
	require.ErrorAs(t, err, &p)
	assert.Equal(t, problem.InvalidArgument, p.Code)
	assert.Len(t, p.Details, 10, p.Details)
	_, err = RunSessions(t.Context(), Config{}, conversation)
	require.Error(t, err)
}

func TestParseDelta(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`{"choices":[{"index":0,"delta":{"content":"a\"é"}}]}`: "a\"é",
		`{"choices":[{"index":0,"delta":{"content":null}}]}`:   "",
		`{"choices":[{"index":1,"delta":{"content":"b"}}]}`:    "",
		`{"choices":[]}`: "",
		`{"choices":`:    "",
	} {
		assert.Equal(t, want, parseDelta([]byte(text)), text)
	}
}

func TestMaxOverMean(t *testing.T) {
	t.Parallel()
	assert.Zero(t, maxOverMean(nil))
	assert.InDelta(t, 1.5, maxOverMean(map[string]int{"a": 3, "b": 1}), 1e-9)
}
