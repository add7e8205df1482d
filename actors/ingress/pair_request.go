package ingress

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/pdproxy"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// split is what a request of an application with two pools needs beyond a plain one. The first decision says
// whether a prefill rank computes the prompt. If not, the request goes on as a plain one on its decode rank.
// Else run leads it over both ranks: what happens next is decided by a pdproxy.Flight, and split carries it
// out. Reused.
type split struct {
	req    *request
	pair   *pairApp
	body   transfer.Request     // the client's
	prompt prompt               // as the prefill pool reads it
	query  routing.Request      // likewise
	choice routing.PairDecision // of both pools
	alone  routing.Decision     // of one pool
	way    dispatch.Way         // WayNone: nothing is decided yet
	rank   *rank                // the prefill rank that computed the prompt, or is to; nil: none
	flight *pdproxy.Flight      // nil: a plain request
	warm   *warmUp              // nil: a client's request
	held   groupWait            // for a lockstep group of the prefill pool
	splitState
}

// splitState is the state of a request on its way over two ranks. Events come from any goroutine; mu guards
// what they and the request's own goroutine share.
type splitState struct {
	ctx   context.Context //nolint:containedctx // of the request
	first bool            // the first choice was made before the flight began
	leg   *pairLeg        // the decode leg that runs
	made  pairAttempt

	mu       sync.Mutex
	pending  [2]bump // counted in the Routers, and not reserved yet
	choosing uint32  // number of the choice under way
	cancel   context.CancelCauseFunc
	legs     []*pairLeg
	computed time.Time // when the last prefill leg had its answer; zero: it has none yet
	answer   dispatch.AnswerKind
	why      dispatch.Cause // of an answer of dpserve's own
}

// bump is a request that counts on a rank in its pool's Router.
type bump struct {
	router   *routing.Router // nil: none
	id       routing.RankID
	reqID    uint64
	isRemote bool // the rank gets a prompt that a prefill rank computes
}

// pairAttempt has the fields of the two legs of one attempt.
type pairAttempt struct {
	mu     sync.Mutex
	number uint32
	fields transfer.Attempt
	header []string // X-Request-Id of both legs
}

// prepareSplit reads a request of an application with two pools.
func prepareSplit(req *request) *failure {
	p := req.app.pair
	switch {
	case p == nil || !req.route.Computes():
		return nil
	case req.scan.IsPlain:
		if req.why == nil {
			p.metrics.NotSplit(transfer.OnRoute.String())
		}
		return nil
	}
	if s := req.split; s != nil { // the rest of an answer: it keeps its way
		if err := s.body.Scan(p.transfer, transfer.RouteOf(req.route.Path()), req.body.b); err != nil {
			return badBody(err)
		}
		return s.readPrompt()
	}
	s, _ := req.in.pairs.requests.Get().(*split)
	if s == nil || req.why != nil {
		s = &split{}
	}
	req.split = s
	s.req, s.pair, s.way = req, p, dispatch.WayNone
	if err := s.body.Scan(p.transfer, transfer.RouteOf(req.route.Path()), req.body.b); err != nil {
		return badBody(err)
	}
	if why := s.body.Reason; why != transfer.CanSplit {
		if req.why == nil {
			p.metrics.NotSplit(why.String())
			p.metrics.Decision(routing.PairCannotSplit)
		}
		s.way = dispatch.WayLocal
		return s.checkPlain(why)
	}
	if !p.isOn() {
		s.way = dispatch.WayLocal
		return s.checkPlain(transfer.CanSplit)
	}
	return s.readPrompt()
}

// checkPlain refuses a request for one rank if no rank of the application takes such requests.
func (s *split) checkPlain(why transfer.Reason) *failure {
	if s.pair.traits.TakesPlain || len(s.pair.splitOnly) < s.pair.decodeSpec.app.NumReplicas {
		return nil
	}
	text := "engines of transfer " + s.pair.traits.Name + " answer only requests that a prefill rank and a " +
		"decode rank share; add a rank of role both"
	if why != transfer.CanSplit {
		text += ", or change the request, which cannot be shared (" + why.String() + ")"
	}
	return newFailure(openai.CodeNoReadyRank, text)
}

// readPrompt makes the input of the prefill pool's Router. The blocks of the decode pool are used if they are
// what the prefill pool reads.
func (s *split) readPrompt() *failure {
	req, prefill := s.req, s.pair.prefill
	if s.sharesPrompt() {
		mine := s.prompt.promptMemory
		s.prompt = req.prompt
		s.prompt.promptMemory = promptMemory{
			blocks: req.prompt.blocks, matches: mine.matches[:0], hits: mine.hits[:0],
		}
		s.prompt.lookedUp = false
	} else if f := s.prompt.fromBody(req.r.Context(), prefill, req.route, req.prompt.adapter, &req.scan,
		req.body.b, req.r.Header); f != nil {
		return f
	}
	s.prompt.hasDirect = false // x-dpserve-rank names the decode rank
	if v := req.r.Header[headerPrefillRank]; len(v) > 0 {
		var ok bool
		if s.prompt.direct, ok = rankleg.ParseRankID(v[0]); !ok || len(v) > 1 {
			return newFailure(openai.CodeInvalidRequest,
				"x-dpserve-prefill-rank must be GROUP/RANK, for example 0/3")
		}
		s.prompt.hasDirect = true
	}
	return nil
}

// sharesPrompt reports whether the prefill pool's policy reads nothing but what was made for the decode
// pool's.
func (s *split) sharesPrompt() bool {
	p, d := s.pair.prefill, s.pair.decode
	in, have := p.inputs(), d.inputs()
	switch {
	case in.needs.Text && !have.needs.Text:
		return false
	case !in.chains():
		return true
	}
	return have.chains() && in.identity == have.identity && p.tokensPerBlock() == d.tokensPerBlock()
}

// release ends the use of s by its request.
func (s *split) release() {
	if s == nil {
		return
	}
	in, m := s.req.in, s.prompt.giveMemory()
	m.blocks = nil // those of the decode pool's prompt, perhaps
	body := s.body
	body.Body = nil
	tried, held := s.query.Tried[:0], groupWait{answered: s.held.answered, hits: s.held.hits[:0]}
	*s = split{body: body, choice: s.choice, alone: s.alone, held: held}
	s.prompt.promptMemory, s.query.Tried = m, tried
	in.pairs.requests.Put(s)
}

// decides reports whether the next decision is between a prefill rank and the decode rank alone.
func (s *split) decides() bool { return s != nil && s.way == dispatch.WayNone }

// isRemote reports whether a prefill rank is to compute the prompt.
func (s *split) isRemote() bool { return s != nil && s.way == dispatch.WayRemote }

// decide asks the PairRouter once. wait: the decode pool has no room now, or no rank yet.
func (s *split) decide() (rk *rank, f *failure, wait bool) {
	return s.decideUnlike([2]routing.RankRef{})
}

// decideUnlike is decide with a rank of each pool that is taken only if there is no other.
func (s *split) decideUnlike(unlike [2]routing.RankRef) (rk *rank, f *failure, wait bool) {
	req, p := s.req, s.pair
	unmet := p.plainOnly      // decode ranks that have met no prefill rank
	alone := dispatch.WayNone // how a rank of plainOnly gets the request, if one does
	for {
		search{req}.excludeTried()
		req.query.Tried = append(req.query.Tried, unmet...)
		if unlike[dispatch.Decode] != (routing.RankRef{}) {
			req.query.Tried = append(req.query.Tried, unlike[dispatch.Decode].ID)
		}
		s.describePrefill(unlike[dispatch.Prefill])
		req.query.ID = search{req}.nextID()
		p.decode.describeRequest(&req.query, &req.prompt)
		tried := len(req.query.Tried)
		s.askRouter()
		d := &s.choice
		switch {
		case s.prompt.isReleased && !d.Remote:
			if d.Kind == routing.Route {
				s.undoChoice()
			}
			s.dropRelease()
			continue
		case d.Kind != routing.Route && unlike[dispatch.Decode] != (routing.RankRef{}):
			unlike[dispatch.Decode] = routing.RankRef{}
			continue
		case d.Kind == routing.Route && !d.Remote && unlike[dispatch.Prefill] != (routing.RankRef{}):
			s.undoChoice()
			unlike[dispatch.Prefill] = routing.RankRef{}
			continue
		case d.Kind == routing.Queue && alone != dispatch.WayNone:
			// To wait for room here would be a busy loop: each decision takes and returns a place at a rank
			// of a pair, and whoever waits for room is woken by that.
			d.Reason = routing.PairNotPrewarmed
			s.countDecision()
			return nil, s.noPrefillFailure(), false
		case d.Kind == routing.Queue:
			return nil, nil, true
		case len(p.plainOnly) > 0 && alone == dispatch.WayNone && !d.Remote:
			if f := s.leavePair(); f != nil {
				return nil, f, false
			}
			alone, unmet, unlike = s.way, nil, [2]routing.RankRef{}
			continue
		case d.Kind == routing.Reject:
			s.countDecision()
			switch {
			case s.prompt.hasDirect && p.prefill.readyRank(s.prompt.direct) == nil:
				return nil, s.namedRankFailure(), false
			case len(unmet) > 0 || len(req.query.Tried) > tried:
				d.Reason = routing.PairNotPrewarmed
				return nil, s.noPrefillFailure(), false
			}
			return nil, search{req}.pickFailure(), false
		}
		if rk, ok := s.takeChoice(); ok {
			s.takeRelease()
			if alone != dispatch.WayNone {
				s.way = alone
			}
			s.countDecision()
			if req.why == nil {
				p.decode.decisions.recordPair(req.id, req.ends.count()+1, p.rule, &req.prompt, &req.query, d,
					wayNames[s.way])
			}
			if s.way == dispatch.WayFallback && p.failsWithoutPrefill() {
				req.attempt.rank = rk
				req.undoPick()
				return nil, s.noPrefillFailure(), false
			}
			return rk, nil, false
		}
		s.undoChoice() // a rank is gone since the decision: the Router knows it when it is asked again
		s.dropRelease()
	}
}

// askRouter decides once: for a question as for a request.
func (s *split) askRouter() {
	req, p := s.req, s.pair
	if req.why != nil {
		req.why.PairWhy = p.router.Explain(&s.query, &req.query, false)
		s.choice = req.why.Pair
		return
	}
	began := time.Now()
	p.router.Pick(&s.query, &req.query, false, &s.choice)
	p.decode.metrics.Load().Decision(time.Since(began))
}

// countDecision counts the decision with which a search for ranks ends.
func (s *split) countDecision() {
	if s.req.why == nil {
		s.pair.metrics.Decision(s.choice.Reason)
	}
	s.req.choice.Reason = s.choice.Reason
}

// leavePair takes back a decision without a pair, for engines that take no request without a partner: a rank
// of role both computes the prompt, unless the application wants an error then.
func (s *split) leavePair() *failure {
	d := &s.choice
	s.way = dispatch.WayLocal
	if d.Kind == routing.Route {
		s.undoChoice()
	}
	if d.Kind == routing.Reject || d.IsFallback() {
		s.way = dispatch.WayFallback
		if s.pair.failsWithoutPrefill() {
			return s.noPrefillFailure()
		}
	}
	return nil
}

// describePrefill writes the prefill pool's query of a new decision.
func (s *split) describePrefill(unlike routing.RankRef) {
	excluded := search{s.req}.excluded(dispatch.Prefill)
	s.query.Tried = s.pair.prefill.appendExcluded(s.query.Tried[:0], excluded, true)
	if unlike != (routing.RankRef{}) {
		s.query.Tried = append(s.query.Tried, unlike.ID)
	}
	s.query.ID, s.query.DrawsByID = search{s.req}.nextID(), s.req.query.DrawsByID
	if s.prompt.isReleased {
		s.query.ID = s.held.id
	}
	s.pair.prefill.describeRequest(&s.query, &s.prompt)
}

// takeChoice notes a decision; false if one of its ranks is gone.
func (s *split) takeChoice() (decode *rank, ok bool) {
	req, p, d := s.req, s.pair, &s.choice
	prefillRouter, decodeRouter := p.router.Routers()
	if decode = p.decode.findRank(d.Decode); decode == nil {
		return nil, false
	}
	req.attempt.router, req.attempt.isCounted = decodeRouter, !d.Remote && s.flight == nil && req.why == nil
	if !d.Remote {
		s.way, s.rank = dispatch.WayLocal, nil
		if d.IsFallback() {
			s.way = dispatch.WayFallback
		}
	} else {
		prefill := p.prefill.findRank(d.Prefill)
		if prefill == nil {
			return nil, false
		}
		s.way, s.rank = dispatch.WayRemote, prefill
		s.setPending(dispatch.Prefill, bump{prefillRouter, d.Prefill, s.query.ID, true})
	}
	if d.Remote || s.flight != nil {
		s.setPending(dispatch.Decode, bump{decodeRouter, d.Decode, req.query.ID, d.Remote})
	}
	if req.why != nil {
		return decode, true
	}
	if d.Remote {
		p.prefill.metrics.Load().Pick(d.Prefill.Group(), d.Prefill.Rank(), d.Reason)
	}
	p.decode.metrics.Load().Pick(d.Decode.Group(), d.Decode.Rank(), d.Reason)
	return decode, true
}

// undoChoice takes back what the last decision has counted.
func (s *split) undoChoice() {
	d := &s.choice
	prefillRouter, decodeRouter := s.pair.router.Routers()
	if d.Remote {
		s.undo(&bump{prefillRouter, d.Prefill, s.query.ID, true})
	}
	s.undo(&bump{decodeRouter, d.Decode, s.req.query.ID, d.Remote})
}

func (s *split) undo(b *bump) {
	if b.router == nil || s.req.why != nil {
		return
	}
	s.req.in.observeUndo(b.router, b.id, b.reqID)
	if b.reqID == s.held.id {
		s.pair.prefill.groups.finish(&s.held, b.id, 0, true)
	}
}

func (s *split) setPending(side dispatch.Side, b bump) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending[side] = b
}

func (s *split) takePending(side dispatch.Side) bump {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.pending[side]
	s.pending[side] = bump{}
	return b
}

// appendPaired appends the decode ranks that take no request without a prefill rank, if it has none.
func (s *split) appendPaired(dst []routing.RankID) []routing.RankID {
	if s == nil || s.way == dispatch.WayRemote || s.way == dispatch.WayNone {
		return dst
	}
	return append(dst, s.pair.splitOnly...)
}

// setHeaders names the way of the prompt, and the prefill rank if there was one.
func (s *split) setHeaders(h map[string][]string) {
	if s == nil || s.way == dispatch.WayNone {
		return
	}
	h[headerPrefill] = wayValues[s.way]
	if s.way == dispatch.WayRemote && s.rank != nil {
		h[headerPrefillRank] = []string{s.rank.ID.String()}
	}
}

var (
	wayNames = [...]string{
		dispatch.WayNone: "none", dispatch.WayRemote: "remote", dispatch.WayLocal: "local",
		dispatch.WayFallback: "fallback",
	}
	wayValues = [...][]string{ // shared by all answers
		dispatch.WayNone: nil, dispatch.WayRemote: {"remote"}, dispatch.WayLocal: {"local"},
		dispatch.WayFallback: {"fallback"},
	}
	resultNames = [...]string{
		dispatch.ResultOK: "ok", dispatch.ResultRejected: "rejected", dispatch.ResultFailed: "failed",
		dispatch.ResultStreamLost: "stream_lost", dispatch.ResultDeadline: "deadline",
		dispatch.ResultClientGone: "client_gone",
	}
	noteNames = [...]string{
		dispatch.NoteRedo: "redo", dispatch.NotePrefillFailed: "prefill_failed",
		dispatch.NoteNullParams: "null_params", dispatch.NoteParamsLate: "params_late",
		dispatch.NoteKVFailure: "kv_failure", dispatch.NoteDecodeLate: "decode_late",
		dispatch.NoteFallback: "fallback", dispatch.NoteStoodStill: "stood_still",
	}
	sideNames = [...]string{dispatch.Prefill: "prefill", dispatch.Decode: "decode"}
)

// note counts something that happened to the request.
func (s *split) note(n dispatch.Note) {
	if s != nil {
		s.pair.metrics.Note(noteNames[n])
	}
}

// countPlain counts a request that was not led over two ranks, by the status of its answer.
func (s *split) countPlain(code int) {
	if s == nil || s.flight != nil {
		return
	}
	outcome := dispatch.ResultOK
	switch {
	case code == statusClientGone:
		outcome = dispatch.ResultClientGone
	case s.req.cutConn:
		outcome = dispatch.ResultStreamLost
	case code == openai.Status(openai.CodeDeadlineExceeded):
		outcome = dispatch.ResultDeadline
	case code >= 500:
		outcome = dispatch.ResultFailed
	case code >= 400:
		outcome = dispatch.ResultRejected
	}
	way := s.way
	if s.req.attempt.rank == nil {
		way = dispatch.WayNone
	}
	s.pair.metrics.Request(wayNames[way], resultNames[outcome])
}

func (s *split) noPrefillFailure() *failure {
	f := newFailure(openai.CodeNoReadyRank, "no prefill rank can compute the prompt, and the application's "+
		"disaggregation.fallback is fail"+s.pair.prefill.whyNotReady()+"; see `dpserve status`").
		withRetryAfter(1)
	f.cause = s.choice.Reason
	return f
}

// namedRankFailure is the answer to a request whose prefill rank, named in x-dpserve-prefill-rank, cannot
// take it.
func (s *split) namedRankFailure() *failure {
	ar, id := s.pair.prefill, s.prompt.direct
	if !ar.hasRank(id) {
		return newFailure(openai.CodeInvalidRequest, fmt.Sprintf("x-dpserve-prefill-rank: this application "+
			"has no prefill rank %s (it has %s); correct the header or leave it out", id,
			s.pair.prefillSpec.rankRange()))
	}
	f := newFailure(openai.CodeNoReadyRank, fmt.Sprintf("prefill rank %s, which x-dpserve-prefill-rank "+
		"names, cannot take the prompt now; try again later, or leave the header out", id)).withRetryAfter(1)
	f.cause = routing.ReasonRankUnavailable
	return f
}

// newAttemptID is a fresh id for both legs of an attempt.
func (s *split) newAttemptID() string {
	id := mix(s.req.in.requestID())
	return hex16(id) + strconv.FormatUint(id>>60, 16) + hex16(mix(id))
}

// flightGrace is how much later than the flight the relay gives up a leg without a first token: the flight
// looks at its deadlines now and then, and knows whose fault it is.
const flightGrace = time.Second

// needsBody reports whether a leg beside the decode leg may still read the client's body.
func (s *split) needsBody() bool {
	return s.isUnderWay() && s.pair.config.Order != dispatch.PrefillFirst
}

// appendAttrs adds the way of the prompt and the prefill rank to a log line.
func (s *split) appendAttrs(attrs []slog.Attr) []slog.Attr {
	if s == nil {
		return attrs
	}
	attrs = append(attrs, slog.String("prefill", wayNames[s.way]))
	if rk := s.rank; rk != nil && s.way == dispatch.WayRemote {
		attrs = append(attrs, slog.String("prefill_unit", rk.Unit), slog.Int("prefill_group", rk.ID.Group()),
			slog.Int("prefill_rank", rk.ID.Rank()), slog.Uint64("prefill_epoch", rk.Epoch))
	}
	return attrs
}

// mayRelay asks the flight whether the client may get what the decode rank has answered.
func (s *split) mayRelay(ev dispatch.Event) bool {
	l := s.leg
	s.flight.Tell(ev)
	s.mu.Lock()
	isPassed, computed := l.isPassed, s.computed
	s.mu.Unlock()
	if !isPassed || ev.Kind != dispatch.EvContent {
		return isPassed
	}
	now := time.Now()
	if s.way != dispatch.WayRemote {
		s.pair.metrics.Part("decode", now.Sub(l.started))
		return true
	}
	s.pair.metrics.Part("transfer", now.Sub(l.started))
	if s.req.scan.Stream && !computed.IsZero() && s.rank != nil && l.hasTicket() {
		q := &s.req.query
		s.pair.router.Transferred(s.rank.ref(), l.rank.ref(), q.Tokens-q.HitOn(l.rank.ID), now.Sub(computed))
	}
	return true
}

// isUnderWay reports whether a flight leads the request.
func (s *split) isUnderWay() bool { return s != nil && s.flight != nil }
