package api

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// The other paths of SGLang's router, of its newer versions.
const (
	pathWorkers    = "/workers"
	pathLoads      = "/get_loads"
	pathServerInfo = "/get_server_info"
)

// IsWorkerPath reports whether a path is one of SGLang's router, by which attached ranks come, go and are
// shown.
func IsWorkerPath(path string) bool {
	switch path {
	case pathAddWorker, pathRemoveWorker, pathListWorkers, pathWorkers, pathLoads, pathServerInfo:
		return true
	}
	return strings.HasPrefix(path, pathWorkers+"/")
}

// WorkerHandler answers those paths at another port, for callers of this machine and for those that show the
// admin token.
func (s *Server) WorkerHandler() http.Handler {
	withToken := requireToken(s.routes, s.cfg.Token, s.cfg.TokenFile)
	return newGuard(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case isFromHere(r):
			s.routes.ServeHTTP(w, r)
		case s.cfg.Token == "":
			WriteError(w, problem.New(problem.PermissionDenied, "this path steers the ranks: only programs "+
				"on the node's machine may use it").WithHint("without --admin-open the admin token opens it"))
		default:
			withToken.ServeHTTP(w, r)
		}
	}), false, s.cfg.Hosts)
}

// isFromHere reports whether a program of this machine has sent r, and not a proxy on it for somebody else.
func isFromHere(r *http.Request) bool {
	for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Real-Ip", "Via"} {
		if r.Header.Get(name) != "" {
			return false
		}
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	return err == nil && net.ParseIP(host).IsLoopback()
}

// worker is an attached rank in the shape of SGLang's router.
type worker struct {
	ID        string `json:"id"` // GROUP/RANK
	URL       string `json:"url"`
	Model     string `json:"model_id"`
	Type      string `json:"worker_type"` // regular | prefill | decode
	IsHealthy bool   `json:"is_healthy"`
	Load      int    `json:"load"`
}

// workerRequest is the body of POST /workers.
type workerRequest struct {
	URL           string `json:"url"`
	Type          string `json:"worker_type"` // regular | prefill | decode
	BootstrapPort int    `json:"bootstrap_port"`
}

// addWorkerRoutes registers the paths.
func (h rankHandlers) addWorkerRoutes(g *gin.Engine, reply replier) {
	g.POST(pathAddWorker, reply(h.addWorker, "url", "app"))
	g.POST(pathRemoveWorker, reply(h.removeWorker, "url", "app"))
	g.GET(pathListWorkers, reply(h.listWorkers, "app"))
	g.GET(pathWorkers, reply(h.showWorkers, "app"))
	g.POST(pathWorkers, reply(h.postWorker, "app"))
	g.DELETE(pathWorkers+"/*id", reply(h.deleteWorker, "app"))
	g.GET(pathLoads, reply(h.showLoads, "app"))
	g.GET(pathServerInfo, reply(h.serverInfo, "app"))
}

// attachedApp returns an application of kind attach; "": the only one.
func (h rankHandlers) attachedApp(ctx context.Context, name string) (*client.AppStatus, error) {
	if _, err := h.ranks.Workers(ctx, name); err != nil { // it knows what to say of the name
		return nil, err
	}
	apps, err := h.backend.Apps(ctx)
	if err != nil {
		return nil, err
	}
	for i := range apps {
		if name == apps[i].Name || name == "" && apps[i].Kind == string(app.KindAttach) {
			return &apps[i], nil
		}
	}
	found, err := FindApp(apps, name)
	return &found, err
}

func workersOf(a *client.AppStatus) []worker {
	out := []worker{}
	for i := range a.Units {
		kind := a.Units[i].Pool
		if kind == "" {
			kind = "regular"
		}
		for j := range a.Units[i].Ranks {
			r := &a.Units[i].Ranks[j]
			out = append(out, worker{
				ID: client.RankName(r.Group, r.Rank), URL: r.URL, Model: a.Model, Type: kind,
				Load:      r.InFlight,
				IsHealthy: r.Phase == "ready" && !r.Ejected && r.Away == "",
			})
		}
	}
	return out
}

func (h rankHandlers) showWorkers(c *gin.Context, q query) (int, any, error) {
	a, err := h.attachedApp(c.Request.Context(), q.values.Get("app"))
	if err != nil {
		return 0, nil, err
	}
	list := workersOf(a)
	return http.StatusOK, gin.H{"workers": list, "total": len(list)}, nil
}

func (h rankHandlers) showLoads(c *gin.Context, q query) (int, any, error) {
	a, err := h.attachedApp(c.Request.Context(), q.values.Get("app"))
	if err != nil {
		return 0, nil, err
	}
	type load struct {
		Worker string `json:"worker"`
		Load   int    `json:"load"`
	}
	loads := []load{}
	for _, w := range workersOf(a) {
		loads = append(loads, load{w.URL, w.Load})
	}
	return http.StatusOK, gin.H{"workers": loads}, nil
}

// serverInfo describes the application as SGLang's server describes itself.
func (h rankHandlers) serverInfo(c *gin.Context, q query) (int, any, error) {
	a, err := h.attachedApp(c.Request.Context(), q.values.Get("app"))
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, gin.H{
		"model_path": a.Model, "served_model_name": a.Model, "dp_size": a.Desired, "policy": a.Policy,
		"version": h.version,
	}, nil
}

func (h rankHandlers) postWorker(c *gin.Context, q query) (int, any, error) {
	data, err := readBody(c, maxRankBody, `send one worker: {"url": "http://HOST:PORT"}`)
	if err != nil {
		return 0, nil, err
	}
	var body workerRequest
	if err := decodeStrict(data, &body); err != nil {
		return 0, nil, err
	}
	rank := map[string]any{"url": body.URL}
	if body.Type != "" && body.Type != "regular" {
		rank["role"] = body.Type
	}
	if u, err := url.Parse(body.URL); err == nil && body.BootstrapPort > 0 {
		host := net.JoinHostPort(u.Hostname(), strconv.Itoa(body.BootstrapPort))
		rank["pd"] = map[string]string{"bootstrap": "http://" + host}
	}
	text, err := json.Marshal(rank)
	if err != nil {
		return 0, nil, err
	}
	change, err := h.ranks.AddRank(c.Request.Context(), q.values.Get("app"), text)
	return http.StatusAccepted, newWorkerReply(&change), err
}

// deleteWorker removes the worker of an id or of a URL.
func (h rankHandlers) deleteWorker(c *gin.Context, q query) (int, any, error) {
	id := strings.TrimPrefix(c.Param("id"), "/")
	ref := app.RankRef{URL: id}
	if group, rank, ok := client.ParseRankName(id); ok {
		ref = app.RankRef{Group: group, Rank: rank}
	}
	change, err := h.ranks.RemoveRank(c.Request.Context(), q.values.Get("app"), RankRemoval{Rank: ref})
	return http.StatusAccepted, newWorkerReply(&change), err
}

func newWorkerReply(c *client.RankChange) gin.H {
	return gin.H{"status": "accepted", "worker_id": client.RankName(c.Group, c.Rank), "url": c.URL}
}
