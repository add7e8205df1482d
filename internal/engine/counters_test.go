package engine

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestCountersOfRealPages(t *testing.T) {
	dense, err := os.ReadFile("testdata/metrics_dense.txt")
	require.NoError(t, err)
	assert.Equal(t, Counters{
		PromptTokens: 3524, GenerationTokens: 3074, StartTime: 1.79523078344e9,
		BlockSize: 32, Blocks: 24, Seen: true,
	}, counters(dense))
	two, err := os.ReadFile("testdata/metrics_internal_lb.txt")
	require.NoError(t, err)
	assert.Equal(t, Counters{
		PromptTokens: 810, GenerationTokens: 18, BlockSize: 32, Blocks: 65536,
		Seen: true,
	}, counters(two))
	var sum Counters
	for rank := range 2 {
		c := parsePage(two, strconv.Itoa(rank)).Counters
		assert.Less(t, c.PromptTokens, 810.0)
		assert.Equal(t, 65536, c.Blocks)
		sum.PromptTokens, sum.GenerationTokens = sum.PromptTokens+c.PromptTokens,
			sum.GenerationTokens+c.GenerationTokens
	}
	assert.Equal(t, Counters{PromptTokens: 810, GenerationTokens: 18}, sum,
		"the page of two engines, one by one")
	assert.Equal(t, Counters{}, parsePage(two, "2").Counters, "a rank that is not there")
	assert.Equal(t, Counters{}, counters([]byte("# nothing\n\nup 1\nvllm:prompt_tokens_total NaN\n")))
}

// TestTransfersOfRealPages: the histograms' sums are counted, and their twins that hold a time are not.
func TestTransfersOfRealPages(t *testing.T) {
	for side, want := range map[string]Transfers{
		"decode":  {Count: 16, Seconds: 1.6933879999999994, Bytes: 950272, Seen: true},
		"prefill": {Count: 1, Seconds: 0.328917, Bytes: 65536, Expired: 4, LateReads: 1, Seen: true},
	} {
		page, err := os.ReadFile("testdata/metrics_nixl_" + side + ".txt")
		require.NoError(t, err)
		assert.Equal(t, Counters{Transfers: want}, counters(page), side)
		assert.Equal(t, Transfers{}, parsePage(page, "1").Transfers, "a rank that is not there")
	}
	failed := "vllm:nixl_num_failed_transfers_total{engine=\"0\"} 2\n"
	assert.Equal(t, Transfers{Failed: 4, Seen: true}, counters([]byte(failed+failed)).Transfers)
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
		name, labels, got, ok := parseSample(line)
		require.True(r, ok, line)
		assert.Equal(r, "m_total", name)
		assert.InDelta(r, value, got, 0)
		assert.Equal(r, 7, labels.count("block_size", maxBlockSize))
	})
}

// FuzzParseCountersNeverFails: an engine's page may be anything.
func FuzzParseCountersNeverFails(f *testing.F) {
	for _, s := range []string{
		"", "a", "a{", `a{b="\`, `vllm:cache_config_info{block_size="x"} 1`,
		`vllm:cache_config_info{a="\"",block_size="16",num_gpu_blocks="9"} 1`,
		"vllm:kv_cache_usage_perc{engine=\"0\"} 0.5", "sglang_token_usage 2",
		`{"page_size":1e300,"max_total_num_tokens":-1}`, "vllm:prompt_tokens_total 1e3\n", "a{} 1 2 3",
		"{ 1",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, page []byte) {
		c := counters(page)
		if c.PromptTokens != 0 && !c.Seen {
			t.Fatal("counted what was not seen")
		}
		if c.KVUsage < 0 || c.KVUsage > 1 || c.KVUsage != 0 && !c.HasKVUsage {
			t.Fatalf("usage %v, seen %v", c.KVUsage, c.HasKVUsage)
		}
		if c.BlockSize < 0 || c.BlockSize > maxBlockSize || c.Blocks < 0 || c.Blocks > maxBlocks ||
			c.Running < 0 || c.Waiting < 0 {
			t.Fatalf("%+v", c)
		}
		_, _, _ = cutLabels(string(page))
		_ = parsePage(page, "0")
		_ = parseServerInfo(page)
	})
}

func TestWhatAPageSaysOfLoadAndCache(t *testing.T) {
	for name, c := range map[string]struct {
		page, rank string
		want       Counters
	}{
		"vllm": {
			page: `vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:cache_config_info{effective_attention_block_size="64",block_size="16",` +
				`enable_prefix_caching="True",num_gpu_blocks="100",num_gpu_blocks_override="7"} 1.0`,
			want: Counters{
				Running: 3, Waiting: 2, KVUsage: 0.25, HasKVUsage: true, BlockSize: 16,
				Blocks: 100,
			},
		},
		"older vllm": {page: "vllm:gpu_cache_usage_perc 0.5", want: Counters{KVUsage: 0.5, HasKVUsage: true}},
		"caching off": {
			page: `vllm:cache_config_info{enable_prefix_caching="False"} 1`,
			want: Counters{CachingOff: true},
		},
		"not told": {page: `vllm:cache_config_info{block_size="None",enable_prefix_caching="None",` +
			`num_gpu_blocks="None"} 1`},
		"not its name": {page: `vllm:cache_config_info{x="enable_prefix_caching=\"False\"",y=",` +
			`block_size=\"4\""} 1`},
		"all ranks": {
			page: "vllm:num_requests_running{engine=\"0\"} 1\nvllm:num_requests_running{engine=\"1\"} " +
				"2\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.9\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.1",
			want: Counters{Running: 3, KVUsage: 0.9, HasKVUsage: true},
		},
		"one rank of them": {
			page: "vllm:num_requests_running{engine=\"0\"} 1\nvllm:num_requests_running{engine=\"1\"} " +
				"2\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.9\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.1",
			rank: "1", want: Counters{Running: 2, KVUsage: 0.1, HasKVUsage: true},
		},
		"sglang": {
			page: `sglang:num_running_reqs{dp_rank="0"} 1
sglang:num_running_reqs{dp_rank="1"} 4
sglang:num_queue_reqs{dp_rank="1"} 5
sglang:token_usage{dp_rank="1"} 0.75
sglang:cache_config_info{page_size="64",num_pages="2000",dp_rank="1"} 1.0`,
			rank: "1", want: Counters{
				Running: 4, Waiting: 5, KVUsage: 0.75, HasKVUsage: true, BlockSize: 64,
				Blocks: 2000,
			},
		},
		"newer sglang": {
			page: "sglang_page_size 1.0\nsglang_num_pages 40000.0\nsglang_prompt_tokens_total 7\n",
			want: Counters{BlockSize: 1, Blocks: 40000, PromptTokens: 7, Seen: true},
		},
		"not sane": {
			page: `vllm:kv_cache_usage_perc NaN
vllm:kv_cache_usage_perc +Inf
vllm:kv_cache_usage_perc -0.1
vllm:kv_cache_usage_perc 55
vllm:num_requests_running -3
vllm:num_requests_waiting Inf
vllm:prompt_tokens_total +Inf
vllm:cache_config_info{block_size="-16",num_gpu_blocks="99999999999999999999"} 1
sglang_page_size 1.5
sglang_num_pages 1e18
sglangXpage_size 8
sglang 1
vllm:cache_config_info{block_size="1000000000",num_gpu_blocks="1e3" 1`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, c.want, parsePage([]byte(c.page), c.rank).Counters)
		})
	}
}

func TestServerInfo(t *testing.T) {
	for text, want := range map[string]Cache{
		`{"page_size":16,"max_total_num_tokens":1000,"disable_radix_cache":false,"x":[1]}`: {
			BlockSize: 16,
			Blocks:    62,
		},
		`{"page_size":1,"max_total_num_tokens":1000,"disable_radix_cache":true}`: {
			BlockSize: 1, Blocks: 1000,
			CachingOff: true,
		},
		`{"max_total_num_tokens":1000}`:                     {},
		`{"page_size":0,"max_total_num_tokens":1000}`:       {},
		`{"page_size":1e-300,"max_total_num_tokens":1e300}`: {},
		`{"page_size":-1,"max_total_num_tokens":-1000}`:     {},
		`{"page_size":1,"max_total_num_tokens":1e300}`:      {BlockSize: 1},
		`{"page_size":"16"}`:                                {},
		`{"vllm_config":"block_size=16"}`:                   {},
		`[]`:                                                {}, ``: {}, `<html>`: {}, `null`: {},
	} {
		assert.Equal(t, want, parseServerInfo([]byte(text)), text)
	}
}

// counters is what a page says of all ranks together.
func counters(page []byte) Counters { return parsePage(page, "").Counters }

// RG12: One of several front ends of a group has the ranks 4 and 5. Some front ends take their numbers,
// others count from 0: the counters are found either way.
func TestRanksBehindOneOfSeveralFrontEnds(t *testing.T) {
	b, err := os.ReadFile("testdata/metrics_internal_lb.txt")
	require.NoError(t, err)
	assert.Equal(t, []int{0, 1}, rankNumbers(b))
	page := []byte(strings.NewReplacer(`engine="0"`, `engine="4"`, `engine="1"`, `engine="5"`).
		Replace(string(b)))
	assert.Equal(t, []int{4, 5}, rankNumbers(page))
	for index, number := range map[string]string{"4": "4", "5": "5", "0": "4", "1": "5", "2": "2", "x": "x"} {
		assert.Equal(t, number, seriesOf(page, index), index)
	}
	assert.Equal(t, parsePage(b, "1").Counters, parsePage(page, seriesOf(page, "1")).Counters)
	assert.Empty(t, rankNumbers([]byte("# nothing\nup{engine=\"all\"} 1\nup 1\n")))
}

// BenchmarkParsePage reads the recorded page of an engine with 24 histograms of 20 buckets more, as an engine
// under traffic has them: each rank's probe reads such a page every second.
func BenchmarkParsePage(b *testing.B) {
	page, err := os.ReadFile("testdata/metrics_dense.txt")
	require.NoError(b, err)
	for h := range 24 {
		for le := range 20 {
			page = fmt.Appendf(page, "vllm:histogram_%d_seconds_bucket{engine=\"0\",le=\"%d.0\","+
				"model_name=\"tiny\"} %d.0\n", h, le, le)
		}
	}
	b.ReportAllocs()
	b.SetBytes(int64(len(page)))
	for b.Loop() {
		parsePage(page, "0")
	}
}
