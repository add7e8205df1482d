package sim

import (
	"errors"
	"fmt"
	"strings"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// Stats is the answer of GET /_sim/stats: sums over the ranks of this process.
type Stats struct {
	Running      int               `json:"running"`
	Waiting      int               `json:"waiting"`
	InFlight     int               `json:"in_flight"` // HTTP requests on generation routes
	UsedBlocks   int               `json:"used_blocks"`
	Blocks       int               `json:"blocks"`
	Steps        uint64            `json:"steps"`
	Tokens       uint64            `json:"tokens"` // generated
	PromptTokens uint64            `json:"prompt_tokens"`
	CachedTokens uint64            `json:"cached_tokens"`
	Preemptions  uint64            `json:"preemptions"`
	Aborted      uint64            `json:"aborted"` // sequences whose client left
	Rejected     uint64            `json:"rejected"`
	Finished     map[string]uint64 `json:"finished"` // sequences by finish_reason

	Leases       int    `json:"leases"`        // ended prefill legs whose blocks wait for their reader
	Loading      int    `json:"loading"`       // sequences whose prompt is on its way from another engine
	LoadedTokens uint64 `json:"loaded_tokens"` // of prompts that came
	WrongAnswers uint64 `json:"wrong_answers"` // sequences that were answered from KV of other tokens
}

// Stats sums the counters of all ranks of this process.
func (s *Server) Stats() Stats {
	out := Stats{InFlight: s.active.count(), Finished: map[string]uint64{}}
	for _, r := range s.ranks {
		c := r.stats()
		out.Running += c.Running
		out.Waiting += c.Waiting
		out.UsedBlocks += c.UsedBlocks
		out.Blocks += c.Blocks
		out.Steps += c.Steps
		out.Tokens += c.GeneratedTokens
		out.PromptTokens += c.PromptTokens
		out.CachedTokens += c.PromptCached
		out.Preemptions += c.Preemptions
		out.Aborted += c.Aborted
		out.Leases += c.Leases
		out.Loading += c.Loading
		out.LoadedTokens += c.PromptLoaded
		out.WrongAnswers += c.WrongAnswers
		out.Rejected += c.Rejected[em.RejectRequests] + c.Rejected[em.RejectTokens]
		for _, why := range endReasons {
			out.Finished[why.String()] += c.Finished[why]
		}
	}
	return out
}

// Fail switches a failure on. Modes that end the process may do so before it returns.
func (s *Server) Fail(f Fault) error {
	if err := f.validate(); err != nil {
		return err
	}
	note := func() {
		s.log.Info("failure injected", "mode", string(f.Mode), "for_s", f.ForS, "count", f.Count)
	}
	switch f.Mode { // the first may end the process at once
	case ModeCrash, ModeKill, ModeOrphan, ModeCoreDead:
		note()
	default:
		defer note() // whoever reads it finds the failure on
	}
	switch f.Mode {
	case ModeCrash:
		code := defaultExitCode
		if f.ExitCode != nil {
			code = *f.ExitCode
		}
		s.leave(code, "crash as told")
	case ModeKill:
		s.killed()
	case ModeOrphan:
		return s.orphaned(f.Port)
	case ModeCoreDead:
		s.tellAll(em.Input{Kind: em.InputKill})
	case ModeHang, ModeFreeze, ModeSlow, ModeRefuse, ModeTransferLease:
		return s.failFor(f)
	case ModeKVRestart:
		s.dropCaches(true)
	case ModeKVSleep: // the engine goes on computing
		s.dropCaches(false)
		s.faults.on(f, func() {})
	default: // the handlers and the publisher ask for the others
		s.faults.on(f, func() {})
	}
	return nil
}

// failFor switches on a mode that needs an action at its end too.
func (s *Server) failFor(f Fault) error {
	switch f.Mode { //nolint:exhaustive // called for five modes
	case ModeHang, ModeFreeze:
		s.tellAll(em.Input{Kind: em.InputHang})
	case ModeSlow:
		s.tellAll(em.Input{Kind: em.InputSlow, Factor: f.slowFactor()})
	case ModeTransferLease:
		s.tellAll(em.Input{Kind: em.InputLeaseTime, For: f.leaseTime()})
	case ModeRefuse:
		if err := s.gate.refuse(); err != nil {
			return err
		}
		s.http.SetKeepAlivesEnabled(false) // pooled connections must not get in either
	}
	s.faults.on(f, func() { _ = s.undo(f.Mode) })
	return nil
}

// undo ends a mode of failFor.
func (s *Server) undo(m Mode) error {
	switch m {
	case ModeRefuse:
		s.http.SetKeepAlivesEnabled(true)
		return s.gate.admit()
	case ModeTransferLease:
		s.tellAll(em.Input{Kind: em.InputLeaseTime, For: s.cfg.Transfer.lease()})
	default:
		s.tellAll(em.Input{Kind: em.InputRecover})
	}
	return nil
}

// Recover switches every failure off that has not ended the engine.
func (s *Server) Recover() error {
	s.faults.clear()
	return errors.Join(s.undo(ModeHang), s.undo(ModeRefuse), s.undo(ModeTransferLease))
}

func (s *Server) tellAll(in em.Input) {
	for _, r := range s.ranks {
		r.submit(in)
	}
}

// killed ends the process without cleanup; in tests, where the process is not the engine's own, it ends the
// server.
func (s *Server) killed() {
	if s.cfg.kill != nil {
		s.cfg.kill()
	}
	s.leave(-1, "killed as told")
}

// orphaned starts a child that holds a port, then ends the process.
func (s *Server) orphaned(port int) error {
	if s.cfg.orphan == nil {
		return errors.New("mode orphan needs an engine process of its own")
	}
	if port == 0 {
		port = s.kvPort()
	}
	s.closeKV() // what the child takes over
	if err := s.cfg.orphan(port); err != nil {
		return fmt.Errorf("start the orphan: %w", err)
	}
	s.killed()
	return nil
}

// kvPort is a KV event port of the rank's block that the engine binds: the one of replays where there are
// events (their publisher dials), else the first one. Port blocks hold one HTTP port per rank, then one KV
// port per rank.
func (s *Server) kvPort() int {
	if kv := s.ranks[0].kv; kv != nil && kv.sockets.replay != "" {
		return portOf(strings.TrimPrefix(kv.sockets.replay, schemeTCP))
	}
	return portOf(s.gate.Addr().String()) + max(1, s.cfg.DPSize)
}

// dropCaches empties the prefix caches without an event; requests are computed again. isRestart begins the
// event streams anew as well, as a new process would.
func (s *Server) dropCaches(isRestart bool) {
	for _, r := range s.ranks {
		r.mu.Lock()
		r.core.ResetPrefixCache(true, true)
		if isRestart && r.kv != nil {
			r.kv.restart()
		}
		r.mu.Unlock()
		r.wake()
	}
}

// BlockTable is the prefix cache of one rank and the point in its event stream that it stands at.
type BlockTable struct {
	Rank   string         `json:"rank"`
	Next   uint64         `json:"next"`   // sequence number of the next batch
	Blocks map[uint64]int `json:"blocks"` // copies by hash
}

// BlockTables is what every rank of this process holds. Changes of the step that runs are in the blocks and
// not yet in the stream.
func (s *Server) BlockTables() []BlockTable {
	out := make([]BlockTable, 0, len(s.ranks))
	for _, r := range s.ranks {
		t := BlockTable{Rank: r.label, Blocks: map[uint64]int{}}
		r.mu.Lock()
		r.core.CachedBlocks(func(hash uint64, copies int) { t.Blocks[hash] = copies })
		if r.kv != nil {
			t.Next = r.kv.published()
		}
		r.mu.Unlock()
		out = append(out, t)
	}
	return out
}
