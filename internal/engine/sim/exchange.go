package sim

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// exchange is the part of a rank that moves blocks from and to other engines. It exists if a connector is
// configured, whatever its role: the real engines' pull connector does not tell roles apart either.
type exchange struct {
	cfg    *Config
	rank   *rank
	faults *faults
	log    *slog.Logger
	id     string // of this engine, in parameters and handshakes
	number int    // of the rank
	peers  *peers
	side   *sideServer // nil before Listen

	mu     sync.Mutex
	sender time.Time // until then earlier transfers use the bandwidth
	meters transferMeters
}

func newExchange(s *Server, r *rank, number int) *exchange {
	id := s.cfg.Transfer.EngineID
	if id == "" {
		id = randomEngineID()
	}
	if s.cfg.DPSize > 1 || s.cfg.InternalLB > 1 {
		id += "_dp" + strconv.Itoa(number)
	}
	return &exchange{
		cfg: &s.cfg, rank: r, faults: &s.faults, log: s.log, id: id, number: number,
		peers: newPeers(&s.cfg), meters: transferMeters{h: newHistograms(transferTable)},
	}
}

// randomEngineID is a UUID of version 4.
func randomEngineID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// randomSuffix are the 8 hex digits by which the engine makes request ids its own.
func randomSuffix() string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

func (e *exchange) open(ctx context.Context) (err error) {
	e.side, err = openSide(ctx, e)
	return err
}

func (e *exchange) close() {
	if e.side != nil {
		e.side.close()
	}
}

// reserve books a transfer behind the earlier ones and returns when it is over, from now.
func (e *exchange) reserve(now time.Time, blocks int) time.Duration {
	d := e.cfg.transferTime(blocks)
	if f := e.faults.hit(ModeTransferSlow); f != nil {
		d = time.Duration(float64(d) * f.slowFactor())
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.sender.Before(now) {
		e.sender = now
	}
	e.sender = e.sender.Add(d)
	return e.sender.Sub(now)
}

// expired is called by the rank in its turn.
func (e *exchange) expired(lease string) {
	e.log.Warn("releasing expired KV blocks which nobody read before the lease expired", "request", lease)
}

// kill ends the engine core, as a malformed transfer ends that of a real engine.
func (e *exchange) kill(cause string) {
	e.log.Error("engine core died", "cause", cause)
	e.rank.submit(em.Input{Kind: em.InputKill})
}

// received books a transfer that came.
func (e *exchange) received(blocks int, seconds float64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	bytes := float64(e.cfg.transferBytes(blocks))
	for k, x := range [...]float64{seconds, postSeconds, bytes, float64(blocks)} {
		e.meters.h[k].observe(x)
	}
}

// failed books a transfer, a handshake (as a transfer) or a notification that failed.
func (e *exchange) failed(isNote bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.meters.failed++
	if isNote {
		e.meters.failedNotes++
	}
}

// postSeconds is what the real engines need to hand in a transfer.
const postSeconds = 0.0005

// transferMeters count on the side that reads; what the side that is read counts is in em.Stats.
type transferMeters struct {
	h                   []histogram // by transferTable
	failed, failedNotes uint64
}

// transferTable are the histograms of the imitated connector.
var transferTable = []histogramSpec{
	{
		"nixl_xfer_time_seconds", "Time of a transfer in seconds.",
		[]float64{0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5},
	},
	{
		"nixl_post_time_seconds", "Time to hand in a transfer in seconds.",
		[]float64{0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1},
	},
	{
		"nixl_bytes_transferred", "Bytes per transfer.",
		[]float64{
			1 << 11, 1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25, 1 << 27, 1 << 29, 1 << 31,
			1 << 33,
		},
	},
	{
		"nixl_num_descriptors", "Pieces of memory per transfer.",
		[]float64{10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000},
	},
}

func (e *exchange) snapshot() *transferMeters {
	if e == nil {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	out := e.meters
	out.h = copied(out.h)
	return &out
}

// transfer writes the series of a connector.
func (g *page) transfer(snaps []snapshot) {
	if snaps[0].transfer == nil {
		return
	}
	g.histograms(snaps, transferTable, func(s *snapshot) []histogram { return s.transfer.h })
	count := func(name, help string, of func(*snapshot) uint64) {
		samples := make([]sample, len(snaps))
		for i := range snaps {
			samples[i] = sample{engine: snaps[i].engine, value: float64(of(&snaps[i]))}
		}
		g.counter(name, help, samples...)
	}
	count("nixl_num_failed_transfers", "Transfers, handshakes and notifications that failed.",
		func(s *snapshot) uint64 { return s.transfer.failed })
	count("nixl_num_failed_notifications", "Notifications that failed.",
		func(s *snapshot) uint64 { return s.transfer.failedNotes })
	count("nixl_num_kv_expired_reqs", "Requests whose kept blocks were not read in time.",
		func(s *snapshot) uint64 { return s.stats.LeasesOver })
	count("nixl_num_notifications_after_expiry", "Notices of readers whose blocks were no longer kept.",
		func(s *snapshot) uint64 { return s.stats.LateReads })
}
