package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"sync"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// Ray is the part of a node that the paths of Ray Serve's REST API need beside the Backend and the Nodes.
type Ray struct {
	// Specs returns the stored applications, with all of their pools.
	Specs func() []*app.Application
}

// The paths of Ray's REST API. The last slash is part of the path, as in Ray.
const (
	pathRayVersion  = "/api/ray/version"
	pathRayVersion2 = "/api/version" // the same, for Ray's other tools
	pathRayApps     = "/api/serve/applications/"
	pathRayScale    = "/api/v1/applications/:app/deployments/:deployment/scale"
)

// rayVersion is the version of Ray whose REST API this is. Ray's command line asks for 1.12 or later.
const rayVersion = "2.60.0"

// rayHandlers answers the paths of Ray's REST API. Errors are plain text, as Ray's.
type rayHandlers struct {
	server  *Server
	backend Backend
	nodes   Nodes
	ray     *Ray

	mu    sync.Mutex
	notes map[string]rayNotes // of the last PUT that this node answered, by application
}

// rayNotes are the keys without effect in an application's document, for as long as it has that revision.
type rayNotes struct {
	revision uint64
	text     string
}

// addRoutes registers the paths.
func (h *rayHandlers) addRoutes(g *gin.Engine) {
	g.GET(pathRayVersion, h.reply(h.version))
	g.GET(pathRayVersion2, h.reply(h.version))
	g.GET(pathRayApps, h.reply(h.show))
	g.PUT(pathRayApps, h.reply(h.deploy))
	g.DELETE(pathRayApps, h.reply(h.shutdown))
	g.POST(pathRayScale, h.scale)
}

// reply makes a handler that writes a body of Ray: an empty one if body is nil.
func (h *rayHandlers) reply(answer func(c *gin.Context) (body any, err error)) gin.HandlerFunc {
	return func(c *gin.Context) {
		if c.Request.Method != http.MethodGet && strings.HasPrefix(c.GetHeader("User-Agent"), "Mozilla") {
			c.String(http.StatusMethodNotAllowed, "a browser cannot change applications; use dpserve")
			return
		}
		ctx, cancel := context.WithTimeout(c.Request.Context(), callTimeout)
		defer cancel()
		c.Request = c.Request.WithContext(ctx)
		body, err := answer(c)
		extendWriteDeadline(c.Writer)
		if err != nil {
			h.fail(c, err)
			return
		}
		var data []byte
		if body != nil {
			if data, err = json.Marshal(body); err != nil {
				h.fail(c, err)
				return
			}
			c.Header("Content-Type", "application/json; charset=utf-8")
		}
		c.Status(http.StatusOK)
		_, _ = c.Writer.Write(data) // a client that has left needs no answer
	}
}

// fail answers with err as text: the message, its hint and its lines.
func (h *rayHandlers) fail(c *gin.Context, err error) {
	e := newErrorReply(err).Error
	status := problem.HTTPStatus(problem.Code(e.Code))
	if status == http.StatusInternalServerError {
		h.server.cfg.Log.Error("admin request failed", "component", "api", "path", c.FullPath(), "err", err)
	}
	lines := append([]string{e.Message}, e.Details...)
	if e.Hint != "" {
		lines = append(lines, "hint: "+e.Hint)
	}
	c.String(status, "%s", strings.Join(lines, "\n")+"\n")
}

func (h *rayHandlers) version(c *gin.Context) (any, error) {
	_, err := parseQuery(c.Request.URL.RawQuery)
	return map[string]string{
		"version": "4", "ray_version": rayVersion, "ray_commit": "", "session_name": "",
		"dpserve_version": h.server.cfg.Version.Version,
	}, err
}

// show answers with every application. All of them are declarative.
func (h *rayHandlers) show(c *gin.Context) (any, error) {
	q, err := parseQuery(c.Request.URL.RawQuery, "api_type")
	if err != nil {
		return nil, err
	}
	kind := q.values.Get("api_type")
	if kind != "" && kind != "declarative" && kind != "imperative" {
		return nil, badValueError("api_type", kind, "write declarative or imperative")
	}
	apps, err := h.backend.Apps(c.Request.Context())
	if err != nil {
		return nil, err
	}
	if kind == "imperative" {
		apps = nil
	}
	var nodes []client.NodeStatus
	if h.nodes != nil {
		if nodes, err = h.nodes.Nodes(c.Request.Context()); err != nil {
			return nil, err
		}
	}
	out := newRayInstance(apps, h.ray.Specs(), nodes)
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range apps {
		if n, has := h.notes[apps[i].Name]; has && n.revision == apps[i].Revision {
			out.addNotes(apps[i].Name, n.text)
		}
	}
	return out, nil
}

// deploy makes the cluster's applications those of the body. The others are deleted, as in Ray.
func (h *rayHandlers) deploy(c *gin.Context) (any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return nil, err
	}
	data, err := readBody(c, maxBody, "send fewer applications: dpserve deploy leaves those of other files")
	if err != nil {
		return nil, err
	}
	file, notes, err := readRayDocument(data)
	if err != nil {
		return nil, err
	}
	if len(file.Applications) == 0 {
		return h.shutdown(c)
	}
	result, err := h.backend.Deploy(c.Request.Context(), client.DeployRequest{
		File: rayDocument, Text: file.Print(), Prune: true,
	})
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.notes = map[string]rayNotes{}
	for name, lines := range notes {
		h.notes[name] = rayNotes{result.Apps[name], strings.Join(lines, "; ")}
	}
	return nil, nil //nolint:nilnil // the answer has no body
}

// shutdown deletes every application. The node goes on.
func (h *rayHandlers) shutdown(c *gin.Context) (any, error) {
	ctx := c.Request.Context()
	apps, err := h.backend.Apps(ctx)
	if err != nil {
		return nil, err
	}
	for i := range apps {
		if apps[i].Status == client.StatusDeleting {
			continue
		}
		err := h.backend.Delete(ctx, apps[i].Name)
		var p *problem.Error
		if errors.As(err, &p) && p.Code == problem.NotFound {
			continue // somebody else has deleted it
		}
		if err != nil {
			return nil, err
		}
	}
	return nil, nil //nolint:nilnil // the answer has no body
}

// scale refuses to change a deployment's size: it is that of the file.
func (h *rayHandlers) scale(c *gin.Context) {
	apps, err := h.backend.Apps(c.Request.Context())
	if err != nil {
		h.fail(c, err)
		return
	}
	for _, a := range newRayInstance(apps, nil, nil).Applications {
		if _, has := a.Deployments[c.Param("deployment")]; has && a.Name == c.Param("app") {
			c.JSON(http.StatusPreconditionFailed, gin.H{
				"error": a.Name + " has the size that its file says: change it there and deploy it again",
			})
			return
		}
	}
	c.JSON(http.StatusNotFound, gin.H{"error": "Application or Deployment not found"})
}
