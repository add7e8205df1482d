package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
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
	// Logs opens the engines' log lines; the server closes the stream.
	Logs(ctx context.Context, q client.LogQuery) (LogStream, error)
	// Events returns the kept events with a number above since, oldest first, and a channel that is closed at
	// the next event. A since above the newest number (the node has restarted) is treated as 0.
	Events(since uint64) (events []client.Event, next <-chan struct{})
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
	reply := h.server.reply
	g.POST(pathValidate, reply(h.validate))
	g.POST(pathPlan, reply(h.plan))
	g.PUT(pathApps, reply(h.deploy))
	g.GET(pathApps, reply(h.apps))
	g.GET(pathApps+"/:app", reply(h.app))
	g.DELETE(pathApps+"/:app", reply(h.delete))
	g.GET(pathApps+"/:app/logs", h.logs)
	g.GET(pathEvents, h.events)
}

func (h appHandlers) validate(c *gin.Context) (int, any, error) {
	q, err := parseQuery(c.Request.URL.RawQuery, "file")
	if err != nil {
		return 0, nil, err
	}
	file, text, err := readFile(c, q)
	if err != nil {
		return 0, nil, err
	}
	warnings, err := h.backend.Validate(file, text)
	return http.StatusOK, validateReply{envelope{client.APIVersion}, convertFaults(warnings)}, err
}

func (h appHandlers) deploy(c *gin.Context) (int, any, error) {
	req, err := parseDeploy(c)
	if err != nil {
		return 0, nil, err
	}
	res, err := h.backend.Deploy(c.Request.Context(), req)
	out := client.DeployResult{
		Revision: res.Revision, Apps: res.Apps, Changes: res.Changes, Warnings: convertFaults(res.Warnings),
	}
	if out.Changes == nil {
		out.Changes = []client.Change{}
	}
	return http.StatusAccepted, deployReply{envelope{client.APIVersion}, out}, err
}

func convertFaults(warnings []app.Warning) []client.Fault {
	out := make([]client.Fault, len(warnings))
	for i, w := range warnings {
		out[i] = client.Fault(w)
	}
	return out
}

func parseDeploy(c *gin.Context) (req client.DeployRequest, err error) {
	q, err := parseQuery(c.Request.URL.RawQuery, "revision", "prune", "partial", "file")
	if err != nil {
		return req, err
	}
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

func (h appHandlers) plan(c *gin.Context) (int, any, error) {
	req, err := parseDeploy(c)
	if err != nil {
		return 0, nil, err
	}
	p, warnings, err := h.backend.Plan(c.Request.Context(), req)
	return http.StatusOK, planReply{envelope{client.APIVersion}, p, convertFaults(warnings)}, err
}

func (h appHandlers) apps(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	apps, err := h.backend.Apps(c.Request.Context())
	if apps == nil {
		apps = []client.AppStatus{}
	}
	return http.StatusOK, appsReply{envelope{client.APIVersion}, apps}, err
}

func (h appHandlers) app(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	a, err := h.backend.App(c.Request.Context(), c.Param("app"))
	return http.StatusOK, appReply{envelope{client.APIVersion}, a}, err
}

func (h appHandlers) delete(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	name := c.Param("app")
	err := h.backend.Delete(c.Request.Context(), name)
	return http.StatusAccepted, deleteReply{envelope{client.APIVersion}, name, client.StatusDeleting}, err
}

// readFile reads the app file of a request. guard has set the time limit.
func readFile(c *gin.Context, q query) (name string, text []byte, err error) {
	if name, err = q.file(c.GetHeader(fileHeader)); err != nil {
		return "", nil, err
	}
	if c.Request.ContentLength > maxBody {
		return "", nil, fileTooLarge()
	}
	text, err = io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, maxBody))
	var big *http.MaxBytesError
	switch {
	case errors.As(err, &big):
		return "", nil, fileTooLarge()
	case err != nil:
		return "", nil, problem.New(problem.SlowRequest, "the body did not arrive: %w", err).
			WithHint("send it again")
	case len(text) == 0:
		return "", nil, problem.New(problem.InvalidArgument, "the body is empty").
			WithHint("send an app.yaml as the body: curl --data-binary @app.yaml")
	}
	// net/http goes on reading to notice a client that leaves
	_ = http.NewResponseController(c.Writer).SetReadDeadline(time.Time{})
	return name, text, nil
}

func fileTooLarge() error {
	return problem.New(problem.TooLarge, "the body is larger than %d bytes", maxBody).
		WithHint("split the file: apps that are not in it stay as they are")
}

// logs sends log lines as text, one per line (LogLine.String), as the engines write them.
func (h appHandlers) logs(c *gin.Context) {
	q, err := parseLogQuery(c.Param("app"), c.Request.URL.RawQuery, time.Now())
	if err != nil {
		h.server.fail(c, err)
		return
	}
	ctx, done, err := h.server.acquireFollower(c.Request)
	if err != nil {
		h.server.fail(c, err)
		return
	}
	defer done()
	lines, err := h.backend.Logs(ctx, q)
	if err != nil {
		h.server.fail(c, err)
		return
	}
	defer func() { _ = lines.Close() }() // the stream is only read
	beginStream(c.Writer, "text/plain; charset=utf-8")
	if err := sendLines(ctx, c.Writer, lines); err != nil && c.Request.Context().Err() == nil {
		h.server.cfg.Log.Debug("log stream broke", "room", "api", "app", q.App, "err", err)
		panic(http.ErrAbortHandler) // the client must notice that the stream was cut
	}
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

// events sends state changes as server-sent events until the client leaves or the server closes.
func (h appHandlers) events(c *gin.Context) {
	since, app, err := parseEvents(c.Request)
	if err != nil {
		h.server.fail(c, err)
		return
	}
	ctx, done, err := h.server.acquireFollower(c.Request)
	if err != nil {
		h.server.fail(c, err)
		return
	}
	defer done()
	beginStream(c.Writer, "text/event-stream")
	if err := h.sendEvents(ctx, c.Writer, since, app); err != nil && ctx.Err() == nil {
		h.server.cfg.Log.Debug("event stream broke", "room", "api", "err", err)
	}
}

// parseEvents reads since (or the Last-Event-ID of a browser that reconnects) and app.
func parseEvents(r *http.Request) (since uint64, app string, err error) {
	q, err := parseQuery(r.URL.RawQuery, "since", "app")
	if err != nil {
		return 0, "", err
	}
	since, ok, err := q.counter("since")
	if id := r.Header.Get("Last-Event-ID"); !ok && err == nil && id != "" {
		if since, err = strconv.ParseUint(id, 10, 64); err != nil {
			err = problem.New(problem.InvalidArgument, "header Last-Event-ID is %q", id).
				WithHint("send the id of the last event, or leave it out")
		}
	}
	return since, q.values.Get("app"), err
}

func (h appHandlers) sendEvents(ctx context.Context, w http.ResponseWriter, since uint64, app string) error {
	buf := bufio.NewWriter(w)
	alive := time.NewTicker(keepAlive)
	defer alive.Stop()
	for {
		events, next := h.backend.Events(since)
		for i := range events {
			since = events[i].Number
			if err := writeEvent(buf, &events[i], app); err != nil {
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

// eventReply is an event on the wire.
type eventReply struct {
	envelope
	client.Event
}

// writeEvent writes one server-sent event, if it is of an application ("" = any) or of one of its pools.
func writeEvent(w io.Writer, e *client.Event, name string) error {
	if user, _ := app.SplitPool(e.App); name != "" && name != e.App && name != user {
		return nil
	}
	data, err := json.Marshal(eventReply{envelope{client.APIVersion}, *e})
	if err != nil {
		return fmt.Errorf("encode event %d: %w", e.Number, err)
	}
	_, err = fmt.Fprintf(w, "id: %d\ndata: %s\n\n", e.Number, data)
	return err
}
