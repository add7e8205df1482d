package vllm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// side is what makes a rank one of a pair.
type side struct {
	role    string // prefill or decode
	weights string // folder of a model whose texts depend on the whole prompt
	blocks  int
	port    string // of its side channel
}

// config is the engine's --kv-transfer-config.
func (s *side) config() string {
	role := map[string]string{"prefill": "kv_producer", "decode": "kv_consumer"}[s.role]
	return fmt.Sprintf(`{"kv_connector":"NixlConnector","kv_role":%q,"kv_buffer_device":"cpu",`+
		`"kv_load_failure_policy":"fail"}`, role)
}

// The engines of the test. A prefill engine has little more room than the longest prompt: what it frees
// belongs to another prompt soon.
const (
	pairSides     = 2 // prefill engines, and as many decode engines
	prefillBlocks = 96
	decodeBlocks  = 512
	pairApp       = "pairs"
	pairTexts     = 48
	pairsAtOnce   = 4
	pairTokens    = 24 // of an answer
)

// pairs are the engines behind one dpserve.
type pairs struct {
	t       *testing.T
	dp      *harness.Real
	prefill []*rank
	decode  []*rank
	next    uint64 // seed of the requests to come
}

// TestRealPairs runs everything on two prefill engines and two decode engines.
func TestRealPairs(t *testing.T) {
	program := installed(t)
	needNIXL(t, program)
	weights := makeWeights(t, program)
	p := &pairs{t: t}
	for range pairSides {
		p.prefill = append(p.prefill, newSide(t, program, weights, "prefill", prefillBlocks))
		p.decode = append(p.decode, newSide(t, program, weights, "decode", decodeBlocks))
	}
	for _, both := range [][]*rank{p.prefill, p.decode} { // two cores: two at a time
		for _, r := range both {
			r.start()
		}
		for _, r := range both {
			r.ready()
		}
	}
	p.dp = harness.Start(t)
	p.dp.Expect(harness.EngineFails, harness.RequestsFail, harness.EngineReplaced, harness.RanksMove,
		harness.NodeFails)
	p.dp.Deploy(p.app())
	p.dp.WaitStatus(pairApp, "RUNNING")
	p.met(pairSides * pairSides)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *pairs)
	}{
		{"Texts", testTexts},
		{"PrefillKilledBefore", testPrefillKilledBefore},
		{"PrefillKilledDuring", testPrefillKilledDuring},
		{"PrefillKilledAfter", testPrefillKilledAfter},
		{"DecodeKilled", testDecodeKilled},
		{"PrefillRestarted", testPrefillRestarted},
		{"ProxyFrozen", testProxyFrozen},
	} {
		if !t.Run(part.name, func(t *testing.T) { part.run(t, p) }) {
			return
		}
	}
	p.dp.Quiet()
}

// needNIXL skips the test where only vLLM is installed.
func needNIXL(t *testing.T, program string) {
	t.Helper()
	if marks, _ := filepath.Glob(filepath.Join(folder(program), ".complete-nixl-*")); len(marks) == 0 {
		t.Skip("needs NIXL beside vLLM: run make test-vllm")
	}
}

// makeWeights writes the model.
func makeWeights(t *testing.T, program string) string {
	t.Helper()
	dir := t.TempDir()
	python := filepath.Join(filepath.Dir(program), "python")
	cmd := exec.CommandContext(t.Context(), python, "testdata/mkweights.py", "testdata/tiny-qwen2", dir)
	cmd.Env = append(os.Environ(), "OMP_NUM_THREADS=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return dir
}

func newSide(t *testing.T, program, weights, role string, blocks int) *rank {
	t.Helper()
	r := newRank(t, program)
	_, port, err := net.SplitHostPort(ports.TakeAddr(t))
	require.NoError(t, err)
	r.side = &side{role: role, weights: weights, blocks: blocks, port: port}
	return r
}

// app is the app.yaml over the engines: every request is split.
func (p *pairs) app() string {
	var b strings.Builder
	fmt.Fprintf(&b, `applications:
  - name: %s
    model: {id: %s}
    engine:
      kind: attach
      family: vllm
      ranks:
`, pairApp, model)
	for _, both := range [][]*rank{p.prefill, p.decode} {
		for _, r := range both {
			fmt.Fprintf(&b, "        - {url: %q, role: %s, kv_events: {bind: %q, replay: %q}}\n",
				"http://"+r.addr, r.side.role, r.events, r.replay)
		}
	}
	b.WriteString("    disaggregation: {transfer: nixl, decide: always, fallback: local}\n")
	return b.String()
}

// met waits until so many pairs have met since their engines started.
func (p *pairs) met(want int) {
	p.t.Helper()
	p.dp.Eventually(func() error {
		_, text := p.dp.Do(http.MethodGet, "/metrics", "")
		got := valueOf(text, "dpserve_pd_pairs{", `state="connected"`)
		if int(got) < want {
			return fmt.Errorf("%v of %d pairs have met", got, want)
		}
		return nil
	}, "pairs meet")
}

// valueOf adds up the metrics whose lines begin with name and hold label.
func valueOf(text, name, label string) (sum float64) {
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, name) && strings.Contains(line, label) {
			v, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:len(line)-1], 64)
			if err == nil {
				sum += v
			}
		}
	}
	return sum
}

// metric adds up a counter of engines.
func metric(t *testing.T, engines []*rank, name, label string) (sum float64) {
	t.Helper()
	for _, r := range engines {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+r.addr+"/metrics", nil)
		require.NoError(t, err)
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		text, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		require.NoError(t, err)
		sum += valueOf(string(text), name, label)
	}
	return sum
}

// question is one request, with the text of an unbroken run.
type question struct {
	path string
	body map[string]any
	want string
}

// outcome is what a client got.
type outcome struct {
	status int
	way    string // x-dpserve-prefill
	ranks  string // x-dpserve-prefill-rank of the prefill rank, and the decode rank
	text   string
	whole  bool // the answer ended as answers do
	err    error
}

// questions are n requests with prompts that were never sent before: completions and chats, streamed and not.
func (p *pairs) questions(n, words int) []*question {
	out := make([]*question, n)
	for i := range out {
		p.next++
		rng := rand.New(rand.NewPCG(p.next, 7))
		text := someWords(rng, words+3*rng.IntN(words))
		q := &question{path: "/v1/completions", body: map[string]any{
			"model": model, "max_tokens": pairTokens, "temperature": 0, "ignore_eos": true,
			"stream": i%2 == 1,
		}}
		if i%4 < 2 {
			q.body["prompt"] = text
		} else {
			q.path, q.body["messages"] = "/v1/chat/completions", []message{{Role: "user", Content: text}}
		}
		out[i] = q
	}
	return out
}

// unbroken asks an engine itself for the texts of questions. The salt keeps the answers apart from
// everything that was moved between engines.
func (p *pairs) unbroken(r *rank, all []*question) {
	p.t.Helper()
	for _, q := range all {
		q.body["cache_salt"] = "unbroken"
		got := q.ask(p.t.Context(), r.addr)
		delete(q.body, "cache_salt")
		require.NoError(p.t, got.err)
		require.True(p.t, got.whole && got.text != "", "%+v", got)
		q.want = got.text
	}
}

// ask sends a question and reads the answer as far as it comes.
func (q *question) ask(ctx context.Context, addr string) (o outcome) {
	b, err := json.Marshal(q.body)
	if err != nil {
		return outcome{err: err}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+q.path, bytes.NewReader(b))
	if err != nil {
		return outcome{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return outcome{err: err}
	}
	defer resp.Body.Close()
	h := resp.Header
	o.status, o.way = resp.StatusCode, h.Get("x-dpserve-prefill")
	o.ranks = h.Get("x-dpserve-prefill-rank") + " " + h.Get("x-dpserve-group") + "/" + h.Get("x-dpserve-rank")
	switch {
	case o.status != http.StatusOK:
		text, _ := io.ReadAll(resp.Body)
		o.err = fmt.Errorf("%w: %s: %s", errStatus, resp.Status, text)
	case q.body["stream"] == true:
		o.readStream(resp.Body)
	default:
		var a answer
		text, err := io.ReadAll(resp.Body)
		if o.err = err; err == nil {
			o.err = a.add(text)
		}
		o.text, o.whole = a.Text, o.err == nil
	}
	return o
}

// readStream reads events. An error event ends the text.
func (o *outcome) readStream(body io.Reader) {
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		switch {
		case !ok:
		case data == "[DONE]":
			o.whole = o.err == nil
			return
		case strings.Contains(data, `"error"`):
			o.err = fmt.Errorf("%w: %s", errStatus, data)
		default:
			var a answer
			if err := a.add([]byte(data)); err != nil {
				o.err = err
				return
			}
			o.text += a.Text
		}
	}
	o.err = lines.Err()
}

// count is what answers came to.
type count struct {
	mu                                        sync.Mutex
	whole, refused, cut, wrong, remote, local int
	fallback                                  int
	ranks                                     map[string]int
	why                                       []string
}

// add compares an answer with the unbroken one: what came of a broken one has to be its beginning.
func (c *count) add(q *question, o outcome) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case o.whole && o.text == q.want:
		c.whole++
		c.ranks[o.ranks]++
	case o.whole || !strings.HasPrefix(q.want, o.text):
		c.wrong++
		c.why = append(c.why, fmt.Sprintf("wrong (%s, %s): %q, not %q", o.way, o.ranks, o.text, q.want))
		return
	case o.text == "":
		c.refused++
		c.why = append(c.why, fmt.Sprint("refused: ", o.err))
	default:
		c.cut++
		c.why = append(c.why, fmt.Sprint("cut: ", o.err))
	}
	switch o.way {
	case "remote":
		c.remote++
	case "local":
		c.local++
	case "fallback":
		c.fallback++
	}
}

func (c *count) String() string {
	return fmt.Sprintf("%d texts right, %d wrong, %d refused, %d cut; prompt by a prefill rank %d, by the "+
		"decode rank %d, by it as a fallback %d", c.whole, c.wrong, c.refused, c.cut, c.remote, c.local,
		c.fallback)
}

// askAll sends all questions through dpserve, atOnce at a time.
func (p *pairs) askAll(all []*question, atOnce int) *count {
	c := &count{ranks: map[string]int{}}
	next := make(chan *question, len(all))
	for _, q := range all {
		next <- q
	}
	close(next)
	var work sync.WaitGroup
	for range atOnce {
		work.Go(func() {
			for q := range next {
				ctx, cancel := context.WithTimeout(p.t.Context(), 3*harness.Patience)
				c.add(q, q.ask(ctx, p.dp.HTTP))
				cancel()
			}
		})
	}
	work.Wait()
	return c
}

// sound holds what no fault may change.
func (c *count) sound(t *testing.T, what string) {
	t.Helper()
	t.Logf("%-34s %v", what, c)
	assert.Zero(t, c.wrong, "wrong texts: %v", c.why)
}

// served is sound, and every question has its answer.
func (c *count) served(t *testing.T, what string) {
	t.Helper()
	c.sound(t, what)
	assert.Zero(t, c.refused+c.cut, "answers: %v", c.why)
}
