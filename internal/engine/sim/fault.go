package sim

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/simflags"
)

// Mode names an injectable failure.
type Mode string

// The modes. Those of the first block act on the process or its core, those of the second on single requests,
// the others on blocks of other engines and on KV events.
const (
	ModeCrash         Mode = "crash"          // exit with ExitCode, sockets closed
	ModeKill          Mode = "kill"           // SIGKILL itself
	ModeOrphan        Mode = "orphan"         // SIGKILL itself, but a child keeps a port of the block
	ModeCoreDead      Mode = "core-dead"      // requests fail, exit 0 after 0.6 s
	ModeHang          Mode = "hang"           // no step ends, sockets stay open, /health stays 200
	ModeFreeze        Mode = "freeze"         // as after SIGSTOP: no step ends, and nothing is answered
	ModeSlow          Mode = "slow"           // steps take Factor times as long
	ModeRefuse        Mode = "refuse"         // connections are refused
	ModeHealth503     Mode = "health-503"     // GET /health answers 503
	ModeStopping      Mode = "stopping"       // answers of an engine that someone else stopped, /health 200
	ModeIgnoreSigterm Mode = "ignore-sigterm" // SIGTERM and SIGINT do nothing

	ModeHTTP500    Mode = "http-500"    // 500 on inference routes
	ModeHTTP503    Mode = "http-503"    // 503 on inference routes (scaling)
	ModeBusy       Mode = "busy"        // the admission limit: 503, for streams as first event
	ModeCut        Mode = "cut"         // connection reset after AfterTokens tokens
	ModeNoDone     Mode = "no-done"     // stream ends without [DONE], after AfterTokens tokens or at its end
	ModeErrorEvent Mode = "error-event" // error event and [DONE] after AfterTokens tokens, 0 = first event
	ModeAbort      Mode = "abort"       // finish_reason abort after AfterTokens tokens
	ModeBareDone   Mode = "bare-done"   // a stream of nothing but [DONE]
	ModeStall      Mode = "stall"       // this stream alone hangs after AfterTokens tokens

	ModeTransferFail  Mode = "transfer-fail"  // blocks are not read, or not given
	ModeTransferSlow  Mode = "transfer-slow"  // giving blocks takes Factor times as long
	ModeTransferMeet  Mode = "transfer-hang"  // handshakes get no answer
	ModeTransferNull  Mode = "transfer-null"  // prefill legs keep no blocks and answer without parameters
	ModeTransferLease Mode = "transfer-lease" // leases that begin from now on last LeaseS seconds

	// Where they strike single batches, rate and count limit them.
	ModeKVDrop      Mode = "kv-drop"      // batches are not sent; the replay ring has them
	ModeKVDuplicate Mode = "kv-duplicate" // batches are sent twice
	ModeKVReorder   Mode = "kv-reorder"   // a batch is sent behind its successor
	ModeKVGarbage   Mode = "kv-garbage"   // batches arrive damaged; the replay ring has them whole
	ModeKVUnknown   Mode = "kv-unknown"   // batches hold an event of an unknown type
	// as if the engine had begun anew in its place: cache empty, numbers from the first, connections cut
	ModeKVRestart Mode = "kv-restart"
	// put to sleep: cache empty without any event, the sleep state says so
	ModeKVSleep       Mode = "kv-sleep"
	ModeKVNoReplay    Mode = "kv-no-replay"    // replay requests get no answer
	ModeKVShortReplay Mode = "kv-short-replay" // the ring holds two batches
	ModeKVSlowReplay  Mode = "kv-slow-replay"  // answers come 3 s apart
)

// Defaults of a Fault.
const (
	defaultSlowFactor = 5.0
	defaultErrorCode  = 500
	defaultExitCode   = 1
	defaultLeaseS     = 1.0
)

// Fault is one injected failure, as POST /_sim/fail takes it.
type Fault struct {
	Mode Mode    `json:"mode"`
	ForS float64 `json:"for_s"` // seconds until it ends by itself; 0 = until /_sim/recover
	// request modes: how many requests it hits, KV modes: how many batches; 0 = all
	Count int `json:"count"`
	// KV modes that strike batches: the share of them, above 0 to 1 [1]
	Rate        float64 `json:"rate"`
	AfterTokens int     `json:"after_tokens"` // request modes: tokens (over all choices) before it strikes
	Factor      float64 `json:"factor"`       // slow [5]
	ExitCode    *int    `json:"exit_code"`    // crash [1]
	Code        int     `json:"code"`         // error-event [500]
	// orphan: the port it holds [the first KV port of the rank's block]
	Port   int     `json:"port"`
	LeaseS float64 `json:"lease_s"` // transfer-lease [1]
}

// setArgument takes the number behind the mode of a --sim-fail.
func (f *Fault) setArgument(v float64) {
	n := int(v)
	switch f.Mode {
	case ModeCrash:
		f.ExitCode = &n
	case ModeOrphan:
		f.Port = n
	case ModeErrorEvent:
		f.Code = n
	case ModeCut, ModeNoDone, ModeAbort, ModeStall:
		f.AfterTokens = n
	case ModeSlow, ModeTransferSlow:
		f.Factor = v
	case ModeTransferLease:
		f.LeaseS = v
	case ModeKVDrop, ModeKVDuplicate, ModeKVReorder, ModeKVGarbage, ModeKVUnknown:
		f.Rate = v
	default: // the others take none
	}
}

func (f *Fault) validate() error {
	switch {
	case f.ForS < 0 || f.ForS > 1e6 || f.Count < 0 || f.AfterTokens < 0 || f.Factor < 0 || f.LeaseS < 0:
		return fmt.Errorf("fault %q: for_s, count, after_tokens, factor and lease_s must not be negative",
			f.Mode)
	case f.Rate < 0 || f.Rate > 1:
		return fmt.Errorf("fault %q: rate %v is no share: want 0 to 1", f.Mode, f.Rate)
	case f.Code != 0 && (f.Code < 400 || f.Code > 599):
		return fmt.Errorf("fault %q: code %d is no error: want 400 to 599", f.Mode, f.Code)
	}
	if mode := string(f.Mode); !simflags.IsMode(mode) || strings.HasPrefix(mode, "start-") {
		return fmt.Errorf("unknown fault mode %q: see the modes in docs/simulated-engine.md", f.Mode)
	}
	return nil
}

// code is the status of an injected error.
func (f *Fault) code() int { return cmp.Or(f.Code, defaultErrorCode) }

// slowFactor is what a slow mode multiplies by.
func (f *Fault) slowFactor() float64 { return cmp.Or(f.Factor, defaultSlowFactor) }

// leaseTime is how long leases last under transfer-lease.
func (f *Fault) leaseTime() time.Duration {
	return time.Duration(cmp.Or(f.LeaseS, defaultLeaseS) * float64(time.Second))
}

// faults is the set of failures that are switched on, at most one of each mode. Safe for concurrent use.
type faults struct {
	mu     sync.Mutex
	active map[Mode]*activeFault
}

type activeFault struct {
	Fault
	left  int // requests it still hits, if counted
	timer *time.Timer
	over  chan struct{} // closed when it is over
}

// on switches f on; ended is called (once, from a timer) when its time is over.
func (s *faults) on(f Fault, ended func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.active == nil {
		s.active = make(map[Mode]*activeFault)
	}
	s.drop(f.Mode)
	a := &activeFault{Fault: f, left: f.Count, over: make(chan struct{})}
	if f.ForS > 0 {
		a.timer = time.AfterFunc(time.Duration(f.ForS*float64(time.Second)), func() {
			if s.expire(a) {
				ended()
			}
		})
	}
	s.active[f.Mode] = a
}

func (s *faults) expire(a *activeFault) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.active[a.Mode] != a {
		return false
	}
	s.drop(a.Mode)
	return true
}

// drop needs the lock.
func (s *faults) drop(m Mode) {
	if a := s.active[m]; a != nil {
		if a.timer != nil {
			a.timer.Stop()
		}
		close(a.over)
		delete(s.active, m)
	}
}

// off ends a mode.
func (s *faults) off(m Mode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop(m)
}

// clear switches everything off.
func (s *faults) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for m := range s.active {
		s.drop(m)
	}
}

// is reports whether a process mode is on.
func (s *faults) is(m Mode) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.active[m] != nil
}

// wait waits until a process mode is over, or ctx ends.
func (s *faults) wait(ctx context.Context, m Mode) {
	s.mu.Lock()
	a := s.active[m]
	s.mu.Unlock()
	if a == nil {
		return
	}
	select {
	case <-a.over:
	case <-ctx.Done():
	}
}

// chance reports whether a batch mode strikes the next batch, counting it. roll gives a number in [0, 1).
func (s *faults) chance(m Mode, roll func() float64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.active[m]
	if a == nil || a.Rate > 0 && roll() >= a.Rate {
		return false
	}
	s.count(a)
	return true
}

// hit takes the fault of one of modes that strikes the next request, counting it; nil = none.
func (s *faults) hit(modes ...Mode) *Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.active) == 0 { // the path of every request
		return nil
	}
	for _, m := range modes {
		if a := s.active[m]; a != nil {
			f := a.Fault
			s.count(a)
			return &f
		}
	}
	return nil
}

// count books that a fault struck; it needs the lock.
func (s *faults) count(a *activeFault) {
	if a.Count > 0 {
		if a.left--; a.left == 0 {
			s.drop(a.Mode)
		}
	}
}

// damaged is a payload with its second half overwritten.
func damaged(payload []byte) []byte {
	out := bytes.Clone(payload)
	for i := len(out) / 2; i < len(out); i++ {
		out[i] = 0xc1 // what msgpack never uses
	}
	return out
}

// withUnknown puts an event of a type to come in front of a batch's events.
func withUnknown(payload []byte) []byte {
	const head = 1 + 9 // of the batch, and its time
	if len(payload) <= head || payload[head]&0xf0 != 0x90 || payload[head] == 0x9f {
		return payload // a long list: left alone
	}
	out := append([]byte{}, payload[:head]...)
	out = append(out, payload[head]+1, 0x92, 0xab)
	out = append(out, "BlockDreamt"...)
	out = append(out, 0x01)
	return append(out, payload[head+1:]...)
}
