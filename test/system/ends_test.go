package system

import (
	"bufio"
	"io"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// CC16: SIGTERM to `start` while a stream runs: the stream ends whole, the exit code is 0, and no engine
// lives on. A second Ctrl-C to `up` stops at once, also with a stream that would take minutes.
func TestCC16SignalsBesideAStream(t *testing.T) {
	t.Parallel()
	yaml := strings.Replace(simApp("slow", 2, "independent", "sim_step_ms: 20"),
		"graceful_shutdown_timeout_s: 2", "graceful_shutdown_timeout_s: 60", 1)
	begin := func(r *harness.Real, tokens int) (first string, stream *bufio.Reader) {
		resp, err := r.Post(t.Context(), "/v1/chat/completions", harness.Chat("slow", "hi", tokens, true))
		require.NoError(t, err)
		t.Cleanup(func() { _ = resp.Body.Close() })
		stream = bufio.NewReader(resp.Body)
		first, err = stream.ReadString('\n')
		require.NoError(t, err)
		assert.Contains(t, first, "data: ")
		return first, stream
	}

	r := harness.Start(t)
	r.Deploy(yaml)
	r.WaitStatus("slow", "RUNNING")
	kids := r.Children()
	require.Len(t, kids, 2)
	first, stream := begin(r, 100)
	r.Signal(syscall.SIGTERM)
	rest, err := io.ReadAll(stream)
	require.NoError(t, err)
	assert.Contains(t, string(rest), "data: [DONE]")
	assert.Equal(t, 100, strings.Count(first+string(rest), `"content":`)-1, "the first one is empty")
	assert.NotContains(t, string(rest), `"error"`)
	assert.Equal(t, 0, r.ExitCode(), r.Output())
	requireDead(t, r, kids)

	up := harness.Run(t, "up", written(t, yaml))
	up.Expect(harness.StreamBreaks)
	upServes(t, up)
	kids = up.Children()
	_, stream = begin(up, 30_000)
	up.Signal(os.Interrupt)
	waitOutput(t, up, regexp.MustCompile(`Ctrl-C again stops at once`))
	time.Sleep(300 * time.Millisecond) // the subject: two signals within 250 ms count as one
	up.Signal(os.Interrupt)
	up.ExitCode()
	requireDead(t, up, kids)
	rest, _ = io.ReadAll(stream)
	assert.NotContains(t, string(rest), "data: [DONE]", "a cut stream does not look complete")
}
