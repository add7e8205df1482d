package ingress

import (
	"context"
	"net/http"

	"github.com/dpserve/dpserve/internal/apikeys"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// keyKey is the context key of a request's *apikeys.Key.
type keyKey struct{}

// keyOf is the key that a request was admitted with; nil: the node has no keys, or the request needs none.
func keyOf(r *http.Request) *apikeys.Key {
	k, _ := r.Context().Value(keyKey{}).(*apikeys.Key)
	return k
}

// isOpenPath reports whether a path needs no key: load balancers and orchestrators probe these, and their
// answers name no model.
func isOpenPath(path string) bool {
	switch path {
	case "/health", "/health_generate", "/healthz", "/readyz", "/livez", "/ping", "/-/healthz":
		return true
	}
	return false
}

// authenticate finds the key of a request before anything of its body is read. The request that it returns
// has the key in its context, and no field for keys: dpserve's keys are not the engines'. A failure is 401.
func (h surface) authenticate(r *http.Request) (*http.Request, *failure) {
	if h.in.keys == nil || isOpenPath(r.URL.Path) {
		return r, nil
	}
	k, presented := h.in.keys().FindIn(r.Header)
	if k == nil {
		reason, text := telemetry.KeyMissing, "this endpoint wants an API key; send it as "+
			"`Authorization: Bearer KEY`, `x-api-key: KEY` or `api-key: KEY`"
		if presented {
			reason, text = telemetry.KeyWrong,
				"the API key is not valid here; ask whoever runs this endpoint for another one"
		}
		h.in.access.Refused(reason)
		return r, newFailure(openai.CodeInvalidKey, text)
	}
	h.in.access.Used(k.Name)
	apikeys.Remove(r.Header)
	return r.WithContext(context.WithValue(r.Context(), keyKey{}, k)), nil
}

// refuseUnauthenticated answers 401 in the shape of the request's route.
func (h surface) refuseUnauthenticated(w http.ResponseWriter, r *http.Request, f *failure) {
	_, path := h.in.table.Load().split(r.URL.Path)
	w.Header()["Www-Authenticate"] = []string{"Bearer"}
	h.refuseUnrouted(w, r, openai.RouteOf(path), f)
}

// find returns the application of a model that the key may use, nil if there is none. A model that exists but
// is not the key's looks like one that does not exist, as at OpenAI: the client learns no name of others'
// models from the answer.
func (s *routeScope) find(model string, k *apikeys.Key) *appRoute {
	if !k.Allows(model) {
		return nil
	}
	e := s.models[model]
	switch {
	case e == nil:
		return s.findAdapter(model)
	case e.router.isNowhere(model):
		return nil
	}
	return e
}

// namesFor returns the served names that a key may use, sorted.
func (s *routeScope) namesFor(k *apikeys.Key) []string {
	if k.AllowsAll() {
		return s.names
	}
	var out []string
	for _, name := range s.names {
		if k.Allows(name) {
			out = append(out, name)
		}
	}
	return out
}
