package transfer

import (
	"bytes"
	"slices"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// Route is an inference route of an engine whose requests can be split. The zero value is any other route.
type Route uint8

// The routes. dpserve's ingress serves the first two.
const (
	OtherRoute Route = iota
	Completions
	Chat
	Responses
	Messages
	Generate
)

// routeInfo is one row of the table of routes: how a request on it is cut to one token.
type routeInfo struct {
	path   string
	prompt string // field that holds the prompt
	tokens string // field that bounds the output; nested in sampling_params if isNested
	// isNested: sampling_params holds the fields that other routes have at the top
	isNested bool
	// media are marks of parts that are no text, in a prompt that is no string
	media []string
}

var routes = [...]routeInfo{
	OtherRoute:  {},
	Completions: {path: "/v1/completions", prompt: "prompt", tokens: "max_tokens"},
	Chat:        {path: "/v1/chat/completions", prompt: "messages", tokens: "max_tokens"},
	Responses: {
		path: "/v1/responses", prompt: "input", tokens: "max_output_tokens",
		media: []string{`"input_image"`, `"input_file"`, `"input_video"`},
	},
	Messages: {
		path: "/v1/messages", prompt: "messages", tokens: "max_tokens",
		media: []string{`"image"`, `"document"`},
	},
	Generate: {path: "/inference/v1/generate", prompt: "token_ids", tokens: "max_tokens", isNested: true},
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
	// OnRoute: the route has no output tokens, as embeddings, or the transfer does not know it.
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
	// Stateful: the request continues an answer that one engine keeps, or returns before its answer is ready.
	Stateful
	// EngineTools: the engine may run a tool and ask its model again within one request. The second prompt is
	// longer than the first one, and a decode engine ends when its prompt needs more blocks than it is given.
	EngineTools
	numReasons
)

var reasonNames = [numReasons]string{
	"", "route", "prompt_list", "several_choices", "prompt_embeds", "media", "prompt_logprobs", "no_output",
	"stateful", "engine_tools",
}

func (r Reason) String() string { return reasonNames[r] }

// splits reports whether requests on r can be split by a transfer.
func (t *Traits) splits(r Route) bool { return slices.Contains(t.routes, r) }

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
	maxCompletion  bool        // the client has sent max_completion_tokens
	sampling       openai.Span // value of sampling_params, zero if it is no object
	nested         openai.Cuts // of sampling_params
}

// Scan reads body as a request on route for transfer t. The caller has removed the route's prefix. Scan fails
// with an *openai.BodyError if body is no JSON object, or if it hides a transfer field where an engine would
// read it: such a request is refused with 400.
func (q *Request) Scan(t Transfer, route Route, body []byte) error {
	*q = Request{
		Route: route, Body: body, Prompts: 1, traits: t.Traits(), limit: q.limit[:0],
		forDecode: q.forDecode, forPrefill: q.forPrefill, nested: q.nested,
	}
	q.forDecode.Reset()
	q.forPrefill.Reset()
	q.nested.Reset()
	if !q.traits.splits(route) {
		q.cannot(OnRoute)
	}
	if err := openai.Members(body, q.member); err != nil {
		return err
	}
	q.forDecode.Close()
	q.forPrefill.Close()
	q.nested.Close()
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
	cut := ours || q.traits.limits && q.leavesOut(key)
	info := &routes[q.Route]
	if string(key) == "sampling_params" && info.isNested {
		// A second member of the same name wins: its cuts replace those of the first.
		q.sampling = openai.Span{}
		q.nested.Reset()
		if raw[0] == '{' {
			q.sampling = value
			if err := openai.Members(raw, q.samplingMember); err != nil {
				return err
			}
		}
		cut = q.traits.limits
	}
	q.forPrefill.Member(member, cut)
	switch string(key) {
	case "vllm_xargs", "sampling_params", "extra_args", "extra_body", "custom_params":
		if err := refuseNested(key, raw, 0); err != nil {
			return err
		}
	case info.prompt:
		q.readPrompt(raw)
	}
	if !info.isNested {
		q.readOption(key, raw)
	}
	q.readTopOption(key, raw)
	return nil
}

// samplingMember reads a member of sampling_params of the generate route.
func (q *Request) samplingMember(key []byte, member, value openai.Span) error {
	q.nested.Member(member, q.leavesOut(key))
	from := q.sampling.Start
	q.readOption(key, q.Body[from+value.Start:from+value.End])
	return nil
}

// leavesOut reports whether the prefill leg goes without a field: it bounds or shapes an output of which the
// client sees nothing, and an engine refuses some of these together with one output token.
func (q *Request) leavesOut(key []byte) bool {
	switch string(key) {
	case "stream", "stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens",
		"min_tokens", "min_completion_tokens", "echo", "return_token_ids":
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
	switch q.Route {
	case Completions:
		q.Prompts = max(q.Prompts, openai.Prompts(raw))
		if q.Prompts > 1 && !q.traits.moveLists {
			q.cannot(PromptList)
		}
	case Chat:
		if openai.HasMedia(raw) {
			q.cannot(MediaParts)
		}
	case OtherRoute, Responses, Messages, Generate:
		for _, mark := range routes[q.Route].media {
			if bytes.Contains(raw, []byte(mark)) {
				q.cannot(MediaParts)
			}
		}
	}
}

// readOption reads a field that is at the top of a body, or in sampling_params on the generate route.
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
	case "max_tokens", "max_completion_tokens", "max_output_tokens":
		q.maxCompletion = q.maxCompletion || string(key) == "max_completion_tokens"
		if n, ok := openai.Number(raw); ok && n < 1 {
			q.cannot(NoOutput)
		}
	}
}

// readTopOption reads a field that is at the top of a body on each route that has it.
func (q *Request) readTopOption(key, raw []byte) {
	switch string(key) {
	case "echo":
		q.echo = isSet(raw)
	case "logprobs":
		q.logprobs = raw[0] != 'n'
	case "prompt_embeds":
		if raw[0] != 'n' {
			q.cannot(PromptEmbeds)
		}
	case "features":
		if q.Route == Generate && raw[0] != 'n' {
			q.cannot(MediaParts)
		}
	case "background":
		if q.Route == Responses && isSet(raw) {
			q.cannot(Stateful)
		}
	case "previous_response_id", "conversation":
		if q.Route == Responses && raw[0] != 'n' {
			q.cannot(Stateful)
		}
	case "tools":
		if q.Route == Responses && raw[0] != 'n' && string(raw) != "[]" {
			q.cannot(EngineTools)
		}
	}
}

// isSet reports whether an engine may read a value as true: engines take 1 and "yes" for it as well.
func isSet(raw []byte) bool { return raw[0] != 'n' && raw[0] != 'f' }

// writeLimit writes the members that end the prefill leg after one token.
func (q *Request) writeLimit() {
	info := &routes[q.Route]
	q.limit = append(q.limit, `"stream":false`...)
	if info.isNested {
		q.limit = append(q.limit, `,"sampling_params":`...)
		inner := []byte("{}")
		if q.sampling.End > 0 {
			inner = q.Body[q.sampling.Start:q.sampling.End]
		}
		q.limit = openai.AppendEdited(q.limit, inner, q.nested.Spans, q.oneToken(nil))
		return
	}
	q.limit = append(q.limit, ',')
	q.limit = q.oneToken(q.limit)
}

// oneToken appends the members that bound the output to one token.
func (q *Request) oneToken(dst []byte) []byte {
	dst = append(append(append(dst, '"'), routes[q.Route].tokens...), `":1`...)
	if q.maxCompletion {
		dst = append(dst, `,"max_completion_tokens":1`...)
	}
	if q.traits.toLength {
		dst = append(dst, `,"ignore_eos":true`...)
	}
	return dst
}
