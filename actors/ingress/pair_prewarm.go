package ingress

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/pdproxy"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/routing"
)

// warmUp makes a split request one that only lets two engines meet, before a client's request depends on it:
// one pair, one attempt, no tickets, and nobody gets its answer. splitState.mu guards it.
type warmUp struct {
	result dispatch.Result
	err    error // why it failed; nil: nothing is known
}

// meetingTime is longer than a warm-up may take: its context ends first.
const meetingTime = time.Hour

// Prewarm implements pdproxy.Backend. The prompt is new each time: what a decode rank already holds would not
// be moved.
func (b *pairBackend) Prewarm(ctx context.Context, prefill, decode routing.RankRef) error {
	p := *b.current.Load()
	life, spec := *p.pairLife, *p.decodeSpec
	p.pairLife, p.decodeSpec = &life, &spec
	life.metrics = telemetry.NoPair() // clients' requests are counted
	// a first handshake may take longer than a prompt
	spec.firstToken, p.config.PrefillLimit = meetingTime, meetingTime
	p.config.Attempts, p.config.FallbackFails = 1, true
	from, to := p.prefill.findRef(prefill), p.decode.findRef(decode)
	if from == nil || to == nil {
		return engine.ErrRankGone
	}
	req := newRequest(b.in)
	req.app, req.route = &appRoute{appRevision: p.decodeSpec, router: p.decode, pair: &p}, openai.Completions
	req.id = hex16(mix(b.in.requestID())) + hex16(rand.Uint64()) + hex16(rand.Uint64())
	req.idHeader[0] = req.id
	req.r = (&http.Request{Header: http.Header{"Content-Type": {"application/json"}}}).WithContext(ctx)
	body, err := json.Marshal(map[string]any{
		"model": p.decode.modelID(), "prompt": "dpserve " + req.id, "max_tokens": 1, "temperature": 0,
	})
	if err != nil {
		return err
	}
	s := &split{req: req, pair: &p, way: dispatch.WayRemote, rank: from}
	req.split, req.attempt.rank = s, to
	s.warm = &warmUp{result: dispatch.ResultFailed}
	if err := errors.Join(req.scan.Scan(req.route, body),
		s.body.Scan(p.transfer, transfer.Completions, body)); err != nil {
		return err
	}
	legs := legRunner{s}
	if err := legs.findPeer(ctx); err != nil {
		return fmt.Errorf("prefill rank: %w", err)
	}
	_ = s.run(ctx) // s.warm has its end
	if s.warm.result == dispatch.ResultOK {
		return nil
	}
	return cmp.Or(s.warm.err, context.Cause(ctx), engine.ErrRankGone)
}

// failed notes the first leg that has failed.
func (w *warmUp) failed(side dispatch.Side, res *result) {
	if w.err == nil && (res.cause != dispatch.OK || res.err != nil) {
		w.err = fmt.Errorf("%s rank: %w", sideNames[side], res.asError())
	}
}

// asError is what has ended a leg, in one line.
func (r *result) asError() error {
	switch {
	case r.status != 0:
		return fmt.Errorf("the engine answered %d: %s", r.status, cmp.Or(clipped([]byte(r.engine.Message)),
			http.StatusText(r.status)))
	case r.err != nil:
		return r.err
	}
	return errors.New(r.name())
}

// takeAnswer reads the answer of a decode rank that nobody gets.
func (s legRunner) takeAnswer(l *pairLeg, resp *http.Response) result {
	answer, err := io.ReadAll(io.LimitReader(resp.Body, transfer.MaxAnswer+1))
	switch {
	case err != nil:
		return failedRead(l.ctx, err, false)
	case resp.StatusCode != http.StatusOK:
		return s.readPrefillError(l, resp, answer)
	}
	res := result{cause: dispatch.OK}
	s.mayRelay(s.req.eventOf(dispatch.EvContent, &res))
	return res
}

// ownHeader is the header of a leg of dpserve's own, with the key that the rank's engine asks for: clients
// bring their own.
func (s legRunner) ownHeader(side dispatch.Side, id []string) http.Header {
	h := rankleg.EngineHeader(s.req.r.Header, id, s.req.in.via)
	if key := engine.APIKey(s.pair.pool(side).revision.Load().app); key != "" {
		h.Set("Authorization", "Bearer "+key)
	}
	return h
}

// askWhole asks a rank's engine and reads its whole answer.
func askWhole(ctx context.Context, rk *rank, q *rankleg.Request) (status int, answer []byte, err error) {
	resp, reply, err := rk.asker.Ask(ctx, q)
	switch {
	case err != nil:
		return 0, nil, err
	case reply.Refusal != msg.Granted:
		return 0, nil, engine.ErrRankGone
	}
	defer closeBody(resp)
	answer, err = io.ReadAll(io.LimitReader(resp.Body, transfer.MaxAnswer+1))
	return resp.StatusCode, answer, err
}

// engineSaid is an engine's error as a text of one line.
func engineSaid(status int, answer []byte) error {
	e := openai.ParseError(answer)
	return fmt.Errorf("the engine answered %d: %s", status, cmp.Or(clipped([]byte(e.Message)),
		http.StatusText(status)))
}

// findPeer learns what the transfer must know of the prefill rank.
func (s legRunner) findPeer(ctx context.Context) error {
	known, spec, id := s.pair.backend.peers, s.pair.prefillSpec.app, s.rank.ID
	if _, ok := known.get(s.rank.ref()); ok {
		return nil
	}
	peer, err := transfer.Peer{}, error(nil)
	b, hasServer := s.pair.transfer.(transfer.Bootstrapper)
	switch {
	case hasServer:
		address, number, fault := engine.BootstrapServer(s.req.in.store.State(), spec, id.Group(), id.Rank())
		if err = fault; err == nil {
			peer, err = transfer.AskPeer(ctx, s.req.in.pairs.bootstrap, b, address, number)
		}
	case s.pair.traits.Order == dispatch.PrefillFirst:
		return nil // its answers say all
	default:
		var isKnown bool
		if peer, isKnown, err = transfer.PeerOfFile(spec, id.Group(), id.Rank()); !isKnown && err == nil {
			peer, err = s.learnPeer(ctx)
		}
	}
	if err == nil {
		known.set(s.rank.ref(), peer)
	}
	return err
}

// learnPeer takes the data of a pushing engine from the answer to a prompt of its own.
func (s legRunner) learnPeer(ctx context.Context) (peer transfer.Peer, err error) {
	pull, _ := transfer.Named(transfer.NixlName) // its prefill leg is the same, and needs nothing
	fields, err := pull.Begin(&s.body, hex16(rand.Uint64()), peer, rand.Uint64N)
	if err != nil {
		return peer, err
	}
	status, answer, err := askWhole(ctx, s.rank, &rankleg.Request{
		Rank: s.rank.Rank, Route: openai.Completions, Header: s.ownHeader(dispatch.Prefill, nil),
		Body: fields.AppendPrefill(nil, &s.body), IsHeld: true, Guard: &rankleg.Guard{},
	})
	switch {
	case err != nil:
		return peer, err
	case status != http.StatusOK:
		return peer, engineSaid(status, answer)
	}
	a, _ := transfer.ReadPrefill(pull, &s.body, answer)
	peer, ok := transfer.PeerOfAnswer(a.Params)
	if !ok {
		return peer, errors.New("its answer does not name its engine: is it started for transfer nixl-push?")
	}
	return peer, nil
}

// resetPrefixCache asks a rank's engine to drop its prefix cache.
func resetPrefixCache(ctx context.Context, rk *rank) error {
	status, answer, err := askWhole(ctx, rk, &rankleg.Request{
		Rank: rk.Rank, Reset: true, Header: http.Header{"User-Agent": nil},
	})
	switch {
	case err != nil:
		return err
	case status == http.StatusNotFound, status == http.StatusMethodNotAllowed:
		return pdproxy.ErrNoReset
	case status != http.StatusOK:
		return engineSaid(status, answer)
	}
	var said struct {
		Success *bool `json:"success"`
	}
	if json.Unmarshal(answer, &said) == nil && said.Success != nil && !*said.Success {
		return errors.New("the engine's blocks are in use")
	}
	return nil
}
