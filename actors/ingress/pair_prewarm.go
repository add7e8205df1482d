package ingress

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/pdproxy"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

// prewarm is one prompt of a block on its way through a pair, so that the engines have met before a client's
// request depends on it. Its prompt is new each time: what a decode rank already holds would not be moved.
type prewarm struct {
	pair    *pairApp
	prefill *rank
	decode  *rank
	q       transfer.Request
	fields  transfer.Attempt
	header  http.Header
}

var errRankGone = errors.New("the rank serves no longer")

// Prewarm implements pdproxy.Backend.
func (b *pairBackend) Prewarm(ctx context.Context, prefill, decode routing.RankRef) error {
	p := b.current.Load()
	w := &prewarm{pair: p, prefill: p.prefill.findRef(prefill), decode: p.decode.findRef(decode)}
	if w.prefill == nil || w.decode == nil {
		return errRankGone
	}
	id := hex16(mix(b.in.requestID())) + hex16(rand.Uint64()) + hex16(rand.Uint64())
	body, err := json.Marshal(map[string]any{
		"model": p.decode.modelID(), "prompt": "dpserve " + id, "max_tokens": 1, "temperature": 0,
	})
	if err != nil {
		return err
	}
	if err := w.q.Scan(p.transfer, transfer.Completions, body); err != nil {
		return err
	}
	peer, err := w.findPeer(ctx)
	if err != nil {
		return err
	}
	if w.fields, err = p.transfer.Begin(&w.q, id, peer, rand.Uint64N); err != nil {
		return err
	}
	w.header = http.Header{
		"Content-Type": {"application/json"}, "X-Request-Id": {p.traits.RequestID(&w.fields, id)},
		"User-Agent": nil,
	}
	if p.config.Order == dispatch.PrefillFirst {
		return w.oneByOne(ctx)
	}
	return w.together(ctx)
}

// oneByOne sends the prefill leg, then the decode leg with its parameters.
func (w *prewarm) oneByOne(ctx context.Context) error {
	began := time.Now()
	a, err := w.askPrefill(ctx, &w.fields)
	if err != nil {
		return err
	}
	source := paramsSource(w.prefill)
	params, err := transfer.NewParams(a.Params, source, began, w.pair.config.Lease).Take(time.Now(), source)
	if err != nil {
		return fmt.Errorf("prefill rank: %w", err)
	}
	return w.askDecode(ctx, params)
}

// together sends both legs at once. The first failure ends the other leg: engines wait long for each other.
func (w *prewarm) together(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	decoded := make(chan error, 1)
	go func() { // ends with ctx
		err := w.askDecode(ctx, nil)
		if err != nil {
			cancel(err)
		}
		decoded <- err
	}()
	_, err := w.askPrefill(ctx, &w.fields)
	if err != nil {
		cancel(err)
	}
	return errors.Join(<-decoded, err)
}

func (w *prewarm) askPrefill(ctx context.Context, fields *transfer.Attempt) (transfer.Answer, error) {
	status, answer, err := w.ask(ctx, w.prefill, fields.AppendPrefill(nil, &w.q))
	if err != nil {
		return transfer.Answer{}, fmt.Errorf("prefill rank: %w", err)
	}
	if status != http.StatusOK {
		return transfer.Answer{}, fmt.Errorf("prefill rank: %w", engineSaid(status, answer))
	}
	a, failed := transfer.ReadPrefill(w.pair.transfer, &w.q, answer)
	if failed != transfer.NoFailure {
		return a, fmt.Errorf("prefill rank: its answer cannot be used (%s): is its engine started for "+
			"transfer %s?", failed, w.pair.traits.Name)
	}
	return a, nil
}

func (w *prewarm) askDecode(ctx context.Context, params []byte) error {
	status, answer, err := w.ask(ctx, w.decode, w.fields.AppendDecode(nil, &w.q, params))
	if err == nil && status != http.StatusOK {
		err = engineSaid(status, answer)
	}
	if err != nil {
		return fmt.Errorf("decode rank: %w", err)
	}
	return nil
}

// ask sends a leg, without a ticket, and reads its whole answer.
func (w *prewarm) ask(ctx context.Context, rk *rank, body []byte) (status int, answer []byte, err error) {
	return askWhole(ctx, rk, &rankleg.Request{
		Rank: rk.Rank, Route: openai.Completions, Header: w.headerFor(rk), Body: body, IsHeld: true,
		Guard: &rankleg.Guard{},
	})
}

// headerFor is the header of a leg, with the key that the rank's engine asks for. Clients bring their own.
func (w *prewarm) headerFor(rk *rank) http.Header {
	spec := w.pair.decodeSpec
	if rk == w.prefill {
		spec = w.pair.prefillSpec
	}
	key := engine.APIKey(spec.app)
	if key == "" {
		return w.header
	}
	h := w.header.Clone()
	h.Set("Authorization", "Bearer "+key)
	return h
}

// askWhole asks a rank's engine and reads its whole answer.
func askWhole(ctx context.Context, rk *rank, q *rankleg.Request) (status int, answer []byte, err error) {
	resp, reply, err := rk.asker.Ask(ctx, q)
	switch {
	case err != nil:
		return 0, nil, err
	case reply.Refusal != msg.Granted:
		return 0, nil, errRankGone
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

// findPeer is what the transfer must know of the prefill rank.
func (w *prewarm) findPeer(ctx context.Context) (transfer.Peer, error) {
	known := w.pair.backend.peers
	if peer, ok := known.get(w.prefill.ref()); ok {
		return peer, nil
	}
	var peer transfer.Peer
	var err error
	switch b := w.pair.transfer.(type) {
	case transfer.Bootstrapper:
		peer, err = w.askBootstrap(ctx, b)
	default:
		if w.pair.traits.Order == dispatch.PrefillFirst {
			return peer, nil // its answers say all
		}
		peer, err = w.learnPeer(ctx)
	}
	if err != nil {
		return peer, fmt.Errorf("prefill rank: %w", err)
	}
	known.set(w.prefill.ref(), peer)
	return peer, nil
}

// learnPeer takes the data of a pushing engine from the file, or from the answer to a prompt of its own.
func (w *prewarm) learnPeer(ctx context.Context) (transfer.Peer, error) {
	if pd := w.attached(); pd.EngineID != "" && pd.SideChannel != "" {
		host, text, err := net.SplitHostPort(pd.SideChannel)
		if err != nil {
			return transfer.Peer{}, fmt.Errorf("side_channel: %w", err)
		}
		port, err := strconv.Atoi(text)
		if err != nil {
			return transfer.Peer{}, fmt.Errorf("side_channel: %w", err)
		}
		return transfer.Peer{
			EngineID: pd.EngineID, Host: host, Port: port, TPSize: max(pd.TPSize, 1), PPSize: 1,
		}, nil
	}
	pull, _ := transfer.Named(transfer.NixlName) // its prefill leg is the same, and needs nothing
	fields, err := pull.Begin(&w.q, hex16(rand.Uint64()), transfer.Peer{}, rand.Uint64N)
	if err != nil {
		return transfer.Peer{}, err
	}
	w.header = http.Header{"Content-Type": {"application/json"}, "User-Agent": nil}
	a, err := w.askPrefill(ctx, &fields)
	if err != nil {
		return transfer.Peer{}, err
	}
	peer, ok := transfer.PeerOfAnswer(a.Params)
	if !ok {
		return peer, errors.New("its answer does not name its engine: is it started for transfer nixl-push?")
	}
	return peer, nil
}

// attached is what the file says of the prefill rank's engine.
func (w *prewarm) attached() (pd app.AttachPD) {
	if r := w.pair.prefillSpec.app.Engine.Rank(w.prefill.ID.Group(), w.prefill.ID.Rank()); r != nil &&
		r.PD != nil {
		return *r.PD
	}
	return pd
}

// engineRank is the number of the prefill rank among those of its bootstrap server: what its address selects,
// or its place among the ranks with that server.
func (w *prewarm) engineRank() int {
	spec := &w.pair.prefillSpec.app.Engine
	r := spec.Rank(w.prefill.ID.Group(), w.prefill.ID.Rank())
	switch {
	case r == nil && w.pair.prefillSpec.app.DataParallel.Coupling != app.Lockstep:
		return 0 // dpserve has started it, alone in its group
	case r == nil || r.PD == nil:
		return w.prefill.ID.Rank()
	case r.Addressing == app.AddressHeader || r.Addressing == app.AddressBody:
		return r.Selector
	}
	place := 0
	for i := range spec.Ranks {
		other := &spec.Ranks[i]
		if other == r {
			break
		}
		if other.PD != nil && other.PD.Bootstrap == r.PD.Bootstrap {
			place++
		}
	}
	return place
}

// askBootstrap asks the bootstrap server of the prefill rank.
func (w *prewarm) askBootstrap(ctx context.Context, b transfer.Bootstrapper) (peer transfer.Peer, err error) {
	address := w.attached().Bootstrap
	if address == "" {
		address, err = bootstrapURL(w.pair.in.store.State(), w.pair.prefillSpec.app, w.prefill.ID.Group(),
			w.prefill.ID.Rank())
		if err != nil {
			return peer, err
		}
	}
	q, err := b.Query(address)
	if err != nil {
		return peer, err
	}
	ctx, cancel := context.WithTimeout(ctx, q.Timeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, q.Method, q.URL, http.NoBody)
	if err != nil {
		return peer, err
	}
	resp, err := w.pair.in.pairs.bootstrap.Do(r)
	if err != nil {
		return peer, fmt.Errorf("bootstrap server: %w", err)
	}
	defer closeBody(resp)
	answer, err := io.ReadAll(io.LimitReader(resp.Body, transfer.MaxAnswer))
	if err != nil {
		return peer, fmt.Errorf("bootstrap server: %w", err)
	}
	return b.ReadPeer(address, w.engineRank(), resp.StatusCode, answer)
}

// bootstrapURL is where the bootstrap server of a prefill rank listens that dpserve has started: at a port of
// its unit's block, on its node. SGLang has one server for all ranks of a lockstep group, on the node of rank
// 0.
func bootstrapURL(st *state.State, a *app.Application, group, rank int) (string, error) {
	if a.Engine.Kind == app.KindAttach {
		return "", nil // the file names none, which the query reports
	}
	if a.Disaggregation.Transfer == app.TransferSGLang && a.DataParallel.Coupling == app.Lockstep {
		rank = 0
	}
	for _, u := range st.Units {
		if u.App != a.Name || u.Group != group {
			continue
		}
		r := slices.IndexFunc(u.Ranks, func(r state.RankGrant) bool { return r.Rank == rank })
		if r < 0 {
			continue
		}
		node := u.Ranks[r].Node
		b := slices.IndexFunc(u.Blocks, func(b state.Block) bool { return b.Node == node })
		if b < 0 {
			break
		}
		host := engine.Loopback
		if n := st.Nodes[node]; n != nil {
			host = cmp.Or(n.Advertise, host)
		}
		port := engine.BootstrapPort(a, u.Blocks[b].Base, rank)
		return "http://" + net.JoinHostPort(host, strconv.Itoa(port)), nil
	}
	return "", errRankGone
}

// newBootstrapClient makes the client for bootstrap servers. They are asked once per start of a prefill rank,
// so it keeps no connection. dial nil is TCP.
func newBootstrapClient(dial Dialer) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext: dial, DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
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
