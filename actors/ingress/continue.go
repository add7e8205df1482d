package ingress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/continuation"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
)

// Bounds of what is kept so that streams can go on from another rank, in bytes.
const (
	keptText   = 256 << 10 // of one answer
	keptBody   = 256 << 10 // of its request
	keptAll    = 256 << 20 // of all streams of this ingress
	keptPooled = 16 << 10  // of a buffer that is used again
)

// keptMemory is the memory of what is kept, of all streams. Safe for concurrent use.
type keptMemory struct{ taken atomic.Int64 }

// keptAnswer is the answer that a client has so far, and the request for it, as long as the answer may go on
// from another rank. Of any other request nothing is kept.
type keptAnswer struct {
	answer    continuation.Answer
	body      []byte // the client's, once its answer has begun
	out       []byte // what the client gets of one read from the second engine on
	isKept    bool
	isBroken  bool   // the answer broke, and is to go on: the request for the rest is not made yet
	isResumed bool   // the running leg, or the next one, goes on with the answer
	why       string // nothing is kept; "" if the application does not want it either
	cause     dispatch.Cause
	taken     int64 // of keptMemory
}

// release forgets the answer, and gives its memory back.
func (k *keptAnswer) release(m *keptMemory) {
	m.taken.Add(-k.taken)
	k.answer.Reset()
	if cap(k.answer.Text) > keptPooled {
		k.answer = continuation.Answer{}
	}
	*k = keptAnswer{answer: k.answer, body: pooled(k.body), out: pooled(k.out)}
}

func pooled(b []byte) []byte {
	if cap(b) > keptPooled {
		return nil
	}
	return b[:0]
}

// account counts the memory of what is kept. What exceeds a bound is not kept any more.
func (k *keptAnswer) account(m *keptMemory) {
	now := int64(cap(k.body) + cap(k.answer.Text) + cap(k.out))
	if now != k.taken {
		all := m.taken.Add(now - k.taken)
		if k.taken = now; all > keptAll {
			k.drop("memory")
		}
	}
	if len(k.answer.Text) > keptText {
		k.drop("size")
	}
}

// drop says that the answer cannot go on from here.
func (k *keptAnswer) drop(why string) { k.isKept, k.why = false, why }

// beginKeeping begins to keep the answer of a leg that is the first to have one.
func (req *request) beginKeeping() {
	k := &req.kept
	k.answer.Reset()
	k.why, k.isKept = "", false
	switch {
	case !req.app.continues || !req.scan.Stream:
		return
	case req.rest != nil || len(req.body.b) > keptBody:
		k.why = "size"
	default:
		k.why = req.scan.WhyPinned()
	}
	k.isKept = k.why == ""
}

// keepBody keeps the request: the memory of bodies is for requests whose answers have not begun.
func (req *request) keepBody() {
	if k := &req.kept; k.isKept {
		k.body = append(k.body[:0], req.body.b...)
		k.account(&req.in.keptMemory)
	}
}

// passEvents returns what the client gets of an engine's events, and keeps it.
func (req *request) passEvents(events []byte) ([]byte, error) {
	k := &req.kept
	if !k.isKept && !k.isResumed {
		return events, nil
	}
	k.out = k.out[:0]
	for rest := events; len(rest) > 0; {
		n := openai.EventEnd(rest, 0)
		if n < 0 {
			n = len(rest)
		}
		event := rest[:n]
		if rest = rest[n:]; !k.isResumed {
			k.answer.Read(event)
			continue
		}
		var err error
		if k.out, err = k.answer.AppendEvent(k.out, event); err != nil {
			return nil, err
		}
	}
	if k.account(&req.in.keptMemory); k.isResumed {
		return k.out, nil
	}
	return events, nil
}

// noteBreak reports whether an answer that ended so may go on from another rank.
func (req *request) noteBreak(ctx context.Context, res *result) (canContinue bool) {
	k := &req.kept
	if req.status == 0 || !res.cause.Row().Moves {
		return false
	}
	k.cause = res.cause
	k.isBroken = k.isKept && k.answer.MayGoOn() && !req.cutConn && ctx.Err() == nil
	return k.isBroken
}

// resume makes the request one for the rest of its answer, if that broke. It returns false if the answer
// cannot go on.
func (req *request) resume(ctx context.Context) bool {
	k := &req.kept
	if !k.isBroken {
		return true
	}
	k.isBroken = false
	broken := req.result
	req.ends.note(&broken)
	if s := req.split; s.isUnderWay() {
		s.flight.AwaitLegs() // a prefill leg beside the decode leg may still read the body
	}
	req.queueDeadline, req.unitDue, req.unitLives = time.Time{}, time.Time{}, false
	if err := req.makeRest(ctx); err != nil {
		k.drop(err.Error())
		//nolint:contextcheck // the line is the request's
		req.logLine(slog.LevelInfo, "a stream broke and does not go on", &broken, slog.Any("err", err))
		return false
	}
	k.isResumed = true
	//nolint:contextcheck // the line is the request's
	req.logLine(slog.LevelInfo, "a stream broke and goes on from another rank", &broken,
		slog.Int("tokens", k.answer.Tokens))
	return true
}

// makeRest makes the body for the rest of the answer, and the input of the Router.
func (req *request) makeRest(ctx context.Context) error {
	k := &req.kept
	if err := req.scan.Scan(req.route, k.body); err != nil { // what it found was given back
		return err
	}
	var engines goesOnAnswer
	if req.route == openai.Chat {
		var err error
		if engines, err = (search{req}).findGoesOn(ctx); err != nil {
			return err
		}
	}
	text, tokens := k.answer.Continue(continuation.Stops(k.body), engines.trims)
	req.dropBody()
	mem := req.in.bodies.take(len(k.body) + 2*len(text) + restMembers)
	if mem == nil {
		return errNoBodyMemory
	}
	req.body = mem
	body, err := continuation.AppendRequest(mem.b, k.body, req.route, text, tokens)
	if err != nil {
		return err
	}
	mem.b = body
	if err := req.scan.Scan(req.route, body); err != nil {
		return err
	}
	if f := req.prepare(); f != nil { //nolint:contextcheck // its headers and prompt are the request's
		return fmt.Errorf("%s", f.message)
	}
	return nil
}

// restMembers is the memory of the members that the request for the rest of an answer has more, in bytes.
const restMembers = 512

// countContinued counts an answer that broke: it goes on, or it ended.
func (req *request) countContinued(result string) {
	if req.kept.cause != dispatch.OK {
		req.app.router.metrics.Load().Continued(req.kept.cause.String(), result)
		req.spans.Broke(req.kept.cause.String(), result)
		req.kept.cause = dispatch.OK
	}
}

// endBroken ends an answer that broke after its first byte and does not go on.
func (req *request) endBroken(ctx context.Context, kind dispatch.AnswerKind) {
	if kind != dispatch.AnswerStreamLost && kind != dispatch.AnswerDeadline {
		return
	}
	req.countContinued("lost")
	if ctx.Err() != nil {
		req.result = result{cause: contextCause(ctx)}
	}
	switch {
	case req.cutConn:
	case req.result.cause == dispatch.ClientGone:
		req.cutConn = true
	default:
		relay{req}.breakStream(req.result.cause)
	}
}

// goesOn is whether the engines of a revision go on with a last message of the assistant, which no engine
// says. It is found out with the first chat that has to go on.
type goesOn struct {
	mu    sync.Mutex
	known goesOnAnswer
	call  chan struct{} // of the question under way; closed: it is answered
}

// goesOnAnswer is what is known.
type goesOnAnswer struct {
	state string // goesOnYes, goesOnNo, or "" while it is not known
	trims bool   // the chat template cuts white space from the end of a message
}

// The states of goesOn.
const (
	goesOnYes = "yes"
	goesOnNo  = "no"
)

// Bounds of the question.
const (
	goesOnTime = 5 * time.Second
	goesOnAsks = 3 // by one request: the rank may die, or the client that asks for several may leave
)

// get returns what is known.
func (g *goesOn) get() goesOnAnswer {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.known
}

// find returns what is known, or asks. The requests that need it at the same time ask once.
func (g *goesOn) find(ctx context.Context, ask func(context.Context) goesOnAnswer) goesOnAnswer {
	g.mu.Lock()
	known, call := g.known, g.call
	if known.state == "" && call == nil {
		g.call = make(chan struct{})
	}
	g.mu.Unlock()
	switch {
	case known.state != "":
		return known
	case call != nil:
		select {
		case <-call:
		case <-ctx.Done():
			return goesOnAnswer{}
		}
		return g.get()
	}
	ctx, cancel := context.WithTimeoutCause(ctx, goesOnTime, errFirstToken)
	defer cancel()
	known = ask(ctx)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.known = known
	close(g.call)
	g.call = nil
	return known
}

// findGoesOn returns what is known of the engines, or asks one. While no rank is ready the request waits for
// one, as for a rank that serves it.
func (req search) findGoesOn(ctx context.Context) (found goesOnAnswer, err error) {
	found = req.app.goesOn.get()
	for range goesOnAsks {
		if found.state != "" {
			break
		}
		rk, f, wait := req.decideReady()
		if req.failure = f; wait {
			req.hadTurn = true // its first rank has begun the answer
			rk, _ = req.waitForRank(ctx, req.decideReady)
		}
		if rk == nil {
			return found, errors.New(req.failure.message)
		}
		found = req.app.goesOn.find(ctx, func(ctx context.Context) goesOnAnswer {
			return req.askGoesOn(ctx, rk)
		})
	}
	switch found.state {
	case goesOnYes:
		return found, nil
	case goesOnNo:
		return found, errors.New("the engine does not go on with a message of the assistant")
	}
	return found, errors.New("no engine said whether it goes on with a message of the assistant")
}

// decideReady chooses any ready rank that has not failed the request, full or not.
func (req search) decideReady() (rk *rank, f *failure, wait bool) {
	ar := req.app.router
	if rk = ar.anyReadyRank(req.excluded(dispatch.Decode)); rk != nil {
		return rk, nil, false
	}
	if isDoubtful, _ := req.doubtsUnit(); ar.canServe() && !isDoubtful {
		return nil, req.noReadyRank(0), false
	}
	return nil, nil, true
}

// askGoesOn asks an engine for one token behind a message of the assistant, with the two fields and without
// them. With them the prompt is shorter, because the message has no end and no other one begins. The third
// question is whether white space at the end of the message counts.
func (req *request) askGoesOn(ctx context.Context, rk *rank) (found goesOnAnswer) {
	const fields = `,"continue_final_message":true,"add_generation_prompt":false`
	var group sync.WaitGroup
	var with, without, spaced int
	group.Go(func() { without = req.promptTokens(ctx, rk, "one two", "") })
	group.Go(func() { spaced = req.promptTokens(ctx, rk, `one two \n\n\n\n`, fields) })
	with = req.promptTokens(ctx, rk, "one two", fields)
	if group.Wait(); with == 0 || without == 0 || spaced == 0 {
		return found
	}
	found = goesOnAnswer{goesOnNo, with == spaced}
	if with < without {
		found.state = goesOnYes
	}
	req.in.log.Info("asked an engine whether it goes on with a message of the assistant",
		slog.String("app", req.app.app.Name), slog.String("goes_on", found.state),
		slog.Bool("trims", found.trims))
	return found
}

// promptTokens is how many tokens the prompt of a small chat has; 0: the engine does not say it.
func (req *request) promptTokens(ctx context.Context, rk *rank, text, members string) int {
	body := append([]byte(`{"model":`), openai.AppendString(nil, string(req.scan.Model))...)
	body = append(body, `,"messages":[{"role":"user","content":"Count."},{"role":"assistant","content":"`+
		text+`"}],"max_tokens":1,"temperature":0`+members+"}"...)
	header := http.Header{"Content-Type": {"application/json"}, "User-Agent": nil, "Via": req.in.via}
	if v := req.header["Authorization"]; len(v) > 0 {
		header["Authorization"] = v
	}
	resp, reply, err := rk.asker.Ask(ctx, &rankleg.Request{
		Rank: rk.Rank, Route: openai.Chat, Header: header, Body: body, FirstToken: goesOnTime,
	})
	if err != nil || reply.Refusal != msg.Granted {
		return 0
	}
	defer closeBody(resp)
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxWords))
	if err != nil || resp.StatusCode != http.StatusOK {
		return 0
	}
	u, _ := openai.ParseUsage(answer)
	return u.PromptTokens
}

// continuesStreams reports whether the streams of an application go on from another rank. Engines of family
// openai ignore what they do not know, and would begin a new answer.
func continuesStreams(a *app.Application) bool {
	return a.Retries.ContinueStreams && a.Engine.Family != app.FamilyOpenAI
}

// streams says which streams of the application go on from another rank.
func (a *appRevision) streams() client.Streams {
	switch {
	case !a.app.Retries.ContinueStreams:
		return client.Streams{Why: "retries.continue_streams is false"}
	case !a.continues:
		return client.Streams{Why: "engines of engine.family openai would begin a new answer"}
	}
	out := client.Streams{Completions: true}
	switch a.goesOn.get().state {
	case goesOnYes:
		out.Chat = true
	case goesOnNo:
		out.Why = "chat does not: the engine begins a new answer behind a message of the assistant"
	default:
		out.Why = "whether chat does is asked of the engine with the first one that breaks"
	}
	return out
}
