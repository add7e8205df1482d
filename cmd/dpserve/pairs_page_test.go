package main

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// runPairsPage types docs/prefill-decode.md: its `up` in one terminal, everything else in another one, with
// the ports of that node. What the commands print has what the page says of it.
func runPairsPage(t *testing.T, blocks []block) {
	t.Helper()
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not installed")
	}
	var p *foreground
	var admin string
	var ports *strings.Replacer
	ways := []string{"local", "remote"} // of the prompts
	for _, b := range blocks {
		for _, c := range b.commands() {
			if rest, isUp := strings.CutPrefix(c.text, "dpserve up "); isUp {
				p = startUp(t, append([]string{"up"}, strings.Fields(rest)...)...)
				admin = strings.TrimPrefix(p.printed(t, "admin "), "admin http://")
				ports = strings.NewReplacer("127.0.0.1:8000", p.endpoint(t), "127.0.0.1:8265", admin)
				awaitPairs(t, admin)
				continue
			}
			require.NotNil(t, p, "the page begins with `dpserve up`")
			typeLine := func() string {
				stdout, stderr := runLine(t, t.TempDir(), ports.Replace(c.text), "DPSERVE_ADDR="+admin)
				assert.Empty(t, stderr, "%s:%d: %s", b.page, b.line, c.text)
				return stdout
			}
			switch {
			case strings.Contains(c.text, "/v1/completions"):
				require.NotEmpty(t, ways, "%s:%d: one prompt too many", b.page, b.line)
				want := "X-Dpserve-Prefill: " + ways[0]
				out := strings.ReplaceAll(typeLine(), "\r", "")
				assert.Contains(t, out, want+"\n", "%s:%d", b.page, b.line)
				hasRank := strings.Contains(out, "X-Dpserve-Prefill-Rank: 0/")
				assert.Equal(t, ways[0] == "remote", hasRank, out)
				ways = ways[1:]
			case strings.Contains(c.text, " status "):
				out := typeLine()
				assert.Contains(t, out, "pd.prefill/0/1")
				assert.Contains(t, out, "pd.decode/0/3")
				assert.Contains(t, out, "1 remote, 1 local")
			case strings.Contains(c.text, "/metrics"):
				assert.Contains(t, typeLine(), `dpserve_pd_requests_total{app="pd",outcome="ok",way=`)
			default:
				assert.NotEmpty(t, typeLine(), "%s:%d: %s", b.page, b.line, c.text)
			}
		}
	}
	assert.Empty(t, ways, "the page sends a short and a long prompt")
	p.interrupt(t)
}

// awaitPairs waits until the pairs of examples/prefill-decode have met, a moment after the ranks are ready.
// Engines that end before would be a failure for a pair that is meeting.
func awaitPairs(t *testing.T, admin string) {
	t.Helper()
	bin := asDpserve(t)
	assert.True(t, poll(func() bool {
		cmd := exec.CommandContext(t.Context(), bin, "status", "pd")
		cmd.Env = append(cleanEnviron(), "DPSERVE_ADDR="+admin)
		out, err := cmd.Output()
		return err == nil && strings.Contains(string(out), "pairs 8/8 connected")
	}), "the pairs do not meet")
}
