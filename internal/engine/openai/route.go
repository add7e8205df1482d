package openai

import "net/http"

// Route is one of the inference routes that dpserve serves. The zero value is none of them.
type Route uint8

// The routes.
const (
	NoRoute Route = iota
	Completions
	Chat
	Tokenize
	Detokenize
	Models
)

// NumRoutes is one more than the highest Route: the length of an array indexed by Route.
const NumRoutes = int(Models) + 1

// routeInfo is one row of the table of routes.
type routeInfo struct {
	name, method, path string
	prompts            [2]string // top-level fields that hold the prompt
	generates          bool      // answers with choices and may stream
}

var routes = [NumRoutes]routeInfo{
	NoRoute: {name: "none"},
	Completions: {
		name: "completions", method: http.MethodPost, path: "/v1/completions",
		prompts: [2]string{"prompt"}, generates: true,
	},
	Chat: {
		name: "chat", method: http.MethodPost, path: "/v1/chat/completions",
		prompts: [2]string{"messages"}, generates: true,
	},
	Tokenize: {
		name: "tokenize", method: http.MethodPost, path: "/tokenize",
		prompts: [2]string{"prompt", "messages"},
	},
	Detokenize: {
		name: "detokenize", method: http.MethodPost, path: "/detokenize",
		prompts: [2]string{"tokens"},
	},
	Models: {name: "models", method: http.MethodGet, path: "/v1/models"},
}

// RouteOf returns the route of a path without the app's route prefix; NoRoute if dpserve does not serve it.
func RouteOf(path string) Route {
	for r := Completions; int(r) < NumRoutes; r++ {
		if routes[r].path == path {
			return r
		}
	}
	return NoRoute
}

// String is the route's short name, as in metrics: completions, chat, tokenize, detokenize, models.
func (r Route) String() string { return routes[r].name }

// Method is the only HTTP method of the route.
func (r Route) Method() string { return routes[r].method }

// Path is the route's path on an engine.
func (r Route) Path() string { return routes[r].path }

// Generates reports whether the route's answer has choices and usage and may stream.
func (r Route) Generates() bool { return routes[r].generates }

// isPrompt reports whether the top-level field key holds the route's prompt.
func (r Route) isPrompt(key []byte) bool {
	p := &routes[r].prompts
	return len(key) > 0 && (string(key) == p[0] || string(key) == p[1])
}
