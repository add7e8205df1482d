package api

import (
	"encoding/json"
	"net/http"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// workerQuery reads url= and app= of SGLang's worker paths.
func workerQuery(c *gin.Context) (appName, url string, err error) {
	q, err := parseQuery(c.Request.URL.RawQuery, "url", "app")
	if err != nil {
		return "", "", err
	}
	if url = q.values.Get("url"); url == "" {
		return "", "", problem.New(problem.InvalidArgument, "no url is given").WithHint("add url=http://HOST:PORT")
	}
	return q.values.Get("app"), url, nil
}

// addWorker answers like SGLang's router, but does not wait until the worker is healthy: it is in routing once it is.
func (s *Server) addWorker(c *gin.Context) (int, any, error) {
	name, url, err := workerQuery(c)
	if err != nil {
		return 0, nil, err
	}
	rank, err := json.Marshal(map[string]string{"url": url})
	if err != nil {
		return 0, nil, problem.New(problem.InvalidArgument, "the url cannot be read: %w", err)
	}
	change, err := s.cfg.Ranks.AddRank(c.Request.Context(), name, rank)
	return http.StatusOK, plainText("Successfully added worker: " + change.URL), err
}

func (s *Server) removeWorker(c *gin.Context) (int, any, error) {
	name, url, err := workerQuery(c)
	if err != nil {
		return 0, nil, err
	}
	change, err := s.cfg.Ranks.RemoveRank(c.Request.Context(), name, RankRemoval{Rank: app.RankRef{URL: url}})
	return http.StatusOK, plainText("Successfully removed worker: " + change.URL), err
}

func (s *Server) listWorkers(c *gin.Context) (int, any, error) {
	q, err := parseQuery(c.Request.URL.RawQuery, "app")
	if err != nil {
		return 0, nil, err
	}
	urls, err := s.cfg.Ranks.Workers(c.Request.Context(), q.values.Get("app"))
	if urls == nil {
		urls = []string{}
	}
	return http.StatusOK, WorkersReply{urls}, err
}
