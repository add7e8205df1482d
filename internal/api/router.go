package api

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
)

// Routers is the part of a node's Routers that the admin API needs. Implementations are safe for concurrent
// use, and a method returns when its ctx ends. Errors are *problem.Error: NotFound for an unknown
// application, worker or request id, InvalidArgument for a request that cannot be read, Overloaded when no
// rank has room, Unavailable when no rank is ready.
type Routers interface {
	// Explain decides for q like the live path and changes nothing.
	Explain(ctx context.Context, app string, q *client.Query) (*client.Explanation, error)
	// Decisions lists the last decisions for requests, the newest first, at most the given number.
	Decisions(ctx context.Context, app string, most int) ([]client.Replay, error)
	// Reset drops the Router's state and requests a snapshot from every rank; it does not touch requests in
	// flight.
	Reset(ctx context.Context, app string) (client.ResetResult, error)
	// Router describes the Router.
	Router(ctx context.Context, app string) (client.Info, error)
	// BestWorker returns the best worker for a prompt; with a request id it reserves a place there.
	BestWorker(ctx context.Context, app string, q *client.BestWorkerRequest) (client.Worker, error)
	// PotentialLoads returns each rank's load with this prompt added; without ids, the present load.
	PotentialLoads(ctx context.Context, app string, ids []uint32) ([]client.PotentialLoad, error)
	// MarkPrefillComplete moves a reservation from prefill to decode.
	MarkPrefillComplete(ctx context.Context, app, requestID string) error
	// Free ends a reservation.
	Free(ctx context.Context, app, requestID string) error
	// DumpEvents calls emit for each run of the index. truncated is true if the index holds more than one
	// dump returns. The callee reuses a run after emit returns.
	DumpEvents(ctx context.Context, app string, emit func(*client.Run) error) (truncated bool, err error)
	// Generate picks a rank, sends the prompt there, accounts for it and calls emit for each part of the
	// answer. An error of emit ends the request.
	Generate(ctx context.Context, app string, q *msg.Generate, emit func(*client.Part) error) error
}

const pathRouters = "/api/v1/routers"

// Limits of the router's paths.
const (
	maxRouterBody = 17 << 20 // bytes: the largest inference body (16 MiB) and what stands around it
	maxTokenIDs   = 1 << 20  // ids of one prompt
	maxGenerates  = 256      // generate calls and dumps at one time
	maxDecisions  = 1024     // of an answer
)

// reservationReply answers POST /api/v1/routers/{app}/mark_prefill_complete and /free.
type reservationReply struct {
	RequestID string `json:"request_id"`
	Status    string `json:"status"` // prefill_complete | freed
}

// tokensRequest is the body of potential_loads and find_matches_for_request.
type tokensRequest struct {
	TokenIDs []uint32 `json:"token_ids"`
}

// reservationRequest is the body of mark_prefill_complete and free.
type reservationRequest struct {
	RequestID string `json:"request_id"`
}

// routerHandlers answers the paths of the Routers.
type routerHandlers struct {
	server  *Server
	routers Routers
}

// addRoutes registers the paths.
func (h routerHandlers) addRoutes(g *gin.Engine) {
	reply, stream := h.server.reply, h.server.stream
	const one = pathRouters + "/:app"
	g.GET(one, reply(h.router))
	g.POST(one+"/explain", reply(h.explain))
	g.GET(one+"/decisions", reply(h.decisions, "last"))
	g.POST(one+"/reset", reply(h.reset))
	g.POST(one+"/best_worker", reply(h.bestWorker))
	g.POST(one+"/best_worker_id", reply(h.bestWorker)) // Dynamo's older name
	g.POST(one+"/potential_loads", reply(h.potentialLoads))
	g.POST(one+"/get_potential_loads", reply(h.potentialLoads)) // Dynamo's name
	g.POST(one+"/find_matches_for_request", reply(h.findMatches))
	g.POST(one+"/mark_prefill_complete",
		reply(changeReservation(h.routers.MarkPrefillComplete, "prefill_complete")))
	g.POST(one+"/free", reply(changeReservation(h.routers.Free, "freed")))
	g.GET(one+"/dump_events", stream(h.dumpEvents))
	g.POST(one+"/generate", stream(h.generate))
}

func (h routerHandlers) router(c *gin.Context, _ query) (int, any, error) {
	r, err := h.routers.Router(c.Request.Context(), c.Param("app"))
	return http.StatusOK, r, err
}

func (h routerHandlers) explain(c *gin.Context, _ query) (int, any, error) {
	var q client.Query
	if err := readRouterBody(c, &q); err != nil {
		return 0, nil, err
	}
	if err := checkQuery(&q); err != nil {
		return 0, nil, err
	}
	e, err := h.routers.Explain(c.Request.Context(), c.Param("app"), &q)
	return http.StatusOK, e, err
}

func (h routerHandlers) decisions(c *gin.Context, q query) (int, any, error) {
	most, err := q.number("last", 100, maxDecisions)
	if err != nil {
		return 0, nil, err
	}
	list, err := h.routers.Decisions(c.Request.Context(), c.Param("app"), most)
	return http.StatusOK, gin.H{"decisions": notNull(list)}, err
}

// checkQuery refuses a query without a request, or with several.
func checkQuery(q *client.Query) error {
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
		return problem.New(problem.InvalidArgument, "route and headers go with prompt and request").
			WithHint("leave them out")
	case q.Model != "" && q.Prompt == nil && q.TokenIDs == nil:
		return problem.New(problem.InvalidArgument, "model goes with prompt and token_ids").
			WithHint("leave it out: the request names its own")
	case q.TokenIDs != nil:
		return checkIDs(q.TokenIDs)
	}
	return nil
}

// checkIDs bounds a prompt of token ids. The engine checks the ids themselves.
func checkIDs(ids []uint32) error {
	switch {
	case len(ids) == 0:
		return problem.New(problem.InvalidArgument, "token_ids is empty").
			WithHint("send the prompt as token ids: [1, 2, 3]")
	case len(ids) > maxTokenIDs:
		return problem.New(problem.TooLarge, "token_ids has %d entries, more than %d", len(ids), maxTokenIDs).
			WithHint("send a shorter prompt")
	}
	return nil
}

func (h routerHandlers) reset(c *gin.Context, _ query) (int, any, error) {
	r, err := h.routers.Reset(c.Request.Context(), c.Param("app"))
	return http.StatusOK, r, err
}

func (h routerHandlers) bestWorker(c *gin.Context, _ query) (int, any, error) {
	var q client.BestWorkerRequest
	if err := readRouterBody(c, &q); err != nil {
		return 0, nil, err
	}
	if err := checkIDs(q.TokenIDs); err != nil {
		return 0, nil, err
	}
	w, err := h.routers.BestWorker(c.Request.Context(), c.Param("app"), &q)
	return http.StatusOK, w, err
}

func (h routerHandlers) potentialLoads(c *gin.Context, _ query) (int, any, error) {
	var q tokensRequest
	if err := readRouterBody(c, &q); err != nil {
		return 0, nil, err
	}
	if len(q.TokenIDs) > 0 {
		if err := checkIDs(q.TokenIDs); err != nil {
			return 0, nil, err
		}
	}
	loads, err := h.routers.PotentialLoads(c.Request.Context(), c.Param("app"), q.TokenIDs)
	return http.StatusOK, gin.H{"loads": notNull(loads)}, err
}

// findMatches answers how many leading blocks of a prompt each rank holds, as Dynamo's index does.
func (h routerHandlers) findMatches(c *gin.Context, _ query) (int, any, error) {
	var q tokensRequest
	if err := readRouterBody(c, &q); err != nil {
		return 0, nil, err
	}
	if err := checkIDs(q.TokenIDs); err != nil {
		return 0, nil, err
	}
	x, err := h.routers.Explain(c.Request.Context(), c.Param("app"), &client.Query{TokenIDs: q.TokenIDs})
	if err != nil {
		return 0, nil, err
	}
	scores := map[string]int{}
	for i := range x.Ranks {
		if r := &x.Ranks[i]; r.HitBlocks > 0 {
			scores[r.Worker] = r.HitBlocks
		}
	}
	return http.StatusOK, gin.H{"scores": scores, "blocks": x.Blocks, "block_size": x.BlockSize}, nil
}

// changeReservation makes a handler of a request about a reservation.
func changeReservation(change func(ctx context.Context, app, requestID string) error, status string) answer {
	return func(c *gin.Context, _ query) (int, any, error) {
		var q reservationRequest
		if err := readRouterBody(c, &q); err != nil {
			return 0, nil, err
		}
		if q.RequestID == "" {
			return 0, nil, problem.New(problem.InvalidArgument, "request_id is missing").
				WithHint("give the request_id that best_worker was called with")
		}
		err := change(c.Request.Context(), c.Param("app"), q.RequestID)
		return http.StatusOK, reservationReply{q.RequestID, status}, err
	}
}

// acquireGenerate acquires a slot for a dump or a generate call.
func (h routerHandlers) acquireGenerate(c *gin.Context) (ctx context.Context, done func(), err error) {
	return h.server.acquireStream(c.Request, h.server.generates, "dumps and generate calls are under way")
}

// dumpEvents streams the index as one JSON document, so that the server never holds it whole.
func (h routerHandlers) dumpEvents(c *gin.Context) error {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return err
	}
	ctx, done, err := h.acquireGenerate(c)
	if err != nil {
		return err
	}
	defer done()
	d := &dump{w: c.Writer, buf: bufio.NewWriterSize(c.Writer, dumpBuffer), app: c.Param("app")}
	truncated, err := h.routers.DumpEvents(ctx, d.app, d.add)
	switch {
	case err != nil && !d.begun:
		return err
	case err != nil || ctx.Err() != nil:
		panic(http.ErrAbortHandler) // a client must not take half a document for a whole one
	}
	d.end(truncated)
	return nil
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
	beginStream(d.w, "application/json")
	name, _ := json.Marshal(d.app) //nolint:errchkjson // a string
	_, _ = fmt.Fprintf(d.buf, `{"apiVersion":%q,"app":%s,"events":[`, client.APIVersion, name)
}

// add writes one run. The bufio.Writer keeps its first error and returns it at the next run or at the end.
func (d *dump) add(r *client.Run) error {
	d.begin()
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if d.runs++; d.runs > 1 {
		_ = d.buf.WriteByte(',')
	}
	extendWriteDeadline(d.w)
	_, err = d.buf.Write(data)
	return err
}

func (d *dump) end(truncated bool) {
	d.begin()
	extendWriteDeadline(d.w)
	_, _ = fmt.Fprintf(d.buf, `],"truncated":%t}`+"\n", truncated)
	_ = d.buf.Flush() // a client that has left needs no end
}

// generate sends the parts of an answer as server-sent events, followed by [DONE]. An error before the first
// part is an ordinary error answer; a later one is an event of type error without [DONE].
func (h routerHandlers) generate(c *gin.Context) error {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return err
	}
	var q msg.Generate
	if err := readRouterBody(c, &q); err != nil {
		return err
	}
	if err := checkIDs(q.TokenIDs); err != nil {
		return err
	}
	ctx, done, err := h.acquireGenerate(c)
	if err != nil {
		return err
	}
	defer done()
	e := &eventWriter{w: c.Writer}
	err = h.routers.Generate(ctx, c.Param("app"), &q, func(part *client.Part) error {
		data, err := json.Marshal(part)
		if err != nil {
			return err
		}
		return e.write("data: " + string(data) + "\n\n")
	})
	switch {
	case err == nil && e.begun:
		_ = e.write("data: [DONE]\n\n") // a client that has left needs no end
	case err == nil:
		return problem.New(problem.Upstream, "the engine sent no tokens").
			WithHint("`dpserve logs %s` shows what it says", c.Param("app"))
	case !e.begun:
		return err
	default:
		data, _ := marshalReply(newErrorReply(err)) // texts always marshal
		_ = e.write("event: error\ndata: " + string(data) + "\n\n")
	}
	return nil
}

// eventWriter writes server-sent events. It sends the headers with the first event.
type eventWriter struct {
	w     http.ResponseWriter
	begun bool
}

func (e *eventWriter) write(text string) error {
	if !e.begun {
		e.begun = true
		beginStream(e.w, "text/event-stream")
	}
	extendWriteDeadline(e.w)
	if _, err := e.w.Write([]byte(text)); err != nil {
		return err
	}
	return http.NewResponseController(e.w).Flush()
}
