package sim

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/pause"
)

// maxRooms bounds the rooms that an engine remembers.
const maxRooms = 1 << 16

// rooms are the numbers under which SGLang's engines meet, each used once. Safe for concurrent use.
type rooms struct {
	mu    sync.Mutex
	used  map[uint64]struct{}
	order []uint64
}

// enter reports whether nobody used the room before.
func (r *rooms) enter(room uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, isUsed := r.used[room]; isUsed {
		return false
	}
	if r.used == nil {
		r.used = map[uint64]struct{}{}
	}
	if len(r.order) == maxRooms {
		delete(r.used, r.order[0])
		r.order = r.order[1:]
	}
	r.used[room] = struct{}{}
	r.order = append(r.order, room)
	return true
}

// roomKey is a room as a key of offers.
func roomKey(room uint64) string { return "room " + strconv.FormatUint(room, 10) }

// Error texts of SGLang that callers tell apart.
const (
	msgNoRoom   = "Disaggregated request received without bootstrap room id"
	msgNoRoute  = "Could not fetch bootstrap info"
	msgLostPeer = "Decode transfer failed for request: KVTransferError: Lost connection with prefill " +
		"instance"
	msgNoKV = "Decode transfer failed for request: Failed to get kvcache from prefill instance, " +
		"it might be dead"
	msgNoDecode  = "Prefill bootstrap failed for request: timed out"
	msgOtherRank = "follow_bootstrap_room conflict: dispatched to dp_rank %d, but room %d is of " +
		"dp_rank %d. Set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1"
	fakeBootstrap = "2.2.2.2" // bootstrap_host of health checks: nothing is moved
)

// meeting is where a request of SGLang's disaggregation meets its other half. One host, port and room per
// prompt.
type meeting struct {
	hosts   []string
	ports   []int
	rooms   []uint64
	prefill int // rank of the prefill engine; -1 = not said
}

// readMeeting reads the fields of a body; a request without a room is refused.
func readMeeting(p *plan, f *fields) *apiError {
	if !f.has("bootstrap_room") {
		return badRequest("", msgNoRoom)
	}
	m := &meeting{prefill: f.numOr("disagg_prefill_dp_rank", -1)}
	m.rooms = oneOrMany[uint64](f, "bootstrap_room")
	m.hosts = oneOrMany[string](f, "bootstrap_host")
	m.ports = oneOrMany[int](f, "bootstrap_port")
	p.rank = f.numOr("routed_dp_rank", p.rank)
	if f.fault != nil {
		return f.fault
	}
	if n := len(p.prompts); len(m.rooms) != n || len(m.hosts) > n || len(m.ports) > n || len(m.hosts) == 0 {
		return badRequest("", "bootstrap_host, bootstrap_port and bootstrap_room need one value per prompt")
	}
	for _, room := range m.rooms {
		if room > 1<<63-1 {
			return badRequest("", "bootstrap_room %d is out of range", room)
		}
	}
	p.meeting = m
	return nil
}

// oneOrMany is a value or a list of values.
func oneOrMany[T any](f *fields, name string) []T {
	if !f.has(name) {
		return nil
	}
	var many []T
	if f.members[name][0] == '[' {
		f.read(name, &many)
		return many
	}
	var one T
	f.read(name, &one)
	return []T{one}
}

func nth[T any](list []T, i int) (v T) {
	if len(list) == 0 {
		return v
	}
	return list[min(i, len(list)-1)]
}

// assignRank is the rank for a prefill leg: the room decides where nobody pins one.
func (m *meeting) assignRank(p *plan, cfg *Config) *apiError {
	own := p.rank
	if cfg.ranks() == 1 { // its port serves no other rank, whatever the body names
		own, p.rank = cfg.DPRank, noRank
	}
	if cfg.Transfer.Role != RoleProducer {
		return nil
	}
	room := m.rooms[0]
	of := int(room % uint64(cfg.transferRanks())) //nolint:gosec // both are small and not negative
	switch {
	case own == noRank:
		p.rank = of
	case own != of && m.prefill < 0:
		return internalError(fmt.Sprintf(msgOtherRank, own, room, of))
	}
	return nil
}

// meet lays out the two halves of SGLang's transfer. A room that was used before ends the engine.
func (l *legs) meet() {
	m, isPrefill := l.call.plan.meeting, l.ex.cfg.Transfer.Role == RoleProducer
	for i := range l.call.choices {
		ch := &l.call.choices[i]
		at := i / l.call.plan.n
		if nth(m.hosts, at) == fakeBootstrap {
			continue
		}
		room := nth(m.rooms, at)
		if !l.ex.rooms.enter(room) {
			l.ex.kill(fmt.Sprintf("room %d is used twice", room))
			return
		}
		if isPrefill {
			ch.offer, ch.req.Lease = roomKey(room), ch.engineName()+"-"+randomSuffix()
			ch.req.Output, ch.req.Ending = 1, em.FinishLength // it computes the prompt and one token
			ch.setText(min(1, ch.textTokens))
			continue
		}
		ch.req.Remote = true
		ch.load = &load{
			ex: l.ex, req: &ch.req, name: ch.engineName(), need: make(chan int, 1),
			room: room, prefill: m.prefill, bootstrap: hostPort(nth(m.hosts, at), nth(m.ports, at)),
		}
		l.loads = append(l.loads, ch.load)
	}
}

// awaitDecode waits until the decode engine of each room is there: a prefill leg does not begin before.
func (l *legs) awaitDecode(ctx context.Context) *apiError {
	if l == nil || l.call.plan.meeting == nil || l.ex.cfg.Transfer.Role != RoleProducer {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, sglangWait)
	defer cancel()
	for i := range l.call.choices {
		key := l.call.choices[i].offer
		if key == "" {
			continue
		}
		select {
		case <-l.ex.offers.expect(key).joined:
		case <-l.ex.side.quit:
			return internalError(msgEngineDead)
		case <-ctx.Done():
			l.ex.offers.forget(key)
			return internalError(msgNoDecode)
		}
	}
	return nil
}

// awaitRoom asks the bootstrap server where the prefill rank is, and registers there.
func (l *load) awaitRoom(ctx context.Context, need int) ([]em.BlockKV, float64, error) {
	info, err := l.route(ctx, -1)
	if err != nil {
		l.text = msgNoRoute
		return nil, 0, err
	}
	if info.PageSize != l.ex.cfg.Model.BlockSize {
		l.text = fmt.Sprintf("page size mismatch: prefill %d, decode %d", info.PageSize,
			l.ex.cfg.Model.BlockSize)
		return nil, 0, errIncompatible
	}
	rank := l.prefill
	if rank < 0 && info.DPSize > 0 {
		rank = int(l.room % uint64(info.DPSize)) //nolint:gosec // below the size
	}
	if info, err = l.route(ctx, rank); err != nil {
		l.text = msgNoRoute
		return nil, 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, sglangWait)
	defer cancel()
	kv, took, err := l.ex.peers.read(ctx, hostPort(info.RankIP, info.RankPort), &sideMessage{
		Op: sideRegister, Request: roomKey(l.room), Count: need,
	})
	switch {
	case err == nil:
	case errors.Is(err, errRefused):
		l.text = msgNoKV
	case ctx.Err() == nil: // the connection is gone; the real engine finds out by missing heartbeats
		l.text = msgLostPeer + " (bootstrap_addr: " + l.bootstrap + ")"
		_ = pause.For(ctx, l.ex.cfg.scaled(sglangMissing))
	default:
		l.text = msgNoKV
	}
	return kv, took, err
}

// route asks the bootstrap server for a prefill rank, -1 = for the group. Its time is bounded.
func (l *load) route(ctx context.Context, rank int) (info routeInfo, err error) {
	ctx, cancel := context.WithTimeout(ctx, l.ex.cfg.Transfer.HandshakeMax)
	defer cancel()
	at := strconv.Itoa(rank)
	err = askBootstrap(ctx, l.ex.cfg, http.MethodGet, "http://"+l.bootstrap+"/route?prefill_dp_rank="+at+
		"&prefill_cp_rank="+at+"&target_tp_rank="+at+"&target_pp_rank="+at, nil, &info)
	return info, err
}

// awaitMooncake asks the bootstrap server for the engine's workers, and registers at the one of the engine
// that the parameters name.
func (l *load) awaitMooncake(ctx context.Context, need int) ([]em.BlockKV, float64, error) {
	p := l.params
	name, bad := p.lacks([]string{"transfer_id", "remote_engine_id", "remote_bootstrap_addr"})
	if bad {
		return nil, 0, because(errNeverComes, "parameters without "+name)
	}
	engine := p.text("remote_engine_id")
	addr, err := l.ex.peers.query(ctx, p.text("remote_bootstrap_addr"), engine)
	if err != nil {
		return nil, 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, mooncakeLease+mooncakeMargin)
	defer cancel()
	kv, took, err := l.ex.peers.read(ctx, addr, &sideMessage{
		Op: sideRegister, Engine: engine, Request: p.text("transfer_id"), Count: need,
	})
	if err != nil && !errors.Is(err, errRefused) {
		<-ctx.Done() // a dead prefill engine is not noticed
	}
	return kv, took, err
}

// Mooncake's questions to a bootstrap server.
const (
	mooncakeTries   = 3
	mooncakeTimeout = 30 * time.Second
)

// query finds the side channel of an engine by the bootstrap server at base.
func (p *peers) query(ctx context.Context, base, engine string) (addr string, err error) {
	for range mooncakeTries {
		var ranks map[string]queryEntry
		try, cancel := context.WithTimeout(ctx, mooncakeTimeout)
		err = askBootstrap(try, p.cfg, http.MethodGet, base+"/query", nil, &ranks)
		cancel()
		if err != nil {
			continue
		}
		for _, r := range ranks {
			if r.EngineID == engine {
				return trimTCP(r.Workers["0"]["0"]), nil
			}
		}
		return "", fmt.Errorf("%w: no engine %s at %s", errOtherEngine, engine, base)
	}
	return "", err
}
