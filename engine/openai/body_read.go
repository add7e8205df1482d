package openai

import (
	"bytes"
	"errors"
	"math"
	"strconv"
)

// The value limits of a request body. Larger values are refused with 400; dpserve never lowers a value.
const (
	// MaxN is the largest n: more choices than this is refused.
	MaxN = 128
	// MaxSequences is the largest product of n and the number of prompts: what an engine computes for one
	// request.
	MaxSequences = 1024
	// MaxMaxTokens is the largest max_tokens and max_completion_tokens that passes; what the model can do is
	// the engine's answer.
	MaxMaxTokens = 1 << 31
)

// read checks a top-level value and takes what dpserve needs from it.
func (b *Body) read(s *scanner, key []byte, i int) (end int, err error) {
	if b.route.isPrompt(key) {
		end = b.prompt(s, i)
	} else {
		end = s.value(i, 1, nil)
	}
	if end < 0 {
		return 0, s.err(key)
	}
	switch string(key) {
	case "model":
		b.rawModel = Span{i, end}
		return end, b.readModel(s.b[i:end])
	case "tools":
		if s.b[i] != 'n' {
			b.Tools = Span{i, end}
		}
	}
	if !b.route.Generates() {
		return end, nil
	}
	return end, b.readOption(key, s.b[i:end])
}

// readOption reads the fields of the generating routes.
func (b *Body) readOption(key, raw []byte) error {
	switch string(key) {
	case "stream":
		return b.readStream(raw)
	case "stream_options":
		b.readStreamOptions(raw)
	case "n":
		return b.readN(raw)
	case "max_tokens", "max_completion_tokens":
		return b.readMaxTokens(key, raw)
	case "user":
		b.User = b.text(raw)
	case "cache_salt":
		b.CacheSalt = b.text(raw)
	case "vllm_xargs":
		return checkXargs(raw)
	}
	return nil
}

// checkXargs refuses what vLLM takes from vllm_xargs and a client may not set: kv_transfer_params feeds a KV
// connector, and kv_cache_report_mode makes the engine tell of blocks as stored that it has had for long.
func checkXargs(raw []byte) error {
	if raw[0] != '{' {
		return nil
	}
	s := scanner{b: raw}
	var buf [64]byte
	var err error
	s.members(0, 1, func(key []byte, escaped bool, _ Span) bool {
		if escaped {
			key = unescape(buf[:0], key)
		}
		if k := string(key); k == "kv_cache_report_mode" || k == "kv_transfer_params" {
			err = newBodyError(faultReserved, []byte("vllm_xargs"), "vllm_xargs must not hold %s", k)
		}
		return err == nil
	})
	return err
}

// text is the meaning of a checked string; nil if raw is none.
func (b *Body) text(raw []byte) []byte {
	if raw[0] != '"' {
		return nil
	}
	if raw = raw[1 : len(raw)-1]; bytes.IndexByte(raw, '\\') >= 0 {
		return b.decode(raw)
	}
	return raw
}

// prompt checks the prompt at i and counts prompts and token ids: a string, [string], [id] or [[id]];
// anything else is one prompt of unknown length.
func (b *Body) prompt(s *scanner, i int) (end int) {
	var inner tally
	outer := tally{inner: &inner}
	s.inPrompt = true
	end = s.value(i, 1, &outer)
	s.inPrompt = false
	if end < 0 {
		return end
	}
	b.PromptBytes, b.first = end-i, Span{i, end}
	switch {
	case b.route == Chat:
	case outer.numbers > 0 && outer.strings+outer.arrays+outer.others == 0:
		b.PromptTokens = outer.numbers
	case outer.strings+outer.arrays > 0 && outer.numbers+outer.others == 0:
		b.prompts = outer.strings + outer.arrays
		b.first = Span{s.space(i + 1), outer.first}
		if outer.strings+inner.strings+inner.arrays+inner.others == 0 {
			b.PromptTokens = inner.numbers
		}
	}
	return end
}

func (b *Body) readModel(raw []byte) error {
	switch raw[0] {
	case '"':
		b.HasModel, b.Model = true, raw[1:len(raw)-1]
		if bytes.IndexByte(b.Model, '\\') >= 0 {
			b.model = unescape(b.model, b.Model)
			b.Model = b.model
		}
	case 'n':
	default:
		return newBodyError(faultType, []byte("model"), "model must be a string")
	}
	return nil
}

// readStream is strict: an engine may take 1 or "yes" for true, and dpserve must know which kind of answer
// comes.
func (b *Body) readStream(raw []byte) error {
	switch raw[0] {
	case 't':
		b.Stream = true
	case 'f', 'n':
	default:
		return newBodyError(faultType, []byte("stream"), "stream must be true or false")
	}
	return nil
}

func (b *Body) readStreamOptions(raw []byte) {
	if raw[0] != '{' {
		return
	}
	s := scanner{b: raw}
	var buf [64]byte
	s.members(0, 1, func(key []byte, escaped bool, v Span) bool {
		if escaped {
			key = unescape(buf[:0], key)
		}
		if string(key) == "include_usage" {
			b.IncludeUsage = raw[v.Start] == 't'
		}
		return true
	})
}

func (b *Body) readN(raw []byte) error {
	n, ok := number(raw)
	switch {
	case !ok:
	case n > MaxN:
		return newBodyError(faultTooLarge, []byte("n"), "n must be at most %d", MaxN)
	case n >= 1:
		b.N = int(n)
	}
	return nil
}

func (b *Body) readMaxTokens(key, raw []byte) error {
	n, ok := number(raw)
	switch {
	case !ok:
	case n > MaxMaxTokens:
		return newBodyError(faultTooLarge, key, "%s must be at most %d", key, int64(MaxMaxTokens))
	case n >= 0 && (!b.maxCompletion || string(key) == "max_completion_tokens"):
		b.MaxTokens = int64(n)
	}
	b.maxCompletion = b.maxCompletion || ok && string(key) == "max_completion_tokens"
	return nil
}

// number reads a checked JSON value as engines do: a number, or a string that holds one ("129" is 129 to
// them). Not a number ⇒ false. Beyond 2^53 it is rounded, far above every limit.
func number(raw []byte) (float64, bool) {
	switch c := raw[0]; {
	case c == '"':
		raw = unescape(nil, raw[1:len(raw)-1])
		raw = bytes.ReplaceAll(bytes.TrimSpace(raw), []byte("_"), nil)
	case c != '-' && c-'0' > 9:
		return 0, false
	}
	if n, ok := smallInt(raw); ok {
		return float64(n), true
	}
	n, err := strconv.ParseFloat(string(raw), 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return 0, false
	}
	return n, !math.IsNaN(n)
}

// smallInt reads up to fifteen digits.
func smallInt(raw []byte) (n int64, ok bool) {
	if len(raw) == 0 || len(raw) > 15 {
		return 0, false
	}
	for _, c := range raw {
		if c-'0' > 9 {
			return 0, false
		}
		n = 10*n + int64(c-'0')
	}
	return n, true
}
