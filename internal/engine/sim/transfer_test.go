package sim

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/test/ports"
)

// prefillParams is what every caller sends in a prefill leg of NIXL.
const prefillParams = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
	`"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// pairConfig is one side of a pair whose steps and transfers take no time.
func pairConfig(role string) Config {
	c := goldenConfig()
	c.Model.Blocks = 128
	c.Transfer.Connector, c.Transfer.Role = ConnectorNixl, role
	c.Transfer.FirstContact = 0
	c.Transfer.GBps = 1e6
	return c
}

func startPair(t *testing.T, change ...func(*Config)) (p, d *Server) {
	t.Helper()
	sides := [2]*Server{}
	for i, role := range []string{RoleProducer, RoleConsumer} {
		c := pairConfig(role)
		for _, f := range change {
			f(&c)
		}
		sides[i] = start(t, c)
	}
	return sides[0], sides[1]
}

// words is a prompt of n tokens, the same for the same seed.
func words(seed, n int) string {
	return strings.Repeat(fmt.Sprintf("%03d ", seed), n)
}

func completionBody(prompt, more string) string {
	return `{"prompt":` + string(mustMarshal(prompt)) + `,"max_tokens":24` + more + `}`
}

// legAnswer is what tests read of an answer.
type legAnswer struct {
	Choices []struct {
		Text    string                   `json:"text"`
		Message struct{ Content string } `json:"message"`
		Finish  string                   `json:"finish_reason"`
	} `json:"choices"`
	Usage struct {
		Prompt  int `json:"prompt_tokens"`
		Details struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
	Params json.RawMessage `json:"kv_transfer_params"`
}

func readLeg(t testing.TB, body string) (a legAnswer) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(body), &a), body)
	return a
}

// prefill sends a prefill leg and returns its parameters.
func prefill(t testing.TB, p *Server, prompt string) string {
	t.Helper()
	status, body := ask(t, p, "/v1/completions", `{"prompt":`+string(mustMarshal(prompt))+
		`,"max_tokens":1,"kv_transfer_params":`+prefillParams+`}`)
	require.Equal(t, http.StatusOK, status, body)
	a := readLeg(t, body)
	require.NotEqual(t, "null", string(a.Params))
	return string(a.Params)
}

// decode sends a decode leg with these parameters.
func decode(t testing.TB, d *Server, prompt, params, more string) (int, string) {
	t.Helper()
	return ask(t, d, "/v1/completions", completionBody(prompt, `,"kv_transfer_params":`+params+more))
}

func textOf(t testing.TB, body string) string {
	t.Helper()
	a := readLeg(t, body)
	require.NotEmpty(t, a.Choices, body)
	return a.Choices[0].Text
}

// unbroken is the text of an engine that does it all.
func unbroken(t testing.TB, prompt string) string {
	t.Helper()
	s, err := startServer(t.Context(), goldenConfig())
	require.NoError(t, err)
	defer func() { assert.NoError(t, s.Close()) }()
	_, body := ask(t, s, "/v1/completions", completionBody(prompt, ""))
	return textOf(t, body)
}

// member replaces a member of parameters, or removes it if value is "".
func member(t testing.TB, params, name, value string) string {
	t.Helper()
	var m map[string]json.RawMessage
	require.NoError(t, json.Unmarshal([]byte(params), &m))
	if delete(m, name); value != "" {
		m[name] = json.RawMessage(value)
	}
	return string(mustMarshal(m))
}

// hasCounter waits for a value of a series of /metrics.
func hasCounter(t testing.TB, s *Server, name string, value int) {
	t.Helper()
	eventually(t, func() bool {
		return strings.Contains(get(t, s, "/metrics"),
			fmt.Sprintf("vllm:%s{engine=\"0\",model_name=\"tiny\"} %d.0\n", name, value))
	})
}

func leasesEnd(t testing.TB, s *Server) {
	t.Helper()
	eventually(t, func() bool { return s.Stats().Leases == 0 && s.Stats().UsedBlocks == 0 })
}

func TestAPulledPromptGivesTheUnbrokenText(t *testing.T) {
	p, d := startPair(t)
	prompt := words(1, 46)
	want := unbroken(t, prompt)
	params := prefill(t, p, prompt)
	assert.Equal(t, 1, p.Stats().Leases)
	assert.Equal(t, 2, p.Stats().UsedBlocks)
	status, body := decode(t, d, prompt, params, "")
	require.Equal(t, http.StatusOK, status, body)
	assert.Equal(t, want, textOf(t, body))
	assert.Equal(t, "null", string(readLeg(t, body).Params))
	leasesEnd(t, p)
	assert.EqualValues(t, 46, d.Stats().LoadedTokens)
	assert.Contains(t, get(t, d, "/metrics"), `source="external_kv_transfer"} 46.0`)
	assert.Contains(t, get(t, d, "/metrics"), `source="p2p"} 46.0`)
	hasCounter(t, d, "nixl_xfer_time_seconds_count", 1)

	_, stream := decode(t, d, prompt, prefill(t, p, prompt), `,"stream":true`)
	assert.Equal(t, want, streamText(t, stream))
	assert.EqualValues(t, 46+14, d.Stats().LoadedTokens, "one block was in its own cache")
	assert.Zero(t, d.Stats().WrongAnswers)

	chat := `{"messages":[{"role":"user","content":"` + prompt + `"}],"max_tokens":%d%s}`
	_, plain := ask(t, d, "/v1/chat/completions", fmt.Sprintf(chat, 24, `,"cache_salt":"a"`))
	_, first := ask(t, p, "/v1/chat/completions",
		fmt.Sprintf(chat, 1, `,"return_token_ids":true,"kv_transfer_params":`+prefillParams))
	a := readLeg(t, first)
	assert.Regexp(t, `"remote_request_id":"chatcmpl-[0-9a-f]{16}-[0-9a-f]{8}"`, string(a.Params))
	_, second := ask(t, d, "/v1/chat/completions",
		fmt.Sprintf(chat, 24, `,"kv_transfer_params":`+string(a.Params)))
	assert.Equal(t, readLeg(t, plain).Choices[0].Message, readLeg(t, second).Choices[0].Message)
	leasesEnd(t, p)
}

func streamText(t testing.TB, body string) (text string) {
	t.Helper()
	for line := range strings.Lines(body) {
		if data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: "); ok && data != "[DONE]" {
			for _, c := range readLeg(t, data).Choices {
				text += c.Text
			}
		}
	}
	return text
}

// Whatever is done with parameters: a text is wrong if and only if the engine answered from blocks of other
// tokens, and parameters that are used in time, once, never do that.
func TestTextsAreWrongIfTheBlocksAre(t *testing.T) {
	p, d := startPair(t, func(c *Config) { c.Model.Blocks = 64 })
	type leg struct {
		prompt, params string
		isFresh        bool
	}
	var legs []leg
	rng := rand.New(rand.NewPCG(7, 7))
	seen := [2]int{}
	for i := range 400 {
		switch prompt := words(rng.IntN(40), 33+rng.IntN(200)); rng.IntN(4) {
		case 0:
			if p.Stats().Leases > 3 { // no more, or they take all memory
				for k := range legs {
					legs[k].isFresh = false
					_, _ = decode(t, d, legs[k].prompt, legs[k].params, `,"temperature":-1`)
				}
				leasesEnd(t, p)
			}
			legs = append(legs, leg{prompt, prefill(t, p, prompt), true})
		case 1:
			_, _ = ask(t, p, "/v1/completions", completionBody(prompt, ""))
			continue
		case 2:
			isWrong(t, d, prompt, "", &seen)
			continue
		}
		if len(legs) == 0 {
			continue
		}
		l := &legs[rng.IntN(len(legs))]
		more := fmt.Sprintf(`,"cache_salt":"%d","kv_transfer_params":%s`, i, l.params)
		if rng.IntN(2) == 0 {
			more = `,"kv_transfer_params":` + l.params // what it loads may be found again
		}
		if wrong := isWrong(t, d, l.prompt, more, &seen); l.isFresh && strings.Contains(more, "salt") {
			require.False(t, wrong, "the first use within the lease, without a hit")
		}
		l.isFresh = false
	}
	assert.Positive(t, seen[0], "right texts")
	assert.Positive(t, seen[1], "wrong texts")
}

// isWrong asks, compares the text with what the prompt must give, and both with the engine's own count.
func isWrong(t *testing.T, s *Server, prompt, more string, seen *[2]int) bool {
	t.Helper()
	before := s.Stats().WrongAnswers
	status, body := ask(t, s, "/v1/completions", completionBody(prompt, more))
	require.Equal(t, http.StatusOK, status, body)
	ids := em.AppendTokens(nil, prompt)
	want := em.ValidText(em.NewGenerator(em.ProseAfter(0, ids, 0)).Bytes(24))
	got := textOf(t, body) != want
	require.Equal(t, s.Stats().WrongAnswers-before == 1, got)
	if seen[0]++; got {
		seen[0]--
		seen[1]++
	}
	return got
}

// The text, the metric and the poisoned cache of PD's silent failure.
func TestParametersThatAreLateGiveAWrongText(t *testing.T) {
	p, d := startPair(t, func(c *Config) { c.DevMode = true })
	prompt := words(1, 70)
	want := unbroken(t, prompt)
	require.NoError(t, p.Fail(Fault{Mode: ModeTransferLease, LeaseS: 0.05}))
	params := prefill(t, p, prompt)
	leasesEnd(t, p)
	hasCounter(t, p, "nixl_num_kv_expired_reqs_total", 1)
	_, body := decode(t, d, prompt, params, `,"cache_salt":"luck"`)
	assert.Equal(t, want, textOf(t, body), "the blocks were not reused yet")
	hasCounter(t, p, "nixl_num_notifications_after_expiry_total", 1)

	for i := range 3 { // 3 x 64 blocks: the pool of 128 is written anew
		_, _ = ask(t, p, "/v1/completions", completionBody(words(100+i, 1900), ""))
	}
	status, body := decode(t, d, prompt, params, "")
	assert.Equal(t, http.StatusOK, status)
	assert.NotEqual(t, want, textOf(t, body))
	assert.Equal(t, "length", readLeg(t, body).Choices[0].Finish)
	assert.EqualValues(t, 1, d.Stats().WrongAnswers)

	_, plain := ask(t, d, "/v1/completions", completionBody(prompt, ""))
	assert.Equal(t, 64, readLeg(t, plain).Usage.Details.Cached)
	assert.NotEqual(t, want, textOf(t, plain), "the prefix cache holds the wrong blocks")
	_, salted := ask(t, d, "/v1/completions", completionBody(prompt, `,"cache_salt":"b"`))
	assert.Equal(t, want, textOf(t, salted))
	_, _ = ask(t, d, "/reset_prefix_cache", "")
	_, plain = ask(t, d, "/v1/completions", completionBody(prompt, ""))
	assert.Equal(t, want, textOf(t, plain))
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
