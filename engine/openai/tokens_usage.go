package openai

import "bytes"

// Usage is the "usage" of an answer. Details differ by route and mode and may be absent or null: a Has flag
// tells an absent count from a 0.
type Usage struct {
	PromptTokens     int
	CompletionTokens int // 0 if absent, as in an answer without output
	TotalTokens      int

	CachedTokens       int // prompt_tokens_details.cached_tokens
	HasCached          bool
	CreatedCacheTokens int // prompt_tokens_details.created_cache_tokens
	HasCreatedCache    bool
}

var (
	usageKey   = []byte(`"usage"`)
	dataPrefix = []byte("data:")
)

// ParseUsage finds the top-level "usage" object of a JSON answer or of one server-sent event (with or without
// "data:"). False if there is none, if it is null, or if it has no prompt_tokens. What follows the object is
// not looked at.
func ParseUsage(b []byte) (u Usage, ok bool) {
	if !bytes.Contains(b, usageKey) { // most chunks end here; inside a string its quotes would be escaped
		return Usage{}, false
	}
	s := scanner{b: bytes.TrimPrefix(b, dataPrefix)}
	i := s.space(0)
	if s.peek(i) != '{' {
		return Usage{}, false
	}
	s.members(i, 1, func(key []byte, _ bool, v Span) bool {
		if string(key) != "usage" {
			return true
		}
		ok = u.read(s.b[v.Start:v.End])
		return false
	})
	if !ok {
		return Usage{}, false
	}
	return u, true
}

// read takes the counts from a usage object.
func (u *Usage) read(raw []byte) (ok bool) {
	if raw[0] != '{' {
		return false
	}
	s := scanner{b: raw}
	s.members(0, 1, func(key []byte, _ bool, v Span) bool {
		value := raw[v.Start:v.End]
		switch string(key) {
		case "prompt_tokens":
			u.PromptTokens, ok = count(value)
		case "completion_tokens":
			u.CompletionTokens, _ = count(value)
		case "total_tokens":
			u.TotalTokens, _ = count(value)
		case "prompt_tokens_details":
			u.readDetails(value)
		}
		return true
	})
	return ok
}

func (u *Usage) readDetails(raw []byte) {
	if raw[0] != '{' {
		return
	}
	s := scanner{b: raw}
	s.members(0, 1, func(key []byte, _ bool, v Span) bool {
		switch string(key) {
		case "cached_tokens":
			u.CachedTokens, u.HasCached = count(raw[v.Start:v.End])
		case "created_cache_tokens":
			u.CreatedCacheTokens, u.HasCreatedCache = count(raw[v.Start:v.End])
		}
		return true
	})
}

// count reads a plain number of tokens.
func count(raw []byte) (int, bool) {
	n, ok := smallInt(raw)
	return int(n), ok
}
