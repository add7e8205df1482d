package api

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// The paths of SGLang's router by which attached ranks come and go. dpserve's own are below an app.
const (
	pathAddWorker    = "/add_worker"
	pathRemoveWorker = "/remove_worker"
	pathListWorkers  = "/list_workers"
)

// Bounds of a rank change.
const (
	maxRankBody = 16 << 10            // bytes
	maxDeadline = 30 * 24 * time.Hour // as graceful_shutdown_timeout_s
)

// Ranks changes the attached ranks of applications. Implementations are safe for concurrent use, and a method
// returns when its ctx ends. An empty app means the only application of kind attach. Errors that users can
// act on are *problem.Error: Conflict for ranks that are attached already and for applications whose ranks
// are fixed, NotFound for unknown ranks, InvalidArgument for a malformed rank.
type Ranks interface {
	// AddRank attaches an engine, described like an item of engine.ranks (YAML or JSON). It returns once that
	// is committed, before the engine has answered, and does not touch other ranks. With ttl_s it renews the
	// lease of an engine that is attached already.
	AddRank(ctx context.Context, app string, rank []byte) (client.RankChange, error)
	// RemoveRank drains and detaches a rank. It returns once that is committed, while the rank's streams
	// continue.
	RemoveRank(ctx context.Context, app string, r RankRemoval) (client.RankChange, error)
	// Workers lists the URLs of the attached engines in rank order, each once.
	Workers(ctx context.Context, app string) ([]string, error)
}

// RankRemoval selects the rank to remove.
type RankRemoval struct {
	Rank app.RankRef
	// for its running streams, 0 = cut; nil = graceful_shutdown_timeout_s of the application
	Deadline *time.Duration
}

// workersReply answers GET /list_workers, as SGLang's router does.
type workersReply struct {
	URLs []string `json:"urls"`
}

// rankHandlers answers the paths by which attached ranks come and go.
type rankHandlers struct {
	ranks   Ranks
	backend Backend
	version string
}

// addRoutes registers the paths.
func (h rankHandlers) addRoutes(g *gin.Engine, reply replier) {
	g.POST(pathApps+"/:app/ranks", reply(h.addRank))
	g.DELETE(pathApps+"/:app/ranks", reply(h.removeRank, "url", "selector", "rank", "deadline"))
	h.addWorkerRoutes(g, reply)
}

func (h rankHandlers) addRank(c *gin.Context, _ query) (int, any, error) {
	text, err := readBody(c, maxRankBody, `send one rank: {"url": "http://HOST:PORT"}`)
	if err != nil {
		return 0, nil, err
	}
	change, err := h.ranks.AddRank(c.Request.Context(), c.Param("app"), text)
	return http.StatusAccepted, change, err
}

func (h rankHandlers) removeRank(c *gin.Context, q query) (int, any, error) {
	var r RankRemoval
	var err error
	if r.Rank, err = q.rankRef(); err != nil {
		return 0, nil, err
	}
	if r.Deadline, err = q.duration("deadline"); err != nil {
		return 0, nil, err
	}
	change, err := h.ranks.RemoveRank(c.Request.Context(), c.Param("app"), r)
	return http.StatusAccepted, change, err
}

// rankRef reads url= (with an optional selector=) or rank=GROUP/RANK.
func (q query) rankRef() (app.RankRef, error) {
	ref := app.RankRef{URL: q.values.Get("url")}
	rank, selector := q.values.Get("rank"), q.values.Get("selector")
	switch {
	case (ref.URL == "") == (rank == ""):
		return ref, problem.New(problem.InvalidArgument, "one of url and rank says which rank goes").
			WithHint("add url=http://HOST:PORT or rank=GROUP/RANK")
	case rank != "" && selector != "":
		return ref, problem.New(problem.InvalidArgument, "selector goes with url, not with rank").
			WithHint("leave it out")
	case rank != "":
		var ok bool
		if ref.Group, ref.Rank, ok = client.ParseRankName(rank); !ok {
			return ref, badValueError("rank", rank, "write GROUP/RANK, for example 0/3")
		}
	case selector != "":
		n, err := q.number("selector", 0, maxNumber)
		if err != nil {
			return ref, err
		}
		ref.Selector = &n
	}
	return ref, nil
}

// workerURL reads url= of SGLang's worker paths.
func (q query) workerURL() (string, error) {
	url := q.values.Get("url")
	if url == "" {
		return "", problem.New(problem.InvalidArgument, "no url is given").
			WithHint("add url=http://HOST:PORT")
	}
	return url, nil
}

// addWorker answers like SGLang's router, but does not wait until the worker is healthy: routing uses the
// worker once it is.
func (h rankHandlers) addWorker(c *gin.Context, q query) (int, any, error) {
	url, err := q.workerURL()
	if err != nil {
		return 0, nil, err
	}
	rank, _ := json.Marshal(map[string]string{"url": url}) // strings always marshal
	change, err := h.ranks.AddRank(c.Request.Context(), q.values.Get("app"), rank)
	return http.StatusOK, plainText("Successfully added worker: " + change.URL), err
}

func (h rankHandlers) removeWorker(c *gin.Context, q query) (int, any, error) {
	url, err := q.workerURL()
	if err != nil {
		return 0, nil, err
	}
	change, err := h.ranks.RemoveRank(c.Request.Context(), q.values.Get("app"),
		RankRemoval{Rank: app.RankRef{URL: url}})
	return http.StatusOK, plainText("Successfully removed worker: " + change.URL), err
}

func (h rankHandlers) listWorkers(c *gin.Context, q query) (int, any, error) {
	urls, err := h.ranks.Workers(c.Request.Context(), q.values.Get("app"))
	return http.StatusOK, workersReply{notNull(urls)}, err
}
