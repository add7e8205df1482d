package membership

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// State is the state of a member by the gossip.
type State string

// The states. Suspicion is not one: within seconds it is refuted or ends in Dead.
const (
	Alive State = "alive"
	Dead  State = "dead" // it does not answer
	Left  State = "left" // it announced that it leaves
)

// maxGone bounds the remembered members that are gone. The ones that are gone longest are forgotten first.
const maxGone = 256

// Member is one process of a node, as the gossip knows it.
type Member struct {
	Node        string
	UID         string
	Address     string // node port
	Gossip      string
	Roles       []string
	Version     string
	Zone        string
	Index       uint64
	State       State
	LastSeen    time.Time
	Incarnation uint64

	refused time.Time // its first message after the cluster had removed it; zero: there was none
}

// table is this node's view. memberlist calls it under its own lock, so it must not call memberlist or its
// users.
type table struct {
	mu      sync.Mutex
	members map[string]*Member // by memberlist's name
	changed chan struct{}      // one slot
}

func newTable() *table {
	return &table{members: map[string]*Member{}, changed: make(chan struct{}, 1)}
}

var _ memberlist.EventDelegate = (*table)(nil)

// NotifyJoin implements memberlist.EventDelegate.
func (t *table) NotifyJoin(n *memberlist.Node) { t.recordMember(n) }

// NotifyUpdate implements memberlist.EventDelegate.
func (t *table) NotifyUpdate(n *memberlist.Node) { t.recordMember(n) }

func (t *table) recordMember(n *memberlist.Node) {
	meta, err := decodeMeta(n.Meta)
	if err != nil {
		return // NotifyAlive has refused it
	}
	node, incarnation, err := splitName(n.Name)
	if err != nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	m := &Member{
		Node: node, UID: meta.UID, Address: meta.Address, Gossip: n.Address(), Roles: meta.Roles,
		Version: meta.Version, Zone: meta.Zone,
		Index: meta.Index, State: Alive, LastSeen: time.Now(), Incarnation: incarnation,
	}
	if meta.leaving {
		m.State = Left
	}
	t.members[n.Name] = m
	t.forgetGone()
	t.signalChange()
}

// NotifyLeave implements memberlist.EventDelegate. A member that leaves on purpose has announced it before.
func (t *table) NotifyLeave(n *memberlist.Node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m := t.members[n.Name]; m != nil && m.State == Alive {
		m.State = Dead
	}
	t.forgetGone()
	t.signalChange()
}

// recordAnswer records that a member answered a probe.
func (t *table) recordAnswer(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m := t.members[name]; m != nil {
		m.LastSeen = time.Now()
	}
}

// removalGrace is how long a member that was removed may gossip on: it learns of its removal when it next
// asks the cluster, and then ends.
const removalGrace = 10 * time.Second

// isJustRemoved reports whether the messages of a removed node are still to be expected: they come from a
// process that was a member here until less than removalGrace ago.
func (t *table) isJustRemoved(name string, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.members[name]
	if m == nil {
		return false
	}
	if m.refused.IsZero() {
		m.refused = now
	}
	return now.Sub(m.refused) < removalGrace
}

// forgetGone drops the members that are gone longest above the bound, and those whose node has a newer
// process. The caller holds mu.
func (t *table) forgetGone() {
	var gone []string
	alive := map[string]bool{}
	for _, m := range t.members {
		alive[m.UID] = alive[m.UID] || m.State == Alive
	}
	for name, m := range t.members {
		if m.State != Alive && alive[m.UID] {
			delete(t.members, name)
		} else if m.State != Alive {
			gone = append(gone, name)
		}
	}
	if len(gone) <= maxGone {
		return
	}
	slices.SortFunc(gone,
		func(a, b string) int { return t.members[a].LastSeen.Compare(t.members[b].LastSeen) })
	for _, name := range gone[:len(gone)-maxGone] {
		delete(t.members, name)
	}
}

// signalChange wakes notifyChanges. The caller holds mu.
func (t *table) signalChange() {
	select {
	case t.changed <- struct{}{}:
	default:
	}
}

// list returns one Member per UID, sorted by node: an alive one before a gone one, among equals the one seen
// last.
func (t *table) list() []Member {
	t.mu.Lock()
	defer t.mu.Unlock()
	best := map[string]*Member{}
	for _, m := range t.members {
		if old := best[m.UID]; old == nil || m.isPreferred(old) {
			best[m.UID] = m
		}
	}
	list := make([]Member, 0, len(best))
	for _, m := range best {
		c := *m
		c.Roles = slices.Clone(m.Roles)
		list = append(list, c)
	}
	slices.SortFunc(list, func(a, b Member) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node),
			cmp.Compare(a.UID, b.UID))
	})
	return list
}

func (m *Member) isPreferred(old *Member) bool {
	if (m.State == Alive) != (old.State == Alive) {
		return m.State == Alive
	}
	return m.LastSeen.After(old.LastSeen)
}

// missing returns the addresses without an alive member.
func (t *table) missing(addresses []string) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	alive := map[string]bool{}
	for _, m := range t.members {
		alive[m.Gossip] = alive[m.Gossip] || m.State == Alive
	}
	return slices.DeleteFunc(slices.Clone(addresses), func(a string) bool { return a == "" || alive[a] })
}

// isAlone reports whether no other node is alive.
func (t *table) isAlone() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for _, m := range t.members {
		if m.State == Alive {
			n++
		}
	}
	return n <= 1
}
