package engine

import (
	"bytes"
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

// IsQuiet reports that the engine has nothing to do and computed nothing between before and c.
func (c Counters) IsQuiet(before Counters) bool {
	return c.Running == 0 && c.Waiting == 0 && c.PromptTokens == before.PromptTokens &&
		c.GenerationTokens == before.GenerationTokens && c.StartTime == before.StartTime &&
		c.Asleep == before.Asleep && !c.Asleep
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

// startTime is the series of the unix time at which an engine's process began.
const startTime = "process_start_time_seconds"

// parsePage reads one rank's values from a Prometheus page, or those of all ranks if rank is "". It sums
// counters, running and waiting over label sets and takes the highest usage. Names are matched whole: every
// counter has a twin with the suffix _created that holds a unix time. It skips lines that it cannot parse and
// impossible values.
func parsePage(b []byte, rank string) metricsPage {
	var p metricsPage
	for line := range bytes.Lines(b) {
		if !isRead(line) {
			continue
		}
		name, labels, value, ok := parseSample(string(line))
		if !ok || rank != "" && !labels.ofRank(rank) {
			continue
		}
		if name == startTime {
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

// isRead reports whether parsePage may want a line of a page. Most lines of a page are buckets of histograms,
// or series of the engine's web server and its Python, and no value of theirs is read: each rank's page is
// asked for every second, so these lines are not parsed.
func isRead(line []byte) bool {
	line = bytes.TrimLeft(line, " \t")
	if !bytes.HasPrefix(line, []byte("vllm:")) && !bytes.HasPrefix(line, []byte("sglang")) &&
		!bytes.HasPrefix(line, []byte(startTime)) {
		return false
	}
	name := line
	if end := bytes.IndexAny(line, "{ \t"); end >= 0 {
		name = line[:end]
	}
	return !bytes.HasSuffix(name, []byte("_bucket"))
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
		if labels.get("sleep_state") == "awake" {
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
	p.CachingOff = p.CachingOff || labels.get("enable_prefix_caching") == "False"
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

// labelSet is the text of a series' labels, key="value",… without the braces. It is searched where a label is
// asked for: a page has a thousand series, and few of them are looked at.
type labelSet string

// get returns the value of a label; "" if it is missing or malformed. The escapes of the text format are some
// of Go's.
func (l labelSet) get(key string) string {
	for rest := string(l); ; {
		name, quoted, behind, ok := cutLabel(rest)
		if !ok {
			return ""
		}
		if name == key {
			value, _ := strconv.Unquote(quoted)
			return value
		}
		rest = behind
	}
}

// rank is the rank that a series names; "" if it names none.
func (l labelSet) rank() string { return cmp.Or(l.get("engine"), l.get("dp_rank")) }

// ofRank reports whether a series belongs to the rank: it names the rank or none.
func (l labelSet) ofRank(rank string) bool {
	named := l.rank()
	return named == "" || named == rank
}

// count is a label that is a number; 0 if it is missing, no number or above limit.
func (l labelSet) count(key string, limit int) int {
	n, err := strconv.Atoi(l.get(key))
	if err != nil || n < 0 || n > limit {
		return 0
	}
	return n
}

// parseSample splits one line of the text format. A timestamp behind the value is ignored. ok is false for
// comments, blank lines, values that are no counts and anything malformed. The parser of
// prometheus/common/expfmt is not used: it takes many times as long and gives up a page at the first line
// that it cannot read.
func parseSample(line string) (name string, labels labelSet, value float64, ok bool) {
	line = strings.TrimSpace(line)
	end := strings.IndexAny(line, "{ \t")
	if end <= 0 || line[0] == '#' {
		return "", "", 0, false
	}
	name, rest := line[:end], line[end:]
	if rest[0] == '{' {
		if labels, rest, ok = cutLabels(rest[1:]); !ok {
			return "", "", 0, false
		}
	}
	number, fields := "", 0
	for field := range strings.FieldsSeq(rest) {
		if fields++; fields == 1 {
			number = field
		}
	}
	if fields == 0 || fields > 2 {
		return "", "", 0, false
	}
	value, err := strconv.ParseFloat(number, 64)
	return name, labels, value, err == nil && !math.IsNaN(value) && !math.IsInf(value, 0)
}

// cutLabels splits key="value",… from the closing brace and what is behind it.
func cutLabels(s string) (labels labelSet, rest string, ok bool) {
	for rest = s; ; {
		rest = strings.TrimLeft(rest, ", ")
		if behind, closed := strings.CutPrefix(rest, "}"); closed {
			return labelSet(s[:len(s)-len(rest)]), behind, true
		}
		if _, _, rest, ok = cutLabel(rest); !ok {
			return "", "", false
		}
	}
}

// cutLabel splits the first label from what is behind it. The value keeps its quotes and escapes.
func cutLabel(s string) (name, quoted, rest string, ok bool) {
	name, value, _ := strings.Cut(strings.TrimLeft(s, ", "), "=")
	if !strings.HasPrefix(value, `"`) {
		return "", "", "", false
	}
	for i := 1; i < len(value); i++ {
		switch value[i] {
		case '\\':
			i++
		case '"':
			return strings.TrimSpace(name), value[:i+1], value[i+1:], true
		}
	}
	return "", "", "", false
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
		if n, err := strconv.Atoi(labels.rank()); err == nil && n >= 0 {
			seen[n] = true
		}
	}
	return slices.Sorted(maps.Keys(seen))
}

// seriesOf is the number under which the page has the series of a rank that requests name by index: the
// number itself, or the place among the ranks behind the URL.
func seriesOf(page []byte, index string) string {
	n, err := strconv.Atoi(index)
	if err != nil || n < 0 {
		return index
	}
	numbers := rankNumbers(page)
	if n >= len(numbers) || slices.Contains(numbers, n) {
		return index
	}
	return strconv.Itoa(numbers[n])
}
