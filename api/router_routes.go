package api

import (
	"net/http"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
)

// routers adds the paths of the Routers.
func (s *Server) routers(g *gin.Engine) {
	if s.cfg.Routers == nil {
		return
	}
	one := pathRouters + "/:app"
	g.GET(one, s.reply(s.router))
	g.POST(one+"/explain", s.reply(s.explain))
	g.POST(one+"/reset", s.reply(s.reset))
	g.POST(one+"/best_worker", s.reply(s.bestWorker))
	g.POST(one+"/potential_loads", s.reply(s.potentialLoads))
	g.POST(one+"/mark_prefill_complete", s.reply(s.markPrefillComplete))
	g.POST(one+"/free", s.reply(s.free))
	g.GET(one+"/dump_events", s.dumpEvents)
	g.POST(one+"/generate", s.generate)
}

func (s *Server) router(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	r, err := s.cfg.Routers.Router(c.Request.Context(), c.Param("app"))
	return http.StatusOK, RouterReply{Envelope{APIVersion}, r}, err
}

func (s *Server) explain(c *gin.Context) (int, any, error) {
	var q msg.RouteQuery
	if err := readRouterBody(c, &q); err != nil {
		return 0, nil, err
	}
	if err := checkQuery(&q); err != nil {
		return 0, nil, err
	}
	e, err := s.cfg.Routers.Explain(c.Request.Context(), c.Param("app"), &q)
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, ExplainReply{Envelope{APIVersion}, *e}, nil
}

// checkQuery refuses a query that asks for nothing, or for two things at once.
func checkQuery(q *msg.RouteQuery) error {
	given := 0
	for _, is := range []bool{q.Prompt != nil, q.TokenIDs != nil, len(q.Request) > 0, q.Replay != ""} {
		if is {
			given++
		}
	}
	const hint = "give one of prompt, token_ids, request and replay"
	switch {
	case given == 0:
		return problem.New(problem.InvalidArgument, "there is nothing to explain").WithHint(hint)
	case given > 1:
		return problem.New(problem.InvalidArgument, "%d requests at once", given).WithHint(hint)
	case (q.Route != "" || len(q.Headers) > 0) && q.Prompt == nil && len(q.Request) == 0:
		return problem.New(problem.InvalidArgument, "route and headers go with prompt and request").WithHint("leave them out")
	case q.Model != "" && q.Prompt == nil && q.TokenIDs == nil:
		return problem.New(problem.InvalidArgument, "model goes with prompt and token_ids").WithHint("leave it out: the request names its own")
	case q.TokenIDs != nil:
		return checkIDs(q.TokenIDs)
	}
	return nil
}

// checkIDs bounds a prompt of token ids. Whether they mean something is the engine's to say.
func checkIDs(ids []uint32) error {
	switch {
	case len(ids) == 0:
		return problem.New(problem.InvalidArgument, "token_ids is empty").WithHint("send the prompt as token ids: [1, 2, 3]")
	case len(ids) > maxTokenIDs:
		return problem.New(problem.TooLarge, "token_ids has %d entries, more than %d", len(ids), maxTokenIDs).WithHint("send a shorter prompt")
	}
	return nil
}

func (s *Server) reset(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	r, err := s.cfg.Routers.Reset(c.Request.Context(), c.Param("app"))
	return http.StatusOK, ResetReply{Envelope{APIVersion}, r}, err
}

func (s *Server) bestWorker(c *gin.Context) (int, any, error) {
	var q msg.BestWorker
	if err := readRouterBody(c, &q); err != nil {
		return 0, nil, err
	}
	if err := checkIDs(q.TokenIDs); err != nil {
		return 0, nil, err
	}
	w, err := s.cfg.Routers.BestWorker(c.Request.Context(), c.Param("app"), &q)
	return http.StatusOK, WorkerReply{Envelope{APIVersion}, w}, err
}

func (s *Server) potentialLoads(c *gin.Context) (int, any, error) {
	var q tokensRequest
	if err := readRouterBody(c, &q); err != nil {
		return 0, nil, err
	}
	if len(q.TokenIDs) > 0 {
		if err := checkIDs(q.TokenIDs); err != nil {
			return 0, nil, err
		}
	}
	loads, err := s.cfg.Routers.PotentialLoads(c.Request.Context(), c.Param("app"), q.TokenIDs)
	if loads == nil {
		loads = []msg.PotentialLoad{}
	}
	return http.StatusOK, LoadsReply{Envelope{APIVersion}, loads}, err
}

func (s *Server) markPrefillComplete(c *gin.Context) (int, any, error) {
	id, err := readReservation(c)
	if err != nil {
		return 0, nil, err
	}
	err = s.cfg.Routers.MarkPrefillComplete(c.Request.Context(), c.Param("app"), id)
	return http.StatusOK, ReservationReply{Envelope{APIVersion}, id, "prefill_complete"}, err
}

func (s *Server) free(c *gin.Context) (int, any, error) {
	id, err := readReservation(c)
	if err != nil {
		return 0, nil, err
	}
	err = s.cfg.Routers.Free(c.Request.Context(), c.Param("app"), id)
	return http.StatusOK, ReservationReply{Envelope{APIVersion}, id, "freed"}, err
}

func readReservation(c *gin.Context) (string, error) {
	var q reservationRequest
	if err := readRouterBody(c, &q); err != nil {
		return "", err
	}
	if q.RequestID == "" {
		return "", problem.New(problem.InvalidArgument, "request_id is missing").WithHint("give the request_id that best_worker was called with")
	}
	return q.RequestID, nil
}
