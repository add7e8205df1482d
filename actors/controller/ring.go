package controller

import (
	"sync"
	"time"
)

// Event is one change of state of a unit, or (Unit empty) of an application.
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

// ring keeps the last changes and wakes those who wait for one.
type ring struct {
	mu      sync.Mutex
	last    uint64
	events  []Event // the oldest first, at most eventRing
	changed chan struct{}
}

func newRing() *ring { return &ring{changed: make(chan struct{})} }

func (r *ring) add(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last++
	e.Seq = r.last
	if len(r.events) == eventRing {
		r.events = append(r.events[:0], r.events[1:]...)
	}
	r.events = append(r.events, e)
}

// since are the events after seq that are still kept.
func (r *ring) since(seq uint64) []Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.events {
		if r.events[i].Seq > seq {
			return append([]Event(nil), r.events[i:]...)
		}
	}
	return nil
}

func (r *ring) watch() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changed
}

// wake closes and replaces the channel of those who wait.
func (r *ring) wake() {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.changed)
	r.changed = make(chan struct{})
}
