package ingress

import (
	"reflect"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// unplacedApps are the applications whose units find no room, as the leader says with each renewal of the
// node's lease. The list is valid as long as the lease: without a leader, such units count as pending again.
// Safe for concurrent use.
type unplacedApps struct {
	changed chan struct{} // one slot: the list has changed

	mu    sync.Mutex
	apps  []msg.Waiting
	until time.Time
}

// replace stores a new list, valid for lasts.
func (w *unplacedApps) replace(said []msg.Waiting, lasts time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.until = time.Now().Add(lasts)
	if len(said) == len(w.apps) && (len(said) == 0 || reflect.DeepEqual(said, w.apps)) {
		return
	}
	w.apps = said
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// current returns the valid list by application, and for how long it is valid; 0: the list is empty or
// expired.
func (w *unplacedApps) current() (apps map[string]*msg.Waiting, left time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if left = time.Until(w.until); left <= 0 || len(w.apps) == 0 {
		w.apps = nil
		return nil, 0
	}
	apps = make(map[string]*msg.Waiting, len(w.apps))
	for i := range w.apps {
		apps[w.apps[i].App] = &w.apps[i]
	}
	return apps, left
}

// hasNoRoom reports whether a unit waits for room. The leader's list does not apply to another revision,
// which was not placed yet, or to a unit that was granted meanwhile.
func hasNoRoom(st *state.State, w *msg.Waiting, unit string) bool {
	if w == nil || st.Apps[w.App] == nil || st.Apps[w.App].Revision != w.Revision {
		return false
	}
	epoch, waits := w.Units[unit]
	return waits && st.Epochs[unit] == epoch
}

// unitProgress returns the application's ready units with their epochs, and the number of wanted units that
// may still become ready. Units for which the leader finds no room, as w says, are neither; noRoom is the
// reason, "" if there are none.
func unitProgress(st *state.State, spec *app.Application, deleting bool, w *msg.Waiting) (
	ready map[string]uint64, onTheWay int, noRoom string,
) {
	ready = map[string]uint64{}
	for id, u := range st.Units {
		if u.App == spec.Name && u.Phase == state.Ready && st.Epochs[id] <= u.Epoch && !hasNoRoom(st, w, id) {
			ready[id] = u.Epoch
		}
	}
	if deleting {
		return ready, 0, ""
	}
	for _, u := range spec.Units() {
		have := st.Units[u.ID]
		switch {
		case hasNoRoom(st, w, u.ID):
			noRoom = w.Reason
		case have == nil || have.Phase != state.Ready && have.Phase != state.Failed:
			onTheWay++
		}
	}
	return ready, onTheWay, noRoom
}
