package api

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
)

// Routers is what the admin API needs of a node's Routers. Safe for concurrent use; a method ends when its ctx does. Errors are
// *problem.Error: NotFound for an application, worker or request id that is not there, InvalidArgument for a request that
// cannot be read, Overloaded when no rank has room, Unavailable when none is ready.
type Routers interface {
	// Explain decides for q as the live path would, and changes nothing.
	Explain(ctx context.Context, app string, q *msg.RouteQuery) (*msg.Explanation, error)
	// Reset drops what the Router remembers and asks every rank for its state anew; requests in flight are not touched.
	Reset(ctx context.Context, app string) (msg.ResetResult, error)
	// Router describes the Router.
	Router(ctx context.Context, app string) (msg.RouterInfo, error)
	// BestWorker says where a prompt should go; with a request id it is reserved there.
	BestWorker(ctx context.Context, app string, q *msg.BestWorker) (msg.Worker, error)
	// PotentialLoads says what each rank would have in hand with this prompt; none is the load as it is.
	PotentialLoads(ctx context.Context, app string, ids []uint32) ([]msg.PotentialLoad, error)
	// MarkPrefillComplete turns a reservation from prefill into decode.
	MarkPrefillComplete(ctx context.Context, app, requestID string) error
	// Free ends a reservation.
	Free(ctx context.Context, app, requestID string) error
	// DumpEvents hands out the index, run by run; truncated says that it holds more than one dump gives. A run is the callee's
	// again when emit returns.
	DumpEvents(ctx context.Context, app string, emit func(*msg.KVRun) error) (truncated bool, err error)
	// Generate picks, sends and accounts, and hands out the tokens as they come. An error of emit ends it.
	Generate(ctx context.Context, app string, q *msg.Generate, emit func(*msg.Generated) error) error
}

const pathRouters = "/api/v1/routers"

// Limits of the router's paths.
const (
	maxRouterBody = 17 << 20 // bytes: the largest inference body (16 MiB) and what stands around it
	maxTokenIDs   = 1 << 20  // ids of one prompt
	maxGenerates  = 256      // generate calls and dumps at one time
)

// ExplainReply answers POST /api/v1/routers/{app}/explain.
type ExplainReply struct {
	Envelope
	msg.Explanation
}

// ResetReply answers POST /api/v1/routers/{app}/reset.
type ResetReply struct {
	Envelope
	msg.ResetResult
}

// RouterReply answers GET /api/v1/routers/{app}.
type RouterReply struct {
	Envelope
	msg.RouterInfo
}

// WorkerReply answers POST /api/v1/routers/{app}/best_worker.
type WorkerReply struct {
	Envelope
	msg.Worker
}

// LoadsReply answers POST /api/v1/routers/{app}/potential_loads.
type LoadsReply struct {
	Envelope
	Loads []msg.PotentialLoad `json:"loads"` // by group and rank
}

// ReservationReply answers POST /api/v1/routers/{app}/mark_prefill_complete and /free.
type ReservationReply struct {
	Envelope
	RequestID string `json:"request_id"`
	Status    string `json:"status"` // prefill_complete | freed
}

// tokensRequest is the body of potential_loads.
type tokensRequest struct {
	TokenIDs []uint32 `json:"token_ids"`
}

// reservationRequest is the body of mark_prefill_complete and free.
type reservationRequest struct {
	RequestID string `json:"request_id"`
}

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
