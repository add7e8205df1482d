package api

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// Backend is the part of a node that the admin API needs. Implementations are safe for concurrent use, and a
// method returns when its ctx ends. Errors that users can act on are *problem.Error or app.Faults; all others
// are answered as internal. The server calls nothing after Close has returned.
type Backend interface {
	// Validate checks a file like Deploy and changes nothing. The error is app.Faults.
	Validate(file string, text []byte) ([]app.Warning, error)
	// Plan returns the changes that Deploy would make, with the place of every rank, and changes nothing.
	Plan(ctx context.Context, req client.DeployRequest) (client.Plan, []app.Warning, error)
	// Deploy stores the apps of a file and returns once that is committed, before anything runs.
	Deploy(ctx context.Context, req client.DeployRequest) (DeployResult, error)
	// Apps lists every application, by name.
	Apps(ctx context.Context) ([]client.AppStatus, error)
	// App returns one application. problem.NotFound lists the existing ones.
	App(ctx context.Context, name string) (client.AppStatus, error)
	// Delete marks an application for deletion and returns once that is committed, before its engines are
	// gone.
	Delete(ctx context.Context, name string) error
	// History lists the revisions of an application that the cluster keeps, the newest first.
	History(ctx context.Context, name string) ([]client.Revision, error)
	// AppFile returns an application at a revision (0 = the current one) in the form of a file.
	AppFile(ctx context.Context, name string, revision uint64) (client.AppFile, error)
	// Rollback deploys what an application had at a revision (0 = the last good one before the current one)
	// and returns once that is committed.
	Rollback(ctx context.Context, name string, to uint64) (DeployResult, error)
	// Logs opens the engines' log lines; the server closes the stream.
	Logs(ctx context.Context, q client.LogQuery) (LogStream, error)
	// Events returns the kept events with a number above since, oldest first, and a channel that is closed at
	// the next event; a nil channel means that another node leads and has the events. A since above the
	// newest number (the node has restarted) is treated as 0.
	Events(since uint64) (events []client.Event, next <-chan struct{})
}

// DeployResult is a committed deploy: a client.DeployResult as the Backend returns it.
type DeployResult struct {
	Revision uint64
	Apps     map[string]uint64
	Changes  []client.Change
	Warnings []app.Warning
}

// LogStream yields log lines in order of time.
type LogStream interface {
	// Next waits for at least one line; io.EOF ends a stream that does not follow. The lines are valid until
	// the next call.
	Next(ctx context.Context) ([]client.LogLine, error)
	Close() error
}

// fileHeader holds the app file's name, like the query key file.
const fileHeader = "X-Dpserve-File"

// appHandlers answers the paths of applications, their logs and the events.
type appHandlers struct {
	server  *Server
	backend Backend
}

// addRoutes registers the paths.
func (h appHandlers) addRoutes(g *gin.Engine) {
	reply, stream := h.server.reply, h.server.stream
	g.POST(pathValidate, reply(h.validate, "file"))
	g.POST(pathPlan, reply(h.plan, deployKeys()...))
	g.PUT(pathApps, reply(h.deploy, deployKeys()...))
	g.GET(pathApps, reply(h.apps))
	g.GET(pathApps+"/:app", reply(h.app))
	g.DELETE(pathApps+"/:app", reply(h.delete))
	g.GET(pathApps+"/:app/revisions", reply(h.history))
	g.GET(pathApps+"/:app/revisions/:revision", reply(h.appFile))
	g.POST(pathApps+"/:app/rollback", reply(h.rollback, "to"))
	g.GET(pathApps+"/:app/logs", stream(h.logs))
	g.GET(pathEvents, stream(h.events))
}

func (h appHandlers) validate(c *gin.Context, q query) (int, any, error) {
	file, text, err := readFile(c, q)
	if err != nil {
		return 0, nil, err
	}
	warnings, err := h.backend.Validate(file, text)
	return http.StatusOK, gin.H{"warnings": ConvertFaults(warnings)}, err
}

func (h appHandlers) deploy(c *gin.Context, q query) (int, any, error) {
	req, err := readDeploy(c, q)
	if err != nil {
		return 0, nil, err
	}
	res, err := h.backend.Deploy(c.Request.Context(), req)
	return http.StatusAccepted, convertResult(&res), err
}

func convertResult(res *DeployResult) client.DeployResult {
	return client.DeployResult{
		Revision: res.Revision, Apps: res.Apps, Changes: notNull(res.Changes),
		Warnings: ConvertFaults(res.Warnings),
	}
}

func (h appHandlers) rollback(c *gin.Context, q query) (int, any, error) {
	to, _, err := q.counter("to")
	if err != nil {
		return 0, nil, err
	}
	res, err := h.backend.Rollback(c.Request.Context(), c.Param("app"), to)
	return http.StatusAccepted, convertResult(&res), err
}

func (h appHandlers) history(c *gin.Context, _ query) (int, any, error) {
	list, err := h.backend.History(c.Request.Context(), c.Param("app"))
	return http.StatusOK, gin.H{"revisions": notNull(list)}, err
}

// currentRevision names the current revision in a path.
const currentRevision = "current"

func (h appHandlers) appFile(c *gin.Context, _ query) (int, any, error) {
	var revision uint64
	if word := c.Param("revision"); word != currentRevision {
		var err error
		if revision, err = strconv.ParseUint(word, 10, 64); err != nil || revision == 0 {
			return 0, nil, problem.New(problem.InvalidArgument, "revision %q is no number from 1", word).
				WithHint("GET /api/v1/apps/%s/revisions lists them; %s is the current one", c.Param("app"),
					currentRevision)
		}
	}
	file, err := h.backend.AppFile(c.Request.Context(), c.Param("app"), revision)
	return http.StatusOK, file, err
}

// ConvertFaults returns the faults or warnings of a file as the API sends them.
func ConvertFaults[F app.Fault | app.Warning](faults []F) []client.Fault {
	out := make([]client.Fault, len(faults))
	for i, f := range faults {
		out[i] = client.Fault(f)
	}
	return out
}

// deployKeys are the query keys of a deploy.
func deployKeys() []string { return []string{"revision", "prune", "partial", "file"} }

func readDeploy(c *gin.Context, q query) (req client.DeployRequest, err error) {
	revision, ok, err := q.counter("revision")
	if err != nil {
		return req, err
	}
	if ok {
		req.Revision = &revision
	}
	if req.Prune, err = q.flag("prune"); err != nil {
		return req, err
	}
	if req.Partial, err = q.flag("partial"); err != nil {
		return req, err
	}
	req.File, req.Text, err = readFile(c, q)
	return req, err
}

// planReply answers POST /api/v1/plan.
type planReply struct {
	Plan     client.Plan    `json:"plan"`
	Warnings []client.Fault `json:"warnings,omitempty"`
}

func (h appHandlers) plan(c *gin.Context, q query) (int, any, error) {
	req, err := readDeploy(c, q)
	if err != nil {
		return 0, nil, err
	}
	p, warnings, err := h.backend.Plan(c.Request.Context(), req)
	return http.StatusOK, planReply{p, ConvertFaults(warnings)}, err
}

func (h appHandlers) apps(c *gin.Context, _ query) (int, any, error) {
	apps, err := h.backend.Apps(c.Request.Context())
	return http.StatusOK, gin.H{"apps": notNull(apps)}, err
}

func (h appHandlers) app(c *gin.Context, _ query) (int, any, error) {
	a, err := h.backend.App(c.Request.Context(), c.Param("app"))
	return http.StatusOK, gin.H{"app": a}, err
}

func (h appHandlers) delete(c *gin.Context, _ query) (int, any, error) {
	name := c.Param("app")
	err := h.backend.Delete(c.Request.Context(), name)
	return http.StatusAccepted, gin.H{"app": name, "status": client.StatusDeleting}, err
}

// readFile reads the app file of a request.
func readFile(c *gin.Context, q query) (name string, text []byte, err error) {
	if name, err = q.file(c.GetHeader(fileHeader)); err != nil {
		return "", nil, err
	}
	text, err = readBody(c, maxBody, "split the file: apps that are not in it stay as they are")
	if err == nil && len(text) == 0 {
		err = problem.New(problem.InvalidArgument, "the body is empty").
			WithHint("send an app.yaml as the body: curl --data-binary @app.yaml")
	}
	return name, text, err
}

// logs sends log lines as text, one per line (LogLine.String), as the engines write them.
func (h appHandlers) logs(c *gin.Context) error {
	q, err := parseLogQuery(c.Param("app"), c.Request.URL.RawQuery, time.Now())
	if err != nil {
		return err
	}
	ctx, done, err := h.server.acquireFollower(c.Request)
	if err != nil {
		return err
	}
	defer done()
	lines, err := h.backend.Logs(ctx, q)
	if err != nil {
		return err
	}
	defer func() { _ = lines.Close() }() // the stream is only read
	beginStream(c.Writer, "text/plain; charset=utf-8")
	if err := sendLines(ctx, c.Writer, lines); err != nil && c.Request.Context().Err() == nil {
		h.server.cfg.Log.Debug("log stream broke", "component", "api", "app", q.App, "err", err)
		panic(http.ErrAbortHandler) // the client must notice that the stream was cut
	}
	return nil
}

func sendLines(ctx context.Context, w http.ResponseWriter, lines LogStream) error {
	buf := bufio.NewWriter(w)
	for {
		batch, err := lines.Next(ctx)
		extendWriteDeadline(w)
		for _, l := range batch {
			_, _ = buf.WriteString(l.String()) // a bufio.Writer keeps its first error until Flush
			_ = buf.WriteByte('\n')
		}
		if ferr := flush(buf, w); ferr != nil {
			return ferr
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// events sends state changes as server-sent events until the client leaves, the server closes or another
// node leads. With past it answers with those that are kept.
func (h appHandlers) events(c *gin.Context) error {
	since, app, past, err := parseEvents(c.Request)
	if err != nil {
		return err
	}
	if past {
		events, next := h.backend.Events(since)
		if next == nil {
			return h.server.cfg.NoLeader()
		}
		isOther := func(e client.Event) bool { return !isEventOf(&e, app) }
		writeJSON(c.Writer, http.StatusOK, gin.H{"events": notNull(slices.DeleteFunc(events, isOther))})
		return nil
	}
	ctx, done, err := h.server.acquireFollower(c.Request)
	if err != nil {
		return err
	}
	defer done()
	beginStream(c.Writer, "text/event-stream")
	if err := h.sendEvents(ctx, c.Writer, since, app); err != nil && ctx.Err() == nil {
		h.server.cfg.Log.Debug("event stream broke", "component", "api", "err", err)
	}
	return nil
}

// parseEvents reads since (or the Last-Event-ID of a browser that reconnects), app and past.
func parseEvents(r *http.Request) (since uint64, app string, past bool, err error) {
	q, err := parseQuery(r.URL.RawQuery, "since", "app", "past")
	if err != nil {
		return 0, "", false, err
	}
	if past, err = q.flag("past"); err != nil {
		return 0, "", false, err
	}
	since, ok, err := q.counter("since")
	if id := r.Header.Get("Last-Event-ID"); !ok && err == nil && id != "" {
		if since, err = strconv.ParseUint(id, 10, 64); err != nil {
			err = problem.New(problem.InvalidArgument, "header Last-Event-ID is %q", id).
				WithHint("send the id of the last event, or leave it out")
		}
	}
	return since, q.values.Get("app"), past, err
}

func (h appHandlers) sendEvents(ctx context.Context, w http.ResponseWriter, since uint64, app string) error {
	buf := bufio.NewWriter(w)
	alive := time.NewTicker(keepAlive)
	defer alive.Stop()
	for {
		events, next := h.backend.Events(since)
		if next == nil {
			return nil // the client asks again and is sent to the leader
		}
		for i := range events {
			since = events[i].Number
			if !isEventOf(&events[i], app) {
				continue
			}
			if err := writeEvent(buf, &events[i]); err != nil {
				return err
			}
		}
		extendWriteDeadline(w)
		if err := flush(buf, w); err != nil {
			return err
		}
		select {
		case <-next:
		case <-alive.C:
			_, _ = buf.WriteString(": alive\n\n") // buf keeps the error until the next flush
		case <-ctx.Done():
			return nil
		}
	}
}

// isEventOf reports whether an event is of an application ("" = any) or of one of its pools.
func isEventOf(e *client.Event, name string) bool {
	return name == "" || name == e.App || strings.HasPrefix(e.Unit, name+"/")
}

// writeEvent writes one server-sent event.
func writeEvent(w io.Writer, e *client.Event) error {
	data, err := marshalReply(e)
	if err != nil {
		return fmt.Errorf("encode event %d: %w", e.Number, err)
	}
	_, err = fmt.Fprintf(w, "id: %d\ndata: %s\n\n", e.Number, data)
	return err
}
