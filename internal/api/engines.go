package api

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/problem"
)

// Engines makes control calls to the engines of applications. Implementations are safe for concurrent use.
type Engines interface {
	// CallEngines returns an answer for each rank. The error is problem.NotFound for unknown applications.
	CallEngines(ctx context.Context, q *msg.EngineCall) ([]client.RankAnswer, error)
}

// engineHandlers answers the path of control calls.
type engineHandlers struct{ engines Engines }

func (h engineHandlers) addRoutes(g *gin.Engine, reply replier) {
	g.POST(pathApps+"/:app/call", reply(h.call, "method", "path", "ranks"))
}

// call passes a control call on to the engines. Only those of openai's table pass.
func (h engineHandlers) call(c *gin.Context, q query) (int, any, error) {
	m := msg.EngineCall{
		App: c.Param("app"), Method: q.values.Get("method"), Path: q.values.Get("path"),
	}
	if m.Method == "" {
		m.Method = http.MethodPost
	}
	if err := checkControl(m.Method, m.Path); err != nil {
		return 0, nil, err
	}
	if text := q.values.Get("ranks"); text != "" {
		m.Ranks = strings.Split(text, ",")
	}
	for _, r := range m.Ranks {
		if _, _, ok := client.ParseRankName(r); !ok {
			return 0, nil, badValueError("ranks", r, "write GROUP/RANK, for example 0/3")
		}
	}
	var err error
	if m.Body, err = readBody(c, maxRankBody, "a control call has a small body"); err != nil {
		return 0, nil, err
	}
	if len(m.Body) > 0 && !json.Valid(m.Body) {
		return 0, nil, problem.New(problem.InvalidArgument, "the body is no JSON").
			WithHint("send what the engine wants, for example {\"lora_name\": \"sql\"}")
	}
	answers, err := h.engines.CallEngines(c.Request.Context(), &m)
	if err != nil {
		return 0, nil, err
	}
	if len(answers) == 0 {
		return 0, nil, problem.New(problem.NotFound, "no such rank of %s runs", m.App).
			WithHint("`dpserve status %s` lists its ranks", m.App)
	}
	return http.StatusOK, client.RankAnswers{Answers: answers}, nil
}

func checkControl(method, path string) error {
	alone, _, _ := strings.Cut(path, "?")
	control := openai.ControlOf(alone)
	switch {
	case control == nil || !control.IsAllowed() || strings.Contains(path, "#"):
		return problem.New(problem.PermissionDenied, "%q is no control call that dpserve passes on", alone).
			WithHint("those are %s", strings.Join(openai.AllowedControls(), ", "))
	case !slices.Contains(control.Methods, method):
		return problem.New(problem.InvalidArgument, "%s has no method %s", alone, method).
			WithHint("use %s", strings.Join(control.Methods, " or "))
	}
	return nil
}
