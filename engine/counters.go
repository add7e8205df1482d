package engine

import (
	"bytes"
	"context"
	"math"
	"strconv"
)

// Counters are what an engine's /metrics says about its progress. Counters only grow in one process.
type Counters struct {
	PromptTokens     float64
	GenerationTokens float64
	StartTime        float64 // unix seconds of the process; 0 = not told
	BlockSize        int     // of cache_config_info; 0 = not told
	Seen             bool    // at least one of the two token counters was there
}

// Moved says that the engine worked between before and c.
func (c Counters) Moved(before Counters) bool {
	return c.Seen && (c.PromptTokens != before.PromptTokens || c.GenerationTokens != before.GenerationTokens)
}

// Restarted says that c comes from another process than before: a counter fell or the start time changed (ENGINES 1.6).
func (c Counters) Restarted(before Counters) bool {
	if c.StartTime != 0 && before.StartTime != 0 && c.StartTime != before.StartTime {
		return true
	}
	return c.Seen && before.Seen && (c.PromptTokens < before.PromptTokens || c.GenerationTokens < before.GenerationTokens)
}

// Counters asks /metrics.
func (c *Client) Counters(ctx context.Context) (Counters, error) {
	b, err := c.get(ctx, "/metrics", maxMetrics)
	if err != nil {
		return Counters{}, err
	}
	return ParseCounters(b), nil
}

// ParseCounters sums the token counters of a Prometheus page over all label sets. Names are matched whole: every counter has a
// _created twin that holds a unix time (TRAPS 26). Lines it does not understand are skipped.
func ParseCounters(page []byte) Counters {
	var c Counters
	for line := range bytes.Lines(page) {
		name, labels, value, ok := parseSample(line)
		if !ok {
			continue
		}
		switch string(name) {
		case "vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "sglang_prompt_tokens_total":
			c.PromptTokens, c.Seen = c.PromptTokens+value, true
		case "vllm:generation_tokens_total", "sglang:generation_tokens_total", "sglang_generation_tokens_total":
			c.GenerationTokens, c.Seen = c.GenerationTokens+value, true
		case "process_start_time_seconds":
			c.StartTime = value
		case "vllm:cache_config_info":
			c.BlockSize = intLabel(labels, "block_size")
		}
	}
	return c
}

// parseSample splits one line of the text format: name, the label part without its braces, value. A timestamp behind the
// value is ignored. ok is false for comments, blank lines and anything malformed.
func parseSample(line []byte) (name, labels []byte, value float64, ok bool) {
	line = bytes.TrimSpace(line)
	end := bytes.IndexAny(line, "{ \t")
	if end <= 0 || line[0] == '#' {
		return nil, nil, 0, false
	}
	name, rest := line[:end], line[end:]
	if rest[0] == '{' {
		if labels, rest, ok = cutLabels(rest[1:]); !ok {
			return nil, nil, 0, false
		}
	}
	fields := bytes.Fields(rest)
	if len(fields) == 0 || len(fields) > 2 {
		return nil, nil, 0, false
	}
	value, err := strconv.ParseFloat(string(fields[0]), 64)
	return name, labels, value, err == nil && !math.IsNaN(value) // NaN is no count
}

// cutLabels finds the closing brace outside of quotes.
func cutLabels(s []byte) (labels, rest []byte, ok bool) {
	quoted := false
	for i := 0; i < len(s); i++ {
		switch {
		case quoted && s[i] == '\\':
			i++
		case s[i] == '"':
			quoted = !quoted
		case s[i] == '}' && !quoted:
			return s[:i], s[i+1:], true
		}
	}
	return nil, nil, false
}

// intLabel reads key="number" of a label part; 0 if it is missing or no number. The key is matched whole: other labels end
// in the same words.
func intLabel(labels []byte, key string) int {
	mark := []byte(key + `="`)
	for from := 0; ; {
		at := bytes.Index(labels[from:], mark)
		if at < 0 {
			return 0
		}
		at += from
		from = at + len(mark)
		if at > 0 && labels[at-1] != ',' {
			continue
		}
		value, _, _ := bytes.Cut(labels[from:], []byte{'"'})
		n, err := strconv.Atoi(string(value))
		if err != nil {
			return 0
		}
		return n
	}
}
