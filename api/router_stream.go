package api

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
)

// dumpEvents sends the index as one JSON document, piece by piece: it is never held whole.
func (s *Server) dumpEvents(c *gin.Context) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		s.fail(c, err)
		return
	}
	ctx, done, err := s.open(c.Request, s.generates, "dumps and generate calls are under way")
	if err != nil {
		s.fail(c, err)
		return
	}
	defer done()
	d := &dump{w: c.Writer, buf: bufio.NewWriterSize(c.Writer, dumpBuffer), app: c.Param("app")}
	truncated, err := s.cfg.Routers.DumpEvents(ctx, d.app, d.add)
	switch {
	case err != nil && !d.begun:
		s.fail(c, err)
	case err != nil || ctx.Err() != nil:
		panic(http.ErrAbortHandler) // half a document must not look like a whole one
	default:
		d.end(truncated)
	}
}

const dumpBuffer = 64 << 10 // bytes

// dump writes the document of dump_events.
type dump struct {
	w     http.ResponseWriter
	buf   *bufio.Writer
	app   string
	begun bool
	runs  int
}

func (d *dump) begin() {
	if d.begun {
		return
	}
	d.begun = true
	begin(d.w, "application/json")
	name, _ := json.Marshal(d.app) //nolint:errchkjson // a string
	_, _ = fmt.Fprintf(d.buf, `{"apiVersion":%q,"app":%s,"events":[`, APIVersion, name)
}

// add writes one run. A bufio.Writer keeps its first error, which the next run or the end gives.
func (d *dump) add(r *msg.KVRun) error {
	d.begin()
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if d.runs++; d.runs > 1 {
		_ = d.buf.WriteByte(',')
	}
	rearm(d.w)
	_, err = d.buf.Write(data)
	return err
}

func (d *dump) end(truncated bool) {
	d.begin()
	rearm(d.w)
	_, _ = fmt.Fprintf(d.buf, `],"truncated":%t}`+"\n", truncated)
	_ = d.buf.Flush() // a client that has left needs no end
}

// generate sends the parts of an answer as server-sent events, [DONE] behind the last. An error before the first is an ordinary
// answer, one behind it an event of type error without [DONE].
func (s *Server) generate(c *gin.Context) {
	var q msg.Generate
	if err := readRouterBody(c, &q); err != nil {
		s.fail(c, err)
		return
	}
	if err := checkIDs(q.TokenIDs); err != nil {
		s.fail(c, err)
		return
	}
	ctx, done, err := s.open(c.Request, s.generates, "dumps and generate calls are under way")
	if err != nil {
		s.fail(c, err)
		return
	}
	defer done()
	e := &eventWriter{w: c.Writer}
	err = s.cfg.Routers.Generate(ctx, c.Param("app"), &q, func(part *msg.Generated) error { return e.send("", part) })
	switch {
	case err == nil && e.begun:
		_ = e.write("data: [DONE]\n\n") // a client that has left needs no end
	case err == nil:
		s.fail(c, problem.New(problem.Upstream, "the engine sent no tokens").WithHint("`dpserve logs %s` shows what it says", c.Param("app")))
	case !e.begun:
		s.fail(c, err)
	default:
		_ = e.send("error", errorReply{Envelope{APIVersion}, toBody(err)})
	}
}

// eventWriter writes server-sent events; the header goes out with the first.
type eventWriter struct {
	w     http.ResponseWriter
	begun bool
}

func (e *eventWriter) send(kind string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if kind != "" {
		kind = "event: " + kind + "\n"
	}
	return e.write(kind + "data: " + string(data) + "\n\n")
}

func (e *eventWriter) write(text string) error {
	if !e.begun {
		e.begun = true
		begin(e.w, "text/event-stream")
	}
	rearm(e.w)
	if _, err := e.w.Write([]byte(text)); err != nil {
		return err
	}
	return http.NewResponseController(e.w).Flush()
}
