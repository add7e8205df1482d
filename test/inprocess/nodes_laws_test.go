package inprocess

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/harness"
)

// calm is how long a node and its links were well when its loss has no excuse.
const calm = 14 * time.Second

// laws follow the copies of the state at all nodes, and say which rule was broken:
//   - one state per index, whatever the node;
//   - one owner of each rank of an epoch;
//   - a copy of the state never goes back;
//   - no node is taken for lost that was well for some time, whatever others do;
//   - no two deploys are given the same revision.
type laws struct {
	ended <-chan struct{} // when the test ends

	mu        sync.Mutex
	sums      map[uint64][sha256.Size]byte // by index, of what all nodes may know
	owners    map[string]string            // of the ranks, by unit and epoch
	isHarmed  map[string]bool              // nodes to which something happens
	since     map[string]time.Time         // when that ended
	newest    uint64                       // index
	lost      map[string]bool              // in the newest state
	revisions map[uint64]bool
	faults    []string
}

func newLaws(t *testing.T) *laws {
	return &laws{
		ended: t.Context().Done(), sums: map[uint64][sha256.Size]byte{}, owners: map[string]string{},
		isHarmed: map[string]bool{}, since: map[string]time.Time{}, lost: map[string]bool{},
		revisions: map[uint64]bool{},
	}
}

func (l *laws) violated(format string, args ...any) {
	l.faults = append(l.faults, time.Now().Format("04:05.000 ")+fmt.Sprintf(format, args...))
}

// broken are the rules that were broken.
func (l *laws) broken() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.faults)
}

// harmed says that something happens to nodes from now on.
func (l *laws) harmed(nodes ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range nodes {
		l.isHarmed[n] = true
	}
}

// mended says that nothing happens to a node any more.
func (l *laws) mended(node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isHarmed[node] {
		l.isHarmed[node], l.since[node] = false, time.Now()
	}
}

// follow looks at each copy of the state that a node has, until the test ends.
func (l *laws) follow(p *harness.Peer) {
	store := p.Store()
	go func() {
		last := uint64(0)
		for {
			changed := store.Changed()
			s := store.State()
			l.look(p.ID, s, last)
			last = s.Index
			select {
			case <-changed:
			case <-l.ended:
				return
			}
		}
	}()
}

func (l *laws) look(node string, s *state.State, last uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.Index < last {
		l.violated("%s went back from state %d to %d", node, last, s.Index)
	}
	if text, err := s.Public().Encode(); err != nil {
		l.violated("%s: %v", node, err)
	} else {
		sum := sha256.Sum256(text)
		if was, ok := l.sums[s.Index]; ok && was != sum {
			l.violated("%s has another state at %d than another node", node, s.Index)
		}
		l.sums[s.Index] = sum
	}
	for id, u := range s.Units {
		var at []string
		for _, k := range u.Ranks {
			at = append(at, fmt.Sprint(k.Rank, "@", k.Node))
		}
		key, owner := fmt.Sprint(id, " epoch ", u.Epoch), strings.Join(at, " ")
		if was := l.owners[key]; was != "" && owner != "" && was != owner {
			l.violated("%s belongs to %s, and to %s", key, was, owner)
		}
		if owner != "" {
			l.owners[key] = owner
		}
	}
	if s.Index < l.newest { // of a node that lags
		return
	}
	l.newest = s.Index
	for id, n := range s.Nodes {
		if n.Lost && !l.lost[id] && !l.isHarmed[id] && time.Since(l.since[id]) > calm {
			l.violated("%s is taken for lost, and nothing was wrong with it for %s", id, calm)
		}
		l.lost[id] = n.Lost
	}
}

// deployed notes the answer to a deploy.
func (l *laws) deployed(answer string) {
	var a struct{ Revision uint64 }
	err := json.Unmarshal([]byte(answer), &a)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil || a.Revision == 0 || l.revisions[a.Revision] {
		l.violated("a deploy was given a revision that another one has: %s", answer)
	}
	l.revisions[a.Revision] = true
}
