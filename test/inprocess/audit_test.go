package inprocess

import (
	"fmt"
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
)

// audit follows the ranks' streams and checks that every admitted request ends exactly once. It implements
// msg.Sink.
type audit struct {
	mu     sync.Mutex
	open   map[entry]bool
	faults []string
}

// entry is one admission.
type entry struct {
	app         string
	rank        string
	incarnation uint64
	request     uint64
}

func (a *audit) Deliver(rec *msg.Record) {
	a.mu.Lock()
	defer a.mu.Unlock()
	e := entry{rec.App, rec.Rank.String(), rec.Incarnation, rec.ReqID}
	switch rec.Kind { //nolint:exhaustive // the others end nothing
	case msg.RecSnapshot, msg.RecGone:
		a.forget(e)
	case msg.RecAdmitted:
		if a.open[e] {
			a.faults = append(a.faults, fmt.Sprintf("admitted twice: %+v", e))
		}
		a.open[e] = true
	case msg.RecDone:
		if !a.open[e] {
			a.faults = append(a.faults, fmt.Sprintf("ended without an admission: %+v", e))
		}
		delete(a.open, e)
	}
}

// forget drops what earlier incarnations of a rank had in hand: it is gone with their engines.
func (a *audit) forget(now entry) {
	for e := range a.open {
		if e.app == now.app && e.rank == now.rank {
			delete(a.open, e)
		}
	}
}

// rest is what is still open, and every fault so far.
func (a *audit) rest() (open int, faults []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.open), append([]string(nil), a.faults...)
}
