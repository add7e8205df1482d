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

	"github.com/dpserve/dpserve/internal/problem"
)

// stream takes a stream's slot and gives a context that also ends with the server; done gives both back.
func (s *Server) stream(r *http.Request) (ctx context.Context, done func(), err error) {
	return s.open(r, s.streams, "logs and events are being followed")
}

// open is stream with slots of its own; what says who holds them.
func (s *Server) open(r *http.Request, slots chan struct{}, what string) (ctx context.Context, done func(), err error) {
	select {
	case slots <- struct{}{}:
	default:
		return nil, nil, problem.New(problem.Overloaded, "%d %s already", cap(slots), what).WithHint("end one of them")
	}
	ctx, cancel := context.WithCancel(r.Context())
	over := make(chan struct{})
	go func() {
		defer close(over)
		select {
		case <-s.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(); <-over; <-slots }, nil
}

// logs sends log lines as text, one per line (LogLine.String), as they come.
func (s *Server) logs(c *gin.Context) {
	q, err := parseLogQuery(c.Param("app"), c.Request.URL.RawQuery, time.Now())
	if err != nil {
		s.fail(c, err)
		return
	}
	ctx, done, err := s.stream(c.Request)
	if err != nil {
		s.fail(c, err)
		return
	}
	defer done()
	lines, err := s.cfg.Backend.Logs(ctx, q)
	if err != nil {
		s.fail(c, err)
		return
	}
	defer func() { _ = lines.Close() }() // nothing was written to it
	begin(c.Writer, "text/plain; charset=utf-8")
	if err := sendLines(ctx, c.Writer, lines); err != nil && c.Request.Context().Err() == nil {
		s.cfg.Log.Debug("log stream broke", "room", "api", "app", q.App, "err", err)
		panic(http.ErrAbortHandler) // the client must see that this is not the end
	}
}

// begin sends the headers of a stream.
func begin(w http.ResponseWriter, contentType string) {
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(http.StatusOK)
	rearm(w)
	_ = http.NewResponseController(w).Flush() // a client that has left is noticed by ctx
}

func sendLines(ctx context.Context, w http.ResponseWriter, lines LogStream) error {
	buf := bufio.NewWriter(w)
	for {
		batch, err := lines.Next(ctx)
		rearm(w)
		for _, l := range batch {
			_, _ = buf.WriteString(l.String()) // a bufio.Writer keeps its first error for Flush
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

func flush(buf *bufio.Writer, w http.ResponseWriter) error {
	if err := buf.Flush(); err != nil {
		return err
	}
	return http.NewResponseController(w).Flush()
}

// events sends state changes as server-sent events until the client leaves or the server closes.
func (s *Server) events(c *gin.Context) {
	since, app, err := parseEvents(c.Request)
	if err != nil {
		s.fail(c, err)
		return
	}
	ctx, done, err := s.stream(c.Request)
	if err != nil {
		s.fail(c, err)
		return
	}
	defer done()
	begin(c.Writer, "text/event-stream")
	if err := s.sendEvents(ctx, c.Writer, since, app); err != nil && ctx.Err() == nil {
		s.cfg.Log.Debug("event stream broke", "room", "api", "err", err)
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
			err = problem.New(problem.InvalidArgument, "header Last-Event-ID is %q", id).WithHint("send the id of the last event, or leave it out")
		}
	}
	return since, q.values.Get("app"), err
}

func (s *Server) sendEvents(ctx context.Context, w http.ResponseWriter, since uint64, app string) error {
	buf := bufio.NewWriter(w)
	alive := time.NewTicker(keepAlive)
	defer alive.Stop()
	for {
		events, next := s.cfg.Backend.Events(since)
		for i := range events {
			since = events[i].Number
			if err := writeEvent(buf, &events[i], app); err != nil {
				return err
			}
		}
		rearm(w)
		if err := flush(buf, w); err != nil {
			return err
		}
		select {
		case <-next:
		case <-alive.C:
			_, _ = buf.WriteString(": alive\n\n") // kept for the next flush, like every error of buf
		case <-ctx.Done():
			return nil
		}
	}
}

// eventReply is an event on the wire.
type eventReply struct {
	Envelope
	Event
}

// writeEvent writes one server-sent event, if it is of app ("" = any).
func writeEvent(w io.Writer, e *Event, app string) error {
	if app != "" && app != e.App {
		return nil
	}
	data, err := json.Marshal(eventReply{Envelope{APIVersion}, *e})
	if err != nil {
		return fmt.Errorf("encode event %d: %w", e.Number, err)
	}
	_, err = fmt.Fprintf(w, "id: %d\ndata: %s\n\n", e.Number, data)
	return err
}
