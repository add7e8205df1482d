package engine

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestCountersOfRealPages(t *testing.T) {
	dense, err := os.ReadFile("testdata/metrics_dense.txt")
	require.NoError(t, err)
	assert.Equal(t, Counters{PromptTokens: 3524, GenerationTokens: 3074, StartTime: 1.79523078344e9, BlockSize: 32, Seen: true}, ParseCounters(dense))
	two, err := os.ReadFile("testdata/metrics_internal_lb.txt")
	require.NoError(t, err)
	assert.Equal(t, Counters{PromptTokens: 810, GenerationTokens: 18, BlockSize: 32, Seen: true}, ParseCounters(two))
	assert.Equal(t, Counters{}, ParseCounters([]byte("# nothing\n\nup 1\nvllm:prompt_tokens_total NaN\n")))
}

func TestCountersTellProgressFromARestart(t *testing.T) {
	a := Counters{PromptTokens: 5, GenerationTokens: 5, StartTime: 1, Seen: true}
	b := Counters{PromptTokens: 5, GenerationTokens: 6, StartTime: 1, Seen: true}
	assert.True(t, b.Moved(a))
	assert.False(t, a.Moved(a))
	assert.False(t, Counters{}.Moved(a), "a page without counters shows nothing")
	assert.False(t, b.Restarted(a))
	assert.True(t, a.Restarted(b))
	assert.True(t, Counters{StartTime: 2}.Restarted(a))
	assert.False(t, Counters{}.Restarted(a))
}

// TestSamplesSurviveLabels: whatever a label value holds, name and value are found.
func TestSamplesSurviveLabels(t *testing.T) {
	escape := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)
	rapid.Check(t, func(r *rapid.T) {
		value := rapid.IntRange(-1<<40, 1<<40).Draw(r, "value")
		label := escape.Replace(rapid.StringN(0, 20, 80).Draw(r, "label"))
		line := fmt.Sprintf("m_total{a=\"%s\",block_size=\"7\"} %d 123", label, value)
		name, labels, got, ok := parseSample([]byte(line))
		require.True(r, ok, line)
		assert.Equal(r, "m_total", string(name))
		assert.InDelta(r, value, got, 0)
		if !strings.Contains(label, "block_size") {
			assert.Equal(r, 7, intLabel(labels, "block_size"))
		}
	})
}

// FuzzParseCountersNeverFails: an engine's page may be anything.
func FuzzParseCountersNeverFails(f *testing.F) {
	for _, s := range []string{"", "a", "a{", `a{b="\`, `vllm:cache_config_info{block_size="x"} 1`, "vllm:prompt_tokens_total 1e3\n", "a{} 1 2 3", "{ 1"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, page []byte) {
		c := ParseCounters(page)
		if c.PromptTokens != 0 && !c.Seen {
			t.Fatal("counted what was not seen")
		}
		for _, key := range []string{"a", "block_size"} {
			_ = intLabel(page, key)
		}
	})
}
