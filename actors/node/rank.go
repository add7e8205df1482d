package node

import (
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/state"
)

// rank is one rank of a unit on this node.
type rank struct {
	grant   state.RankGrant
	target  msg.Target
	events  *msg.EventSource // where its KV events are, if known
	facts   msg.Facts        // of the engine as last asked; used by the unit's goroutine only
	replica Replica
	client  *engine.Client
	out     [2]*lineWriter

	mu       sync.Mutex
	proc     Process
	asked    bool // the node has told it to end
	progress string
}

func (r *rank) setProc(p Process) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.proc = p
}

func (r *rank) process() Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.proc
}

// ask marks the engine's exit as requested by the node; every other exit is a failure.
func (r *rank) ask() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = true
}

func (r *rank) wasAsked() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked
}

func (r *rank) setProgress(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.progress = text
}

func (r *rank) view() (pid int, progress string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.proc != nil && !closed(r.proc.Exited()) {
		pid = r.proc.PID()
	}
	return pid, r.progress
}

// held describes the living processes of the engine, "" if there are none.
func (r *rank) held() string {
	if p := r.process(); p != nil {
		return p.Held()
	}
	return ""
}
