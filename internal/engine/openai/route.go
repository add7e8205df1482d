package openai

import (
	"net/http"
	"strings"
)

// Route is one of the routes of engines that dpserve knows, or Other or OtherRead. The zero value is none.
type Route uint8

// The routes.
const (
	NoRoute Route = iota
	Completions
	Chat
	Tokenize
	Detokenize
	Models
	Responses
	ResponseRead
	ResponseItems
	ResponseCancel
	ResponseDelete
	Messages
	CountTokens
	Generate
	Embeddings
	Rerank
	Score
	Pooling
	Classify
	Transcriptions
	Translations
	Speech
	Other     // POST of any other path
	OtherRead // GET of any other path
)

// NumRoutes is one more than the highest Route: the length of an array indexed by Route.
const NumRoutes = int(OtherRead) + 1

// routeInfo is one row of the table of routes.
type routeInfo struct {
	name, method string
	// on an engine, without the slash at the end; {id} stands for one segment. The first is the usual one
	paths   []string
	shape   Shape     // of dpserve's own errors
	prompts [2]string // top-level fields that hold the prompt
	// a top-level field that the prompt begins with, beside prompts
	opening string
	// the prompt is a list of messages or items: one prompt, whatever its length
	isDialog bool
	// the answer is text that the engine generates: it may stream, and it has usage
	generates bool
	// the engine computes for it: it counts as load, and waits for a rank with room
	computes bool
	// a rank's failure is none of the request's, and another rank may be sent it; else the client gets what
	// the engine says, and it counts against no rank
	again bool
	// the body is JSON, a form with the model as one of its fields, or nothing; else it is a JSON object
	isFree bool
	// the member of a stream's events that holds the answer as far as it is known, with its model
	holder string
	events eventMarks
}

// eventMarks are parts of the data by which the events of a route's stream are told apart. The zero value:
// any event is content, and any end is a good one.
type eventMarks struct {
	content string // of events with content
	last    []string
	isBlind bool // there are no choices with a finish_reason, as completions and chat have them
}

var (
	unknownEvents  = eventMarks{isBlind: true}
	responseEvents = eventMarks{
		isBlind: true, content: `.delta"`,
		last: []string{`"response.completed"`, `"response.incomplete"`, `"response.failed"`},
	}
	messageEvents = eventMarks{
		isBlind: true, content: `"content_block_delta"`, last: []string{`"message_stop"`},
	}
)

var routes = [NumRoutes]routeInfo{
	NoRoute: {name: "none"},
	Completions: {
		name: "completions", method: http.MethodPost, paths: []string{"/v1/completions"},
		prompts: [2]string{"prompt"}, generates: true, computes: true, again: true,
	},
	Chat: {
		name: "chat", method: http.MethodPost, paths: []string{"/v1/chat/completions"},
		prompts: [2]string{"messages"}, isDialog: true, generates: true, computes: true, again: true,
	},
	Tokenize: {
		name: "tokenize", method: http.MethodPost, paths: []string{"/tokenize"},
		prompts: [2]string{"prompt", "messages"}, again: true,
	},
	Detokenize: {
		name: "detokenize", method: http.MethodPost, paths: []string{"/detokenize"},
		prompts: [2]string{"tokens"}, again: true,
	},
	Models: {name: "models", method: http.MethodGet, paths: []string{"/v1/models"}},
	Responses: {
		name: "responses", method: http.MethodPost, paths: []string{"/v1/responses"},
		prompts: [2]string{"input"}, opening: "instructions", isDialog: true,
		generates: true, computes: true, again: true, holder: "response", events: responseEvents,
	},
	ResponseRead: {
		name: "response", method: http.MethodGet, paths: []string{"/v1/responses/{id}"}, isFree: true,
		holder: "response", events: responseEvents,
	},
	ResponseItems: {
		name: "response_items", method: http.MethodGet, paths: []string{"/v1/responses/{id}/input_items"},
		isFree: true, events: unknownEvents,
	},
	ResponseCancel: {
		name: "response_cancel", method: http.MethodPost, paths: []string{"/v1/responses/{id}/cancel"},
		isFree: true, events: unknownEvents,
	},
	ResponseDelete: {
		name: "response_delete", method: http.MethodDelete, paths: []string{"/v1/responses/{id}"},
		isFree: true, events: unknownEvents,
	},
	Messages: {
		name: "messages", method: http.MethodPost, paths: []string{"/v1/messages"}, shape: Anthropic,
		prompts: [2]string{"messages"}, opening: "system", isDialog: true,
		generates: true, computes: true, again: true, holder: "message", events: messageEvents,
	},
	CountTokens: {
		name: "count_tokens", method: http.MethodPost, paths: []string{"/v1/messages/count_tokens"},
		shape: Anthropic, prompts: [2]string{"messages"}, isDialog: true, again: true,
	},
	Generate: {
		name: "generate", method: http.MethodPost, paths: []string{"/generate"}, shape: SGLang,
		prompts: [2]string{"text", "input_ids"}, generates: true, computes: true, again: true,
		events: unknownEvents,
	},
	Embeddings: {
		name: "embeddings", method: http.MethodPost, paths: []string{"/v1/embeddings"},
		prompts: [2]string{"input", "messages"}, computes: true, again: true, events: unknownEvents,
	},
	Rerank: {
		name: "rerank", method: http.MethodPost, paths: []string{"/v1/rerank", "/rerank", "/v2/rerank"},
		prompts: [2]string{"documents"}, opening: "query", computes: true, again: true,
		events: unknownEvents,
	},
	Score: {
		name: "score", method: http.MethodPost, paths: []string{"/v1/score", "/score"},
		prompts: [2]string{"text_2", "data_2"}, opening: "text_1", computes: true, again: true,
		events: unknownEvents,
	},
	Pooling: {
		name: "pooling", method: http.MethodPost, paths: []string{"/pooling", "/v1/pooling"},
		prompts: [2]string{"input", "messages"}, computes: true, again: true, events: unknownEvents,
	},
	Classify: {
		name: "classify", method: http.MethodPost, paths: []string{"/classify", "/v1/classify"},
		prompts: [2]string{"input", "messages"}, computes: true, again: true, events: unknownEvents,
	},
	Transcriptions: {
		name: "transcriptions", method: http.MethodPost, paths: []string{"/v1/audio/transcriptions"},
		computes: true, again: true, isFree: true, events: unknownEvents,
	},
	Translations: {
		name: "translations", method: http.MethodPost, paths: []string{"/v1/audio/translations"},
		computes: true, again: true, isFree: true, events: unknownEvents,
	},
	Speech: {
		name: "speech", method: http.MethodPost, paths: []string{"/v1/audio/speech"},
		prompts: [2]string{"input"}, computes: true, again: true, events: unknownEvents,
	},
	Other: {
		name: "other", method: http.MethodPost, computes: true, isFree: true, events: unknownEvents,
	},
	OtherRead: {name: "other", method: http.MethodGet, isFree: true, events: unknownEvents},
}

// byPath are the routes by their paths. ResponseDelete has the path of ResponseRead.
var byPath = func() map[string]Route {
	out := map[string]Route{}
	for r := Completions; int(r) < NumRoutes; r++ {
		for _, path := range routes[r].paths {
			if out[path] == NoRoute {
				out[path] = r
			}
		}
	}
	return out
}()

// responsePrefix begins the paths with an id.
const responsePrefix = "/v1/responses/"

// RouteOf returns the route of a clean path (see CleanPath) without the app's route prefix; NoRoute if the
// table does not have it. See ForMethod.
func RouteOf(path string) Route {
	if id := ResponseIDOf(path); id != "" {
		path = responsePrefix + "{id}" + path[len(responsePrefix)+len(id):]
	}
	return byPath[path]
}

// ForMethod is the route of the same path that takes a method; r itself if there is no other one.
func (r Route) ForMethod(method string) Route {
	if r == ResponseRead && method == http.MethodDelete {
		return ResponseDelete
	}
	return r
}

// ResponseIDOf is the id of a response in a path; "" if the path has none.
func ResponseIDOf(path string) string {
	id, ok := strings.CutPrefix(path, responsePrefix)
	if !ok {
		return ""
	}
	id, _, _ = strings.Cut(id, "/")
	return id
}

// String is the route's short name, as in metrics.
func (r Route) String() string { return routes[r].name }

// Method is the HTTP method of the route.
func (r Route) Method() string { return routes[r].method }

// Path is the route's usual path on an engine; "" for Other and OtherRead, {id} in place of an id.
func (r Route) Path() string {
	if len(routes[r].paths) == 0 {
		return ""
	}
	return routes[r].paths[0]
}

// Paths are all paths of the route on an engine. They must not be changed.
func (r Route) Paths() []string { return routes[r].paths }

// Shape is the shape of dpserve's own errors on the route.
func (r Route) Shape() Shape { return routes[r].shape }

// Generates reports whether the route's answer is generated text, which has usage and may stream.
func (r Route) Generates() bool { return routes[r].generates }

// Computes reports whether an engine computes for the request, so that it counts as load and waits for a rank
// with room.
func (r Route) Computes() bool { return routes[r].computes }

// Again reports whether another rank may be sent the request after one has failed. If not, the client gets
// what the engine says, and no answer counts against the rank.
func (r Route) Again() bool { return routes[r].again }

// IsFree reports whether the body may be anything; else it is a JSON object.
func (r Route) IsFree() bool { return routes[r].isFree }

// IsBasic reports whether every engine that generates has the route: only there an engine's 404 can mean
// that the engine is not what it should be.
func (r Route) IsBasic() bool { return r == Completions || r == Chat }

// PromptField is the top-level field of a body that holds a prompt of text; isMessages: as a list of
// messages.
func (r Route) PromptField() (name string, isMessages bool) {
	name = routes[r].prompts[0]
	return name, name == "messages"
}

// isPrompt reports whether the top-level field key holds the route's prompt.
func (r Route) isPrompt(key []byte) bool {
	p := &routes[r].prompts
	return len(key) > 0 && (string(key) == p[0] || string(key) == p[1])
}
