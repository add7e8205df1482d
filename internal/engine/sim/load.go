package sim

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/pause"
)

// legs are the transfers of one call: what its prefill leg leaves behind, what its decode leg loads. The nil
// legs are those of a call without parameters.
type legs struct {
	ex     *exchange
	call   *call
	params *legParams
	loads  []*load
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// prepareLegs reads what the parameters of a call want of this engine.
func prepareLegs(ex *exchange, c *call) *legs {
	p := c.plan.params
	if ex == nil || !p.wantsLease() && !p.wantsBlocks() {
		return nil
	}
	l := &legs{ex: ex, call: c, params: p}
	suffix := ""
	for i := range c.choices {
		if i%c.plan.n == 0 {
			suffix = randomSuffix()
		}
		ch := &c.choices[i]
		name := ch.engineName()
		if p.wantsLease() && ex.faults.hit(ModeTransferNull) == nil {
			ch.req.Lease = name + "-" + suffix // its blocks are kept
		}
		if p.wantsBlocks() && c.plan.promptLogprobs < 0 {
			ch.req.Remote = true
			ch.load = &load{ex: ex, req: &ch.req, params: p, name: name, need: make(chan int, 1)}
			l.loads = append(l.loads, ch.load)
		}
	}
	return l
}

// start runs the loads beside the handler; end ends them.
func (l *legs) start(ctx context.Context) {
	if l == nil {
		return
	}
	if len(l.loads) == 0 && l.params.wantsBlocks() { // prompt_logprobs needs every token: nothing is read
		l.ex.release(ctx, l.params)
	}
	ctx, l.cancel = context.WithCancel(ctx)
	for _, one := range l.loads {
		l.wg.Go(func() { one.run(ctx) })
	}
}

// end cancels what is still under way, and waits until the prefill engine was told.
func (l *legs) end() {
	if l == nil || l.cancel == nil {
		return
	}
	l.cancel()
	l.wg.Wait()
}

// answer is kv_transfer_params of the answer: those of the first prompt's last sequence.
func (l *legs) answer() any {
	if l == nil {
		return jsonNull
	}
	ch := &l.call.choices[l.call.plan.n-1]
	if len(ch.kept) == 0 {
		return jsonNull
	}
	cfg := l.ex.cfg
	return &pullAnswer{
		RemotePrefill: true, Blocks: [][]int32{ch.kept}, Engine: l.ex.id, Request: ch.req.Lease,
		Host: cfg.sideHost(), Port: l.ex.side.port(), TP: cfg.TensorParallel, DCP: 1, PP: 1,
		Tokens: ch.req.Computed(), Mode: "pull", Cached: ch.req.Cached(),
	}
}

// cached is what usage tells for a decode leg in the place of the engine's own number: that of the prefill
// engine.
func (l *legs) cached(own int) int {
	if l == nil || !l.params.wantsBlocks() {
		return own
	}
	if n := l.params.number("remote_prefill_cached_tokens"); n >= 0 {
		return n
	}
	return own
}

// release tells a prefill engine that nobody will read the blocks of these parameters.
func (e *exchange) release(ctx context.Context, p *legParams) {
	if e == nil || p == nil || !p.wantsBlocks() || p.text("remote_request_id") == "" {
		return
	}
	engine := p.text("remote_engine_id")
	addr := e.peers.address(engine)
	if addr == "" {
		addr = p.address()
	}
	note := &sideMessage{Op: sideFree, Engine: engine, Request: p.text("remote_request_id")}
	if err := e.peers.tell(context.WithoutCancel(ctx), addr, note); err != nil {
		e.failed(true)
	}
}

// load brings the KV of one prompt. It runs beside the handler of its request and ends before it does.
type load struct {
	ex     *exchange
	req    *em.Request
	params *legParams
	name   string   // of the request inside the engine, without its suffix
	need   chan int // the engine says how many blocks it wants; one slot, used once

	text string // of the error that a failed load ends its request with; written before the engine is told
}

// begin is called by the rank in its turn.
func (l *load) begin(blocks int) {
	select {
	case l.need <- blocks:
	default:
	}
}

// How a load ends that brings nothing.
var (
	errKillsEngine = errors.New("the engine core ends by it")
	errNeverComes  = errors.New("the blocks never come")
)

// run waits for the engine's turn, loads, and hands the result in. If the client leaves before, the prefill
// engine is told at once.
func (l *load) run(ctx context.Context) {
	stop := l.heartbeats(ctx)
	defer stop()
	var need int
	select {
	case need = <-l.need:
	case <-ctx.Done():
		select {
		case need = <-l.need:
		default:
			l.abandon(ctx)
			return
		}
	}
	kv, took, err := l.fetch(ctx, need)
	switch {
	case err == nil:
		l.ex.received(need, took)
		l.ex.rank.submit(em.Input{Kind: em.InputLoaded, Req: l.req, KV: kv})
	case errors.Is(err, errKillsEngine):
		l.ex.kill(err.Error())
	case errors.Is(err, errNeverComes):
		l.ex.log.Warn("the blocks of a request never come", "request", l.name, "cause", err.Error())
		<-ctx.Done()
		l.abandon(ctx)
	case ctx.Err() != nil:
		l.abandon(ctx)
	default:
		l.ex.failed(false)
		l.text = cmp.Or(l.text, msgInternal)
		l.ex.log.Error("kv transfer failed", "request", l.name, "error", err.Error())
		l.ex.rank.submit(em.Input{Kind: em.InputLoadFailed, Req: l.req})
	}
}

// abandon is for a client that left, or a request that the engine refused.
func (l *load) abandon(ctx context.Context) {
	if name, bad := l.params.lacks(pullKeys()); bad && l.params.isTrue("remote_block_ids") {
		l.ex.kill("KeyError: " + name)
		return
	}
	l.ex.release(ctx, l.params)
}

// fetch is one transfer.
func (l *load) fetch(ctx context.Context, need int) ([]em.BlockKV, float64, error) {
	if l.ex.faults.hit(ModeTransferFail) != nil {
		return nil, 0, errors.New(msgInjected)
	}
	return l.pull(ctx, need)
}

// pull is NIXL's reading: the block numbers of the parameters, at the engine that they name.
func (l *load) pull(ctx context.Context, need int) ([]em.BlockKV, float64, error) {
	ctx, stop := outlasting(ctx, readGrace)
	defer stop()
	p := l.params
	if !p.isTrue("remote_block_ids") {
		return nil, 0, because(errKillsEngine, "AssertionError: parameters without remote_block_ids")
	}
	if name, bad := p.lacks(pullKeys()); bad {
		return nil, 0, because(errNeverComes, "parameters without "+name)
	}
	engine := p.text("remote_engine_id")
	addr, err := l.ex.peers.reach(ctx, engine, p.address())
	if err != nil {
		return nil, 0, err
	}
	blocks, ok := p.blocks()
	if !ok || len(blocks) < need {
		return nil, 0, because(errKillsEngine,
			"AssertionError: remote_block_ids have another form or are too few")
	}
	// too many are not noticed: the last ones are read
	return l.ex.peers.read(ctx, addr, &sideMessage{
		Op: sideRead, Engine: engine, Request: p.text("remote_request_id"), Blocks: blocks[len(blocks)-need:],
	})
}

// readGrace bounds how long a read goes on whose client has left.
const readGrace = time.Second

// outlasting ends later than ctx. NIXL finishes a read that has begun, and the prefill engine hears of it
// once. A read that is broken off may have been answered: the prefill engine would be told a second time that
// nobody wants the blocks.
func outlasting(ctx context.Context, grace time.Duration) (longer context.Context, stop func()) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	forget := context.AfterFunc(ctx, func() { time.AfterFunc(grace, cancel) })
	return longer, func() { forget(); cancel() }
}

func because(kind error, cause string) error { return fmt.Errorf("%w: %s", kind, cause) }

// heartbeats tell a known prefill engine that the request still waits; the result stops them. There are none
// before the two engines have met.
func (l *load) heartbeats(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		every := max(time.Millisecond, l.ex.cfg.Transfer.lease()/em.HeartbeatsPerLease)
		engine := l.params.text("remote_engine_id")
		for pause.For(ctx, every) == nil {
			if addr := l.ex.peers.address(engine); addr != "" {
				_ = l.ex.peers.tell(ctx, addr, &sideMessage{ // the transfer itself finds a dead engine
					Op: sideBeat, Engine: engine, Request: l.params.text("remote_request_id"),
				})
			}
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// legParams are the kv_transfer_params of a request, member by member: like the real engines, nothing checks
// them before they are used. The zero value is a request without any.
type legParams struct {
	members map[string]json.RawMessage
}

// has reports whether a member is there, with whatever value.
func (p *legParams) has(name string) bool { _, ok := p.members[name]; return ok }

// isTrue reports whether Python takes the member for true.
func (p *legParams) isTrue(name string) bool {
	switch raw := bytes.TrimSpace(p.members[name]); string(raw) {
	case "", "null", "false", "0", "0.0", `""`, "[]", "{}":
		return false
	default:
		return true
	}
}

// wantsLease is a prefill leg, wantsBlocks a decode leg. Both at once is one and the other.
func (p *legParams) wantsLease() bool { return p.isTrue("do_remote_decode") }

func (p *legParams) wantsBlocks() bool { return p.isTrue("do_remote_prefill") }

// text is a member that is a string.
func (p *legParams) text(name string) string {
	var s string
	_ = json.Unmarshal(p.members[name], &s) // "" is what a wrong type is worth
	return s
}

// number is a member that is a whole number, in any spelling; -1 = it is none.
func (p *legParams) number(name string) int {
	n, err := strconv.Atoi(strings.Trim(string(bytes.TrimSpace(p.members[name])), `"`))
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// address is where the prefill engine's side channel is, as the parameters say.
func (p *legParams) address() string {
	return hostPort(p.text("remote_host"), max(0, p.number("remote_port")))
}

// blocks are the numbers of remote_block_ids; false = they have not the form [[…]] with numbers in it.
func (p *legParams) blocks() ([]int32, bool) {
	var groups [][]int32
	if err := json.Unmarshal(p.members["remote_block_ids"], &groups); err != nil || len(groups) == 0 {
		return nil, false
	}
	return groups[0], true
}

// promptIDs are the prompt's tokens as the prefill engine told them; nil = the text is tokenized.
func (p *legParams) promptIDs(f *fields) []uint32 {
	if !p.wantsBlocks() || !p.isTrue("prompt_token_ids") {
		return nil
	}
	got, ok := f.prompt(p.members["prompt_token_ids"])
	if !ok || !got.fromIDs {
		f.refuse("kv_transfer_params.prompt_token_ids", "want a list of token ids")
		return nil
	}
	return got.ids
}

// What NIXL's scheduler and workers need of a decode leg's parameters.
func pullKeys() []string {
	return []string{"remote_engine_id", "remote_request_id", "remote_host", "remote_port"}
}

// lacks is the first of names that is not there.
func (p *legParams) lacks(names []string) (string, bool) {
	for _, name := range names {
		if !p.has(name) {
			return name, true
		}
	}
	return "", false
}

// pullAnswer are the parameters that a prefill leg is answered with, in the order of the imitated engine.
type pullAnswer struct {
	RemotePrefill bool      `json:"do_remote_prefill"`
	RemoteDecode  bool      `json:"do_remote_decode"`
	Blocks        [][]int32 `json:"remote_block_ids"`
	Engine        string    `json:"remote_engine_id"`
	Request       string    `json:"remote_request_id"`
	Host          string    `json:"remote_host"`
	Port          int       `json:"remote_port"`
	TP            int       `json:"tp_size"`
	DCP           int       `json:"dcp_size"`
	PP            int       `json:"pp_size"`
	Tokens        int       `json:"remote_num_tokens"`
	Expiry        *int      `json:"remote_blocks_expiry_time"` // always null
	Mode          string    `json:"transfer_mode"`
	Cached        int       `json:"remote_prefill_cached_tokens"`
}
