package sim

import (
	"encoding/json"
	"io"
	"net/http"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	processes "github.com/dpserve/dpserve/internal/process"
)

// launchPair starts two engines as a user does.
func launchPair(t *testing.T, more ...string) (p, d *simProcess) {
	args := func(role string) []string {
		return append([]string{
			"--block-size", "32", "--max-model-len", "2048", "--num-gpu-blocks-override", "128",
			"--sim-step-ms", "0", "--sim-transfer-first-contact-s", "0", "--kv-transfer-config",
			`{"kv_connector":"NixlConnector","kv_role":"` + role + `","kv_buffer_device":"cpu"}`,
		}, more...)
	}
	p, d = launch(t, args(RoleProducer)...), launch(t, args(RoleConsumer)...)
	p.waitReady(t)
	d.waitReady(t)
	return p, d
}

func askProcess(t testing.TB, p *simProcess, body string) (int, string) {
	t.Helper()
	resp := postURL(t, p.url()+"/v1/completions", body)
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(b)
}

func paramsOf(t testing.TB, p *simProcess, prompt string) string {
	t.Helper()
	_, body := askProcess(t, p, `{"prompt":"`+prompt+`","max_tokens":1,"kv_transfer_params":`+
		prefillParams+`}`)
	params := string(readLeg(t, body).Params)
	require.NotEqual(t, "null", params)
	return params
}

func TestTwoProcesses(t *testing.T) {
	t.Parallel()
	p, d := launchPair(t)
	prompt := words(1, 70)
	want := unbroken(t, prompt)
	status, body := askProcess(t, d, completionBody(prompt, `,"kv_transfer_params":`+paramsOf(t, p, prompt)))
	require.Equal(t, http.StatusOK, status, body)
	assert.Equal(t, want, textOf(t, body))

	// frozen: the decode engine waits and goes on
	params := paramsOf(t, p, prompt)
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGSTOP))
	eventually(t, func() bool { // its threads may go on until one of them takes the signal
		s, there := processes.ReadStat(p.cmd.Process.Pid)
		return !there || s.Stopped // there is no /proc, or it stands still
	})
	done := make(chan string, 1)
	go func() {
		done <- tryAsk(d.url()+"/v1/completions",
			completionBody(prompt, `,"cache_salt":"a","kv_transfer_params":`+params))
	}()
	eventually(t, func() bool { return statsOf(t, d).Loading == 1 })
	time.Sleep(100 * time.Millisecond)
	assert.Empty(t, done)
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGCONT))
	assert.Equal(t, want, textOf(t, <-done))

	// dead: a 500 at once, because the two have met, and the decode engine serves on
	params = paramsOf(t, p, prompt)
	require.NoError(t, p.cmd.Process.Kill())
	<-p.ended
	status, body = askProcess(t, d, completionBody(prompt, `,"cache_salt":"b","kv_transfer_params":`+params))
	assert.Equal(t, http.StatusInternalServerError, status)
	isBody(t, failedBody, body)
	_, body = askProcess(t, d, completionBody(prompt, `,"cache_salt":"c"`))
	assert.Equal(t, want, textOf(t, body))

	// parameters that end the engine end its process
	status, _ = askProcess(t, d, completionBody(prompt, `,"kv_transfer_params":{"do_remote_prefill":true}`))
	assert.Equal(t, http.StatusInternalServerError, status)
	assert.Zero(t, d.exitCode(t))
}

func statsOf(t testing.TB, p *simProcess) (s Stats) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(getURL(t, p.url()+"/_sim/stats")), &s))
	return s
}
