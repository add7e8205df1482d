package ingress

import (
	"encoding/json"
	"net/http"

	"github.com/dpserve/dpserve/engine/openai"
)

// model is one entry of /v1/models, in OpenAI's shape with vLLM's root and parent: an alias or an adapter
// points to the application's own id.
type model struct {
	ID      string  `json:"id"`
	Object  string  `json:"object"`
	Created int64   `json:"created"`
	OwnedBy string  `json:"owned_by"`
	Root    string  `json:"root"`
	Parent  *string `json:"parent"`

	MaxModelLen int `json:"max_model_len,omitempty"` // the smallest of its ready ranks, in tokens
}

func modelOf(name string, e *appRoute) model {
	m := model{ID: name, Object: "model", Created: e.created, OwnedBy: "dpserve", Root: e.app.Model.Source,
		MaxModelLen: e.router.minModelLen()}
	if name != e.app.Model.ID {
		m.Root, m.Parent = e.app.Model.ID, &e.app.Model.ID
	}
	if m.Root == "" {
		m.Root = name
	}
	return m
}

// listModels answers from the route table; no engine is asked.
func (in *Ingress) listModels(w http.ResponseWriter, r *http.Request, s *routeScope) {
	out := struct {
		Object string  `json:"object"`
		Data   []model `json:"data"`
	}{Object: "list", Data: []model{}}
	for _, name := range s.names {
		out.Data = append(out.Data, modelOf(name, s.models[name]))
	}
	in.answerJSON(w, r, out)
}

func (in *Ingress) showModel(w http.ResponseWriter, r *http.Request, s *routeScope, id string) {
	e := s.models[id]
	if e == nil {
		in.refuseUnrouted(w, r, openai.Models, unknownModel([]byte(id), s))
		return
	}
	in.answerJSON(w, r, modelOf(id, e))
}

// health is the readiness of this ingress, for load balancers.
func (in *Ingress) health(w http.ResponseWriter, r *http.Request) {
	if in.Ready() {
		in.answerJSON(w, r, map[string]string{"status": "ready"})
		return
	}
	f := newFailure(openai.CodeNoReadyRank, "no application has a ready rank")
	if in.draining.Load() {
		f.message = "this ingress is draining"
	}
	w.Header()["Retry-After"] = []string{"1"}
	in.refusePlain(w, r, f)
}

// rayHealth is health for probes written for Ray Serve: the same status, with Ray's body.
func (in *Ingress) rayHealth(w http.ResponseWriter, r *http.Request) {
	if !in.Ready() {
		in.health(w, r)
		return
	}
	in.answerPlain(w, r, func() { writeText(w, "success") })
}

// live answers 200 as long as the process runs, whatever it can serve.
func (in *Ingress) live(w http.ResponseWriter, r *http.Request) {
	in.answerJSON(w, r, map[string]string{"status": "live"})
}

// rayRoutes lists the applications by route prefix, as Ray Serve does. Where several share one, their names
// are joined by commas.
func (in *Ingress) rayRoutes(w http.ResponseWriter, r *http.Request) {
	in.answerJSON(w, r, in.table.Load().routes())
}

func (in *Ingress) showVersion(w http.ResponseWriter, r *http.Request) {
	in.answerJSON(w, r, map[string]string{"version": in.version})
}

func (in *Ingress) answerJSON(w http.ResponseWriter, r *http.Request, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		in.refusePlain(w, r, &failure{status: http.StatusInternalServerError,
			message: "the answer could not be written"})
		return
	}
	in.answerPlain(w, r, func() { writeJSON(w, http.StatusOK, body) })
}
