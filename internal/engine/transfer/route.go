package transfer

import "slices"

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
