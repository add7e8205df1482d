package engine

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Counters are an engine's progress and load, from /metrics. The token counters of one process only grow. A
// value that the page lacks is zero.
type Counters struct {
	PromptTokens     float64
	GenerationTokens float64
	StartTime        float64 // unix seconds of the process
	Running          float64 // requests in the batch
	Waiting          float64 // requests in the engine's own queue
	KVUsage          float64 // blocks in use / all blocks, 0 to 1
	HasKVUsage       bool
	BlockSize        int  // tokens per KV block
	Blocks           int  // KV blocks on the device
	CachingOff       bool // it runs without prefix caching
	Asleep           bool // it was put to sleep: its KV cache is gone
	Seen             bool // at least one of the two token counters was there
	Transfers        Transfers
}

// Transfers are what an engine counts of KV blocks that it moves between prefill and decode ranks. vLLM's
// NIXL connectors count them; a decode rank counts what it reads, a prefill rank what it holds for others.
type Transfers struct {
	Count     float64 // ended transfers
	Seconds   float64 // their time, in all
	Bytes     float64
	Failed    float64 // handshakes included
	Expired   float64 // prompts of a prefill rank whose lease ended before a decode rank had read them
	LateReads float64 // prompts of a prefill rank that a decode rank read after that: its text may be wrong
	Seen      bool    // the page has these counters
}

// Moved reports that the engine computed tokens between before and c.
func (c Counters) Moved(before Counters) bool {
	return c.Seen && (c.PromptTokens != before.PromptTokens || c.GenerationTokens != before.GenerationTokens)
}

// Restarted reports whether c comes from another process than before: the start time changed or a counter
// fell.
func (c Counters) Restarted(before Counters) bool {
	if c.StartTime != 0 && before.StartTime != 0 && c.StartTime != before.StartTime {
		return true
	}
	return c.Seen && before.Seen &&
		(c.PromptTokens < before.PromptTokens || c.GenerationTokens < before.GenerationTokens)
}

// metricsPage is a page while it is read.
type metricsPage struct {
	Counters
	sglang bool // it is SGLang's
}

// parsePage reads one rank's values from a Prometheus page, or those of all ranks if rank is "". It sums
// counters, running and waiting over label sets and takes the highest usage. Names are matched whole: every
// counter has a twin with the suffix _created that holds a unix time. It skips lines that it cannot parse and
// impossible values.
func parsePage(b []byte, rank string) metricsPage {
	var p metricsPage
	for line := range strings.Lines(string(b)) {
		name, labels, value, ok := parseSample(line)
		if !ok || rank != "" && !labels.ofRank(rank) {
			continue
		}
		if name == "process_start_time_seconds" {
			p.StartTime = value
		}
		if rest, ok := strings.CutPrefix(name, "vllm:"); ok {
			p.add(rest, labels, value)
		} else if rest, ok := cutSGLang(name); ok {
			p.sglang = true
			p.add(rest, labels, value)
		}
	}
	return p
}

// cutSGLang takes SGLang's prefix off: sglang: up to 0.5.3, sglang_ from then on.
func cutSGLang(name string) (rest string, ok bool) {
	if rest, ok = strings.CutPrefix(name, "sglang:"); ok {
		return rest, rest != ""
	}
	rest, ok = strings.CutPrefix(name, "sglang_")
	return rest, ok && rest != ""
}

// add takes one sample; name is without the engine's prefix.
func (p *metricsPage) add(name string, labels labelSet, value float64) {
	if value < 0 {
		return
	}
	switch name {
	case "prompt_tokens_total":
		p.PromptTokens, p.Seen = p.PromptTokens+value, true
	case "generation_tokens_total":
		p.GenerationTokens, p.Seen = p.GenerationTokens+value, true
	case "num_requests_running", "num_running_reqs":
		p.Running += value
	case "num_requests_waiting", "num_queue_reqs":
		p.Waiting += value
	case "kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage": // the second is older vLLM's
		if value <= 1 {
			p.KVUsage, p.HasKVUsage = max(p.KVUsage, value), true
		}
	case "page_size": // newer SGLang; in older ones a label of cache_config_info
		p.BlockSize = toCount(value, maxBlockSize)
	case "num_pages":
		p.Blocks = toCount(value, maxBlocks)
	case "cache_config_info":
		p.config(labels)
	case "engine_sleep_state": // one series per state, the present one is 1
		if labels["sleep_state"] == "awake" {
			p.Asleep = p.Asleep || value == 0
		}
	default:
		p.Transfers.add(name, value)
	}
}

// add takes one sample of vLLM's NIXL connectors.
func (t *Transfers) add(name string, value float64) {
	if to := t.counter(name); to != nil {
		*to, t.Seen = *to+value, true
	}
}

func (t *Transfers) counter(name string) *float64 {
	switch name {
	case "nixl_xfer_time_seconds_count":
		return &t.Count
	case "nixl_xfer_time_seconds_sum":
		return &t.Seconds
	case "nixl_bytes_transferred_sum":
		return &t.Bytes
	case "nixl_num_failed_transfers_total":
		return &t.Failed
	case "nixl_num_kv_expired_reqs_total":
		return &t.Expired
	case "nixl_num_notifications_after_expiry_total":
		return &t.LateReads
	}
	return nil
}

// config reads the labels of an info series. "None" is a value that is not set.
func (p *metricsPage) config(labels labelSet) {
	p.BlockSize = cmp.Or(labels.count("block_size", maxBlockSize),
		labels.count("page_size", maxBlockSize), p.BlockSize)
	p.Blocks = cmp.Or(labels.count("num_gpu_blocks", maxBlocks), labels.count("num_pages", maxBlocks),
		p.Blocks)
	p.CachingOff = p.CachingOff || labels["enable_prefix_caching"] == "False"
}

// Larger values are taken for faults and ignored.
const (
	maxBlockSize = 1 << 20 // tokens per block
	maxBlocks    = 1 << 30 // blocks of a device
)

// toCount converts a count to an int; 0 if the value cannot be a count.
func toCount(value, limit float64) int {
	if value != math.Trunc(value) || value < 1 || value > limit {
		return 0
	}
	return int(value)
}

// labelSet holds the labels of a series.
type labelSet map[string]string

// ofRank reports whether a series belongs to the rank: it names the rank or none.
func (l labelSet) ofRank(rank string) bool {
	named := cmp.Or(l["engine"], l["dp_rank"])
	return named == "" || named == rank
}

// count is a label that is a number; 0 if it is missing, no number or above limit.
func (l labelSet) count(key string, limit int) int {
	n, err := strconv.Atoi(l[key])
	if err != nil || n < 0 || n > limit {
		return 0
	}
	return n
}

// parseSample splits one line of the text format. A timestamp behind the value is ignored. ok is false for
// comments, blank lines, values that are no counts and anything malformed. The parser of
// prometheus/common/expfmt is not used: it takes eight times as long and gives up a page at the first line
// that it cannot read.
func parseSample(line string) (name string, labels labelSet, value float64, ok bool) {
	line = strings.TrimSpace(line)
	end := strings.IndexAny(line, "{ \t")
	if end <= 0 || line[0] == '#' {
		return "", nil, 0, false
	}
	name, rest := line[:end], line[end:]
	if rest[0] == '{' {
		if labels, rest, ok = parseLabels(rest[1:]); !ok {
			return "", nil, 0, false
		}
	}
	fields := strings.Fields(rest)
	if len(fields) == 0 || len(fields) > 2 {
		return "", nil, 0, false
	}
	value, err := strconv.ParseFloat(fields[0], 64)
	return name, labels, value, err == nil && !math.IsNaN(value) && !math.IsInf(value, 0)
}

// parseLabels reads key="value",… up to the closing brace. The escapes of the text format are some of Go's.
func parseLabels(s string) (labels labelSet, rest string, ok bool) {
	for labels = (labelSet{}); ; {
		s = strings.TrimLeft(s, ", ")
		if rest, ok = strings.CutPrefix(s, "}"); ok {
			return labels, rest, true
		}
		key, behind, _ := strings.Cut(s, "=")
		quoted, err := strconv.QuotedPrefix(behind)
		if err != nil || quoted[0] != '"' {
			return nil, "", false
		}
		if labels[strings.TrimSpace(key)], err = strconv.Unquote(quoted); err != nil {
			return nil, "", false
		}
		s = behind[len(quoted):]
	}
}

// maxNumbers bounds the ranks behind one URL.
const maxNumbers = 4096

// rankNumbers are the numbers that the series of a Prometheus page name, ascending.
func rankNumbers(page []byte) []int {
	seen := map[int]bool{}
	for line := range strings.Lines(string(page)) {
		_, labels, _, ok := parseSample(line)
		if !ok || len(seen) == maxNumbers {
			continue
		}
		if n, err := strconv.Atoi(cmp.Or(labels["engine"], labels["dp_rank"])); err == nil && n >= 0 {
			seen[n] = true
		}
	}
	return slices.Sorted(maps.Keys(seen))
}

// seriesOf is the number under which the page has the series of a rank that requests name by index: the
// number itself, or the place among the ranks behind the URL.
func seriesOf(page []byte, index string) string {
	numbers := rankNumbers(page)
	n, err := strconv.Atoi(index)
	if err != nil || n < 0 || n >= len(numbers) || slices.Contains(numbers, n) {
		return index
	}
	return strconv.Itoa(numbers[n])
}
