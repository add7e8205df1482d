// Package pairengine has stub engines that compute a prompt on one engine and its answer on another one, by
// every transfer. Tests of one package and of whole nodes use them.
package pairengine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/transfer"
)

// The roles of a stub engine, and the kinds of its legs.
const (
	Prefill = "prefill"
	Decode  = "decode"
	Both    = "both"
	Plain   = "plain" // a leg without fields of a transfer
)

// Mark is in the prompts of a test. A leg without it is a probe or a first meeting of two engines.
const Mark = "once upon a time"

// firstMeeting begins the prompts with which dpserve lets two engines meet.
const firstMeeting = `"dpserve `

// Fleet are stub engines of one transfer, in the test's process. They compute nothing: the text of an
// answer depends on the bytes of the prompt. They check each leg as strictly as real engines. What would end
// a real engine, or make it answer with the text of another prompt, is a fault, which fails the test at its
// end; in the second case the answer is wrong here, too. Safe for concurrent use.
type Fleet struct {
	T        testing.TB
	Transfer string
	Model    string
	// Mark is in the prompts of the test; "": it is in all but those of first meetings.
	Mark string
	// Listen binds the engines' addresses.
	Listen func(addr string) (net.Listener, error)
	// Params, if set, changes the kv_transfer_params of prefill legs' answers.
	Params func(params string) string
	// Pause is the time between two tokens of an answer.
	Pause time.Duration
	// Lease is how long a prefill engine keeps a prompt.
	Lease time.Duration

	mu       sync.Mutex
	engines  []*Engine
	legs     []*Leg
	faults   []string
	meetings map[string]*meeting
	number   int
}

// New makes a fleet without engines, on sockets of loopback. Call it before the cluster is made:
// the engines then outlive the cluster.
func New(t testing.TB, name, model string) *Fleet {
	t.Helper()
	traits, ok := transfer.Named(name)
	require.True(t, ok, name)
	f := &Fleet{
		T: t, Transfer: name, Model: model, Mark: Mark, meetings: map[string]*meeting{},
		Lease: traits.Traits().Lease,
		Listen: func(addr string) (net.Listener, error) {
			return (&net.ListenConfig{}).Listen(context.Background(), "tcp", addr)
		},
	}
	if f.Lease == 0 {
		f.Lease = dispatch.DefaultLease
	}
	t.Cleanup(func() {
		for _, e := range f.engines {
			e.Stop()
		}
		assert.Empty(t, f.Faults(), "what would end engines, or make their texts wrong")
	})
	return f
}

// Add starts an engine with ranks data-parallel ranks behind its address.
func (f *Fleet) Add(role, addr string, ranks int) *Engine {
	f.T.Helper()
	e := f.Make(role, ranks)
	e.Addr = addr
	e.Start()
	return e
}

// Make makes an engine that somebody else serves.
func (f *Fleet) Make(role string, ranks int) *Engine {
	f.mu.Lock()
	defer f.mu.Unlock()
	e := &Engine{Role: role, Ranks: ranks, fleet: f, began: time.Now(), isUp: true}
	e.Name = fmt.Sprintf("%s-%d", role, len(f.engines))
	f.engines = append(f.engines, e)
	return e
}

// Faults are the violations so far.
func (f *Fleet) Faults() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.faults)
}

// Legs are the legs of the test's own requests so far, of one side or ("") of all, in the order in which they
// came.
func (f *Fleet) Legs(side string) (out []Leg) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, l := range f.legs {
		if l.Ours && (side == "" || l.Side == side) {
			out = append(out, *l)
		}
	}
	return out
}

// Forget drops the legs so far.
func (f *Fleet) Forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.legs = slices.DeleteFunc(f.legs, func(l *Leg) bool { return !l.Ended.IsZero() })
}

// Open are the requests of the test that engines have in hand.
func (f *Fleet) Open() (n int) {
	for _, l := range f.Legs("") {
		if l.Ended.IsZero() {
			n++
		}
	}
	return n
}

func (f *Fleet) fault(l *Leg, format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults = append(f.faults, fmt.Sprintf("%s, %s leg: ", l.At.Name, l.Side)+fmt.Sprintf(format, args...)+
		fmt.Sprintf("\n%s", l.Body))
}

// Side are the engines of a role.
func (f *Fleet) Side(role string) []*Engine {
	return slices.DeleteFunc(f.all(), func(e *Engine) bool { return e.Role != role })
}

// named is the engine of that name.
func (f *Fleet) named(name string) *Engine {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range f.engines {
		if e.Name == name {
			return e
		}
	}
	return nil
}

// Unbroken is the text that one engine would give for the body of a request.
func (f *Fleet) Unbroken(body string) string {
	l := &Leg{Body: []byte(body)}
	require.NoError(f.T, l.read())
	return l.text(l.Prompt, 0)
}

// AttachRanks are the lines of an app.yaml for all engines, one per rank, in the order of Add.
func (f *Fleet) AttachRanks() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out strings.Builder
	for _, e := range f.engines {
		for rank := range max(1, e.Ranks) {
			out.WriteString("        - " + e.attachRank(rank) + "\n")
		}
	}
	return out.String()
}

// App is the app.yaml of all engines. more are further lines of the application.
func (f *Fleet) App(disaggregation string, more ...string) string {
	family := "vllm"
	if f.Transfer == transfer.SGLangName {
		family = "sglang"
	}
	text := fmt.Sprintf(`applications:
  - name: %[1]s
    model: {id: %[1]s}
    engine:
      kind: attach
      family: %[2]s
      ranks:
%[3]s    disaggregation: {transfer: %[4]s, %[5]s}
`, f.Model, family, f.AttachRanks(), f.Transfer, disaggregation)
	for _, line := range more {
		text += "    " + line + "\n"
	}
	return text
}

// Engine is one stub engine.
type Engine struct {
	Name  string
	Role  string
	Addr  string
	Ranks int // behind its address; 0 or 1: the address alone selects it

	fleet *Fleet

	mu     sync.Mutex
	act    func(l *Leg) bool
	meets  func(l *Leg) bool
	isUp   bool
	life   int       // starts so far
	began  time.Time // of this life
	died   time.Time // of the life before
	tokens int
	resets int
	cache  []string // prompts that it has computed in this life
	server *http.Server
	served chan struct{}
	open   sync.WaitGroup
}

// Do has act answer the legs of the test's requests; act returns false for those that are answered as usual.
// nil ends that.
func (e *Engine) Do(act func(l *Leg) bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.act = act
}

// DoFirst is Do for the legs with which dpserve lets two engines meet.
func (e *Engine) DoFirst(meets func(l *Leg) bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.meets = meets
}

// Start listens. Each start is another life: it knows nothing of the prompts of the one before.
func (e *Engine) Start() {
	e.fleet.T.Helper()
	ln, err := e.fleet.Listen(e.Addr)
	require.NoError(e.fleet.T, err)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.life++
	e.isUp = true
	e.began, e.tokens, e.cache = time.Now(), 0, nil
	e.server = &http.Server{Handler: e, ReadHeaderTimeout: time.Minute}
	e.served = make(chan struct{})
	go func(server *http.Server, served chan struct{}) {
		defer close(served)
		if err := server.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			e.fleet.T.Errorf("%s: %v", e.Name, err)
		}
	}(e.server, e.served)
}

// Stop ends the engine as SIGKILL does: its connections break, and nothing listens any more. Idempotent.
func (e *Engine) Stop() {
	e.mu.Lock()
	server, served := e.server, e.served
	e.server, e.isUp, e.died = nil, false, time.Now()
	e.mu.Unlock()
	if server == nil {
		return
	}
	_ = server.Close()
	<-served
	e.open.Wait()
}

// Resets is how often the engine's prefix cache was reset.
func (e *Engine) Resets() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.resets
}

// remember keeps a prompt in the engine's cache, and returns how many tokens of it were there.
func (e *Engine) remember(prompt string) (tokens int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	shared := 0
	for _, old := range e.cache {
		n := 0
		for n < min(len(old), len(prompt)) && old[n] == prompt[n] {
			n++
		}
		shared = max(shared, n)
	}
	const most = 1000
	if e.cache = append(e.cache, prompt); len(e.cache) > most {
		e.cache = e.cache[1:]
	}
	return min(promptTokens(prompt[:shared]), promptTokens(prompt)-1)
}

// lives returns the number of the engine's life, whether it runs, and when the life before ended.
func (e *Engine) lives() (life int, isUp bool, died time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.life, e.isUp, e.died
}

// engineID is the id by which the other side knows a rank of the engine. With nixl-push it is written in the
// application's file; otherwise each life has its own.
func (e *Engine) engineID(rank int) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	id := e.Name
	if e.fleet.Transfer != transfer.NixlPushName {
		id = fmt.Sprintf("%s-life-%d", e.Name, e.life)
	}
	if e.Ranks > 1 {
		id = fmt.Sprintf("%s_dp%d", id, rank)
	}
	return id
}

// attachRank is the rank's line in an app.yaml.
func (e *Engine) attachRank(rank int) string {
	line := fmt.Sprintf(`url: "http://%s", role: %s`, e.Addr, e.Role)
	if e.Ranks > 1 {
		line += fmt.Sprintf(", addressing: body, selector: %d", rank)
	}
	if e.Role == Prefill {
		host, _, _ := net.SplitHostPort(e.Addr)
		switch e.fleet.Transfer {
		case transfer.NixlPushName:
			line += fmt.Sprintf(`, pd: {engine_id: %s, side_channel: "%s:5600", tp_size: 1}`, e.Name, host)
		case transfer.MooncakeName, transfer.SGLangName:
			line += fmt.Sprintf(`, pd: {bootstrap: "http://%s"}`, e.Addr)
		}
	}
	return "{" + line + "}"
}

// ServeHTTP implements http.Handler.
func (e *Engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.open.Add(1)
	defer e.open.Done()
	isSGLang := e.fleet.Transfer == transfer.SGLangName
	switch path := r.URL.Path; {
	case path == "/health":
	case path == "/version" && !isSGLang:
		_, _ = io.WriteString(w, `{"version":"0.32.0"}`)
	case path == "/v1/models":
		owner := "vllm"
		if isSGLang {
			owner = "sglang"
		}
		fmt.Fprintf(w, `{"object":"list","data":[{"id":%q,"object":"model","owned_by":%q,`+
			`"max_model_len":32768}]}`, e.fleet.Model, owner)
	case path == "/metrics":
		e.metrics(w, isSGLang)
	case path == "/server_info" && isSGLang:
		_, _ = io.WriteString(w, `{"page_size":16,"max_total_num_tokens":262144}`)
	case path == "/reset_prefix_cache":
		e.mu.Lock()
		e.resets++
		e.mu.Unlock()
	case path == "/query" && e.fleet.Transfer == transfer.MooncakeName:
		e.queryMooncake(w)
	case path == "/route" && isSGLang:
		fmt.Fprintf(w, `{"attn_tp_size":1,"attn_cp_size":1,"dp_size":%d,"pp_size":1,"page_size":16,`+
			`"kv_cache_dtype":"auto","follow_bootstrap_room":true}`, max(1, e.Ranks))
	case path == transfer.Completions.Path() || path == transfer.Chat.Path():
		e.generate(w, r)
	default:
		http.NotFound(w, r)
	}
}

func (e *Engine) metrics(w io.Writer, isSGLang bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	prefix, rank, running := "vllm:", "engine", "num_requests_running"
	if isSGLang {
		prefix, rank, running = "sglang:", "dp_rank", "num_running_reqs"
	}
	fmt.Fprintf(w, "process_start_time_seconds %d\n", e.began.Unix()+int64(e.life))
	for i := range max(1, e.Ranks) {
		labels := fmt.Sprintf(`{%s="%d",model_name=%q}`, rank, i, e.fleet.Model)
		fmt.Fprintf(w, "%s%s%s 0\n", prefix, running, labels)
		fmt.Fprintf(w, "%sgeneration_tokens_total%s %d\n", prefix, labels, e.tokens)
		fmt.Fprintf(w, "%sprompt_tokens_total%s %d\n", prefix, labels, e.tokens)
	}
	if !isSGLang {
		fmt.Fprintf(w, "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"16384\","+
			"enable_prefix_caching=\"True\"} 1\n")
	}
}

// queryMooncake answers for every rank of the engine.
func (e *Engine) queryMooncake(w io.Writer) {
	ranks := map[string]any{}
	for i := range max(1, e.Ranks) {
		ranks[fmt.Sprint(i)] = map[string]any{
			"engine_id":   e.engineID(i),
			"worker_addr": map[string]any{"0": map[string]string{"0": "tcp://" + e.Addr}},
		}
	}
	_ = json.NewEncoder(w).Encode(ranks)
}

// generate answers one leg.
func (e *Engine) generate(w http.ResponseWriter, r *http.Request) {
	f := e.fleet
	l := &Leg{
		At: e, Path: r.URL.Path, Header: r.Header.Clone(), Began: time.Now(), answer: &legAnswer{w: w, r: r},
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	l.Body = body
	if err := l.read(); err != nil {
		f.fault(l, "the body is not JSON: %v", err)
		l.Fail(http.StatusBadRequest)
		return
	}
	l.Ours = !l.isFirst && strings.Contains(l.Prompt, f.Mark)
	l.life, _, _ = e.lives()
	l.Side = f.sideOf(l)
	f.mu.Lock()
	f.legs = append(f.legs, l)
	f.mu.Unlock()
	defer f.ended(l)
	prompt, isKnown := f.check(l)
	e.mu.Lock()
	act := e.act
	if l.isFirst {
		act = e.meets
	}
	e.mu.Unlock()
	if (l.Ours || l.isFirst) && act != nil && act(l) {
		return
	}
	switch {
	case l.Side == Prefill:
		l.answerPrefill()
	case l.Side == Decode && !isKnown:
		l.Fail(http.StatusInternalServerError)
	case l.Side == Decode:
		l.answerDecode(prompt)
	case f.Transfer == transfer.SGLangName && e.Role != Both && !l.isFakeBootstrap():
		l.fail(http.StatusBadRequest, "Disaggregated request received without bootstrap room id")
	default:
		l.Answer(l.Prompt)
	}
}

// ended notes the end of a leg.
func (f *Fleet) ended(l *Leg) {
	f.mu.Lock()
	l.Ended, l.Status = time.Now(), l.answer.status
	l.Left = l.answer.r.Context().Err() != nil && !l.answer.whole
	f.mu.Unlock()
	l.At.mu.Lock()
	l.At.tokens += l.answer.words
	l.At.mu.Unlock()
}
