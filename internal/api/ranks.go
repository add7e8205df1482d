package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// The paths by which attached ranks come and go: dpserve's own below an app, and those of SGLang's router.
const (
	pathRanks        = "/ranks" // behind pathApps/APP
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
	// is committed, before the engine has answered, and does not touch other ranks.
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

// rankReply answers POST and DELETE /api/v1/apps/{app}/ranks.
type rankReply struct {
	envelope
	client.RankChange
}

// workersReply answers GET /list_workers, as SGLang's router does.
type workersReply struct {
	URLs []string `json:"urls"`
}

// rankHandlers answers the paths by which attached ranks come and go.
type rankHandlers struct{ ranks Ranks }

// addRoutes registers the paths.
func (h rankHandlers) addRoutes(g *gin.Engine, reply func(answer) gin.HandlerFunc) {
	g.POST(pathApps+"/:app"+pathRanks, reply(h.addRank))
	g.DELETE(pathApps+"/:app"+pathRanks, reply(h.removeRank))
	g.POST(pathAddWorker, reply(h.addWorker))
	g.POST(pathRemoveWorker, reply(h.removeWorker))
	g.GET(pathListWorkers, reply(h.listWorkers))
}

func (h rankHandlers) addRank(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	text, err := readRank(c)
	if err != nil {
		return 0, nil, err
	}
	change, err := h.ranks.AddRank(c.Request.Context(), c.Param("app"), text)
	return http.StatusAccepted, rankReply{envelope{client.APIVersion}, change}, err
}

// readRank reads the body within its size limit. guard has set the time limit.
func readRank(c *gin.Context) ([]byte, error) {
	text, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, maxRankBody))
	var big *http.MaxBytesError
	switch {
	case errors.As(err, &big):
		return nil, problem.New(problem.TooLarge, "the body is larger than %d bytes", maxRankBody).
			WithHint(`send one rank: {"url": "http://HOST:PORT"}`)
	case err != nil:
		return nil, problem.New(problem.SlowRequest, "the body did not arrive: %w", err).
			WithHint("send it again")
	}
	// net/http goes on reading to notice a client that leaves
	_ = http.NewResponseController(c.Writer).SetReadDeadline(time.Time{})
	return text, nil
}

func (h rankHandlers) removeRank(c *gin.Context) (int, any, error) {
	r, err := parseRemoval(c.Request.URL.RawQuery)
	if err != nil {
		return 0, nil, err
	}
	change, err := h.ranks.RemoveRank(c.Request.Context(), c.Param("app"), r)
	return http.StatusAccepted, rankReply{envelope{client.APIVersion}, change}, err
}

// parseRemoval reads url=, selector=, rank= and deadline=.
func parseRemoval(raw string) (r RankRemoval, err error) {
	q, err := parseQuery(raw, "url", "selector", "rank", "deadline")
	if err != nil {
		return r, err
	}
	if r.Rank, err = q.rankRef(); err != nil {
		return r, err
	}
	r.Deadline, err = q.duration("deadline")
	return r, err
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

// workerQuery reads url= and app= of SGLang's worker paths.
func workerQuery(c *gin.Context) (appName, url string, err error) {
	q, err := parseQuery(c.Request.URL.RawQuery, "url", "app")
	if err != nil {
		return "", "", err
	}
	if url = q.values.Get("url"); url == "" {
		return "", "", problem.New(problem.InvalidArgument, "no url is given").
			WithHint("add url=http://HOST:PORT")
	}
	return q.values.Get("app"), url, nil
}

// addWorker answers like SGLang's router, but does not wait until the worker is healthy: routing uses the
// worker once it is.
func (h rankHandlers) addWorker(c *gin.Context) (int, any, error) {
	name, url, err := workerQuery(c)
	if err != nil {
		return 0, nil, err
	}
	rank, err := json.Marshal(map[string]string{"url": url})
	if err != nil {
		return 0, nil, problem.New(problem.InvalidArgument, "the url cannot be read: %w", err).
			WithHint("wanted url=http://HOST:PORT")
	}
	change, err := h.ranks.AddRank(c.Request.Context(), name, rank)
	return http.StatusOK, plainText("Successfully added worker: " + change.URL), err
}

func (h rankHandlers) removeWorker(c *gin.Context) (int, any, error) {
	name, url, err := workerQuery(c)
	if err != nil {
		return 0, nil, err
	}
	change, err := h.ranks.RemoveRank(c.Request.Context(), name, RankRemoval{Rank: app.RankRef{URL: url}})
	return http.StatusOK, plainText("Successfully removed worker: " + change.URL), err
}

func (h rankHandlers) listWorkers(c *gin.Context) (int, any, error) {
	q, err := parseQuery(c.Request.URL.RawQuery, "app")
	if err != nil {
		return 0, nil, err
	}
	urls, err := h.ranks.Workers(c.Request.Context(), q.values.Get("app"))
	if urls == nil {
		urls = []string{}
	}
	return http.StatusOK, workersReply{urls}, err
}
