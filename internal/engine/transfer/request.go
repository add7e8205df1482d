package transfer

import (
	"bytes"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// Route is an inference route of an engine whose requests can be split. The zero value is any other route.
type Route uint8

// The routes that dpserve's ingress serves.
const (
	OtherRoute Route = iota
	Completions
	Chat
)

// routes are the paths of the routes, and the fields that hold the prompt.
var routes = [...]struct{ path, prompt string }{
	Completions: {"/v1/completions", "prompt"},
	Chat:        {"/v1/chat/completions", "messages"},
}

// RouteOf returns the route of a path on an engine; OtherRoute if requests to it cannot be split.
func RouteOf(path string) Route {
	for r := Completions; int(r) < len(routes); r++ {
		if routes[r].path == path {
			return r
		}
	}
	return OtherRoute
}

// Path is the route's path on an engine, "" for OtherRoute.
func (r Route) Path() string { return routes[r].path }

// Reason is why a request is not split into two legs. Its text is a label of metrics.
type Reason uint8

// The closed list of reasons.
const (
	CanSplit Reason = iota
	// OnRoute: the route has no output tokens.
	OnRoute
	// PromptList: several prompts in one body. A prefill rank returns the parameters of the first prompt, and
	// a decode rank reads these blocks for all prompts: the second text is wrong.
	PromptList
	// SeveralChoices: n or best_of above 1, or beam search. Each choice reads the blocks again, the second
	// time after the prefill rank was told to free them.
	SeveralChoices
	// PromptEmbeds: the prompt is given as vectors.
	PromptEmbeds
	// MediaParts: the prompt holds pictures, sounds or the like.
	MediaParts
	// PromptLogprobs: the answer tells of each prompt token, so the decode rank computes the prompt anyway.
	PromptLogprobs
	// NoOutput: the request asks for no token, or for less.
	NoOutput
	numReasons
)

var reasonNames = [numReasons]string{
	"", "route", "prompt_list", "several_choices", "prompt_embeds", "media", "prompt_logprobs", "no_output",
}

func (r Reason) String() string { return reasonNames[r] }

// Request is a client's request as the two legs need it. Scan fills it; the zero value is ready, and reuse
// saves allocations. Both legs are copies of the same Body, so their prompts are equal byte for byte.
type Request struct {
	Route   Route
	Body    []byte // the client's bytes, which must not change while the request lives
	Reason  Reason // why it cannot be split; CanSplit if it can
	Prompts int    // in the body

	traits     *Traits
	forDecode  openai.Cuts // what only dpserve may set
	forPrefill openai.Cuts // that, and what the prefill leg must not ask for
	limit      []byte      // members by which the prefill leg ends after one token

	echo, logprobs bool
	maxCompletion  bool // the client has sent max_completion_tokens
}

// Scan reads body as a request on route for transfer t. The caller has removed the route's prefix. Scan fails
// with an *openai.BodyError if body is no JSON object, or if it hides a transfer field where an engine would
// read it: such a request is refused with 400.
func (q *Request) Scan(t Transfer, route Route, body []byte) error {
	*q = Request{
		Route: route, Body: body, Prompts: 1, traits: t.Traits(), limit: q.limit[:0],
		forDecode: q.forDecode, forPrefill: q.forPrefill,
	}
	q.forDecode.Reset()
	q.forPrefill.Reset()
	if route == OtherRoute {
		q.cannot(OnRoute)
	}
	if err := openai.Members(body, q.member); err != nil {
		return err
	}
	q.forDecode.Close()
	q.forPrefill.Close()
	if q.echo && q.logprobs {
		q.cannot(PromptLogprobs)
	}
	if q.traits.limits {
		q.writeLimit()
	}
	return nil
}

// cannot keeps the first reason that is found.
func (q *Request) cannot(why Reason) {
	if q.Reason == CanSplit {
		q.Reason = why
	}
}

// HasReserved reports whether the client's body has fields that only dpserve may set.
func (q *Request) HasReserved() bool { return len(q.forDecode.Spans) > 0 }

// AppendPlain appends the body of q to dst as one rank without a partner gets it.
func (q *Request) AppendPlain(dst []byte) []byte {
	return openai.AppendEdited(dst, q.Body, q.forDecode.Spans)
}

// isOurs reports whether a field of a request belongs to dpserve: it selects a rank, or feeds a KV or encoder
// connector. One such object from a client can end an engine.
func isOurs(key []byte) bool {
	switch string(key) {
	case "transfer_id", "disagg_spec":
		return true
	}
	return openai.Reserved(key) || bytes.HasPrefix(key, []byte("remote_")) ||
		bytes.HasPrefix(key, []byte("do_remote_"))
}

// member reads one top-level member.
func (q *Request) member(key []byte, member, value openai.Span) error {
	raw := q.Body[value.Start:value.End]
	ours := isOurs(key)
	q.forDecode.Member(member, ours)
	q.forPrefill.Member(member, ours || q.traits.limits && q.leavesOut(key))
	switch string(key) {
	case "vllm_xargs", "sampling_params", "extra_args", "extra_body", "custom_params":
		if err := refuseNested(key, raw, 0); err != nil {
			return err
		}
	case routes[q.Route].prompt:
		q.readPrompt(raw)
	}
	q.readOption(key, raw)
	return nil
}

// leavesOut reports whether the prefill leg goes without a field: it bounds or shapes an output of which the
// client sees nothing, and an engine refuses some of these together with one output token.
func (q *Request) leavesOut(key []byte) bool {
	switch string(key) {
	case "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens",
		"min_completion_tokens", "echo", "return_token_ids":
		return true
	case "stop", "stop_token_ids", "ignore_eos":
		return q.traits.toLength
	}
	return false
}

// refuseNested fails if the object raw holds a field of dpserve at any depth that an engine reads.
func refuseNested(field, raw []byte, depth int) error {
	const deepest = 3 // extra_args of sampling_params is the deepest that is known
	if raw[0] != '{' || depth > deepest {
		return nil
	}
	return openai.Members(raw, func(key []byte, _, value openai.Span) error {
		if isOurs(key) || string(key) == "kv_cache_report_mode" {
			return &openai.BodyError{
				Message: string(field) + " must not hold " + string(key[:min(len(key), 64)]),
				Param:   string(field), Code: openai.CodeInvalidRequest,
			}
		}
		return refuseNested(field, raw[value.Start:value.End], depth+1)
	})
}

// readPrompt notes what in the prompt keeps a request from being split.
func (q *Request) readPrompt(raw []byte) {
	if raw[0] != '[' {
		return
	}
	switch {
	case q.Route == Completions:
		q.Prompts = max(q.Prompts, openai.Prompts(raw))
		if q.Prompts > 1 && !q.traits.moveLists {
			q.cannot(PromptList)
		}
	case q.Route == Chat && openai.HasMedia(raw):
		q.cannot(MediaParts)
	}
}

// readOption reads a field that may keep a request from being split.
func (q *Request) readOption(key, raw []byte) {
	switch string(key) {
	case "n", "best_of":
		if n, ok := openai.Number(raw); ok && n > 1 {
			q.cannot(SeveralChoices)
		}
	case "use_beam_search":
		if isSet(raw) {
			q.cannot(SeveralChoices)
		}
	case "prompt_logprobs":
		if raw[0] != 'n' {
			q.cannot(PromptLogprobs)
		}
	case "max_tokens", "max_completion_tokens":
		q.maxCompletion = q.maxCompletion || string(key) == "max_completion_tokens"
		if n, ok := openai.Number(raw); ok && n < 1 {
			q.cannot(NoOutput)
		}
	case "echo":
		q.echo = isSet(raw)
	case "logprobs":
		q.logprobs = raw[0] != 'n'
	case "prompt_embeds":
		if raw[0] != 'n' {
			q.cannot(PromptEmbeds)
		}
	}
}

// isSet reports whether an engine may read a value as true: engines take 1 and "yes" for it as well.
func isSet(raw []byte) bool { return raw[0] != 'n' && raw[0] != 'f' }

// writeLimit writes the members that end the prefill leg after one token.
func (q *Request) writeLimit() {
	q.limit = append(q.limit, `"stream":false,"max_tokens":1`...)
	if q.maxCompletion {
		q.limit = append(q.limit, `,"max_completion_tokens":1`...)
	}
	if q.traits.toLength {
		q.limit = append(q.limit, `,"ignore_eos":true`...)
	}
}
