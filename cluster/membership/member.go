package membership

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// State is what the gossip says of a member.
type State string

// The states. Suspicion is not shown: it is refuted or ends in Dead within seconds.
const (
	Alive State = "alive"
	Dead  State = "dead" // silent
	Left  State = "left" // on purpose
)

// maxGone bounds members that are remembered although they are gone; the longest gone are forgotten first.
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
}

// table is the view of this node. memberlist tells it under its own lock, so it calls nobody back (TRAPS 17).
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
func (t *table) NotifyJoin(n *memberlist.Node) { t.seen(n) }

// NotifyUpdate implements memberlist.EventDelegate.
func (t *table) NotifyUpdate(n *memberlist.Node) { t.seen(n) }

func (t *table) seen(n *memberlist.Node) {
	meta, err := decodeMeta(n.Meta)
	if err != nil {
		return // refused before: NotifyAlive
	}
	node, incarnation, err := splitName(n.Name)
	if err != nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	m := &Member{
		Node: node, UID: meta.UID, Address: meta.Address, Gossip: n.Address(), Roles: meta.Roles, Version: meta.Version, Zone: meta.Zone,
		Index: meta.Index, State: Alive, LastSeen: time.Now(), Incarnation: incarnation,
	}
	if meta.leaving {
		m.State = Left
	}
	t.members[n.Name] = m
	t.forget()
	t.tell()
}

// NotifyLeave implements memberlist.EventDelegate. Who left on purpose has said so before.
func (t *table) NotifyLeave(n *memberlist.Node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m := t.members[n.Name]; m != nil && m.State == Alive {
		m.State = Dead
	}
	t.forget()
	t.tell()
}

// answered notes that a member answered a probe.
func (t *table) answered(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m := t.members[name]; m != nil {
		m.LastSeen = time.Now()
	}
}

// forget drops the longest gone over the bound, and those whose node has a newer process. Called under mu.
func (t *table) forget() {
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
	slices.SortFunc(gone, func(a, b string) int { return t.members[a].LastSeen.Compare(t.members[b].LastSeen) })
	for _, name := range gone[:len(gone)-maxGone] {
		delete(t.members, name)
	}
}

// tell wakes whoever calls OnChange. Called under mu.
func (t *table) tell() {
	select {
	case t.changed <- struct{}{}:
	default:
	}
}

// list gives one Member per UID, sorted by node: an alive one before a gone one, the one seen last among equals.
func (t *table) list() []Member {
	t.mu.Lock()
	defer t.mu.Unlock()
	best := map[string]*Member{}
	for _, m := range t.members {
		if old := best[m.UID]; old == nil || m.newer(old) {
			best[m.UID] = m
		}
	}
	list := make([]Member, 0, len(best))
	for _, m := range best {
		c := *m
		c.Roles = slices.Clone(m.Roles)
		list = append(list, c)
	}
	slices.SortFunc(list, func(a, b Member) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.UID, b.UID)) })
	return list
}

func (m *Member) newer(old *Member) bool {
	if (m.State == Alive) != (old.State == Alive) {
		return m.State == Alive
	}
	return m.LastSeen.After(old.LastSeen)
}

// missing are the addresses where nobody is alive.
func (t *table) missing(addresses []string) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	alive := map[string]bool{}
	for _, m := range t.members {
		alive[m.Gossip] = alive[m.Gossip] || m.State == Alive
	}
	return slices.DeleteFunc(slices.Clone(addresses), func(a string) bool { return a == "" || alive[a] })
}

// alone says that nobody but this node is alive.
func (t *table) alone() bool {
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
