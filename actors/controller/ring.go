package controller

import (
	"sync"
	"time"
)

// Event is one change of a unit or, with Unit empty, of an application.
type Event struct {
	Seq    uint64    `json:"seq"` // from 1, without gaps
	At     time.Time `json:"at"`
	App    string    `json:"app"`
	Unit   string    `json:"unit,omitempty"`
	Epoch  uint64    `json:"epoch,omitempty"`
	From   string    `json:"from,omitempty"`
	To     string    `json:"to"`
	Reason string    `json:"reason,omitempty"`
}

// ring keeps the last changes and wakes waiting callers.
type ring struct {
	mu      sync.Mutex
	last    uint64
	events  []Event // oldest first; cut to eventRing at twice that length
	changed chan struct{}
}

func newRing() *ring { return &ring{changed: make(chan struct{})} }

func (r *ring) add(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last++
	e.Seq = r.last
	r.events = append(r.events, e)
	if len(r.events) == 2*eventRing {
		r.events = append([]Event(nil), r.events[eventRing:]...)
	}
}

// since returns the kept events after seq.
func (r *ring) since(seq uint64) []Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	kept := r.events[max(0, len(r.events)-eventRing):]
	for i := range kept {
		if kept[i].Seq > seq {
			return append([]Event(nil), kept[i:]...)
		}
	}
	return nil
}

func (r *ring) watch() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changed
}

// wake closes and replaces the channel of waiting callers.
func (r *ring) wake() {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.changed)
	r.changed = make(chan struct{})
}
