package membership

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/dpserve/dpserve/internal/problem"
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
}

var _ memberlist.EventDelegate = (*table)(nil)

func (t *table) NotifyJoin(n *memberlist.Node)   { t.recordMember(n) }
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
		Version: meta.Version, Zone: meta.Zone, State: Alive, LastSeen: time.Now(), Incarnation: incarnation,
	}
	if meta.leaving {
		m.State = Left
	}
	t.members[n.Name] = m
	t.forgetGone()
}

// NotifyLeave is of a member that is gone. One that leaves on purpose has announced it before.
func (t *table) NotifyLeave(n *memberlist.Node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m := t.members[n.Name]; m != nil && m.State == Alive {
		m.State = Dead
	}
	t.forgetGone()
}

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
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.UID, b.UID))
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

// Meta is what a node announces of itself: at most 512 bytes when encoded.
type Meta struct {
	Cluster string
	UID     string
	Address string // HOST:PORT of the node port
	Roles   []string
	Version string
	Zone    string

	leaving bool // the node leaves on purpose
}

// metaFormat grows when old readers could no longer read the fields. Readers skip unknown fields.
const metaFormat = 1

// Fields: a tag (one byte), a length (one byte), the bytes.
const (
	tagCluster byte = iota + 1
	tagUID
	tagAddress
	tagRole // one field per role
	tagVersion
	tagZone
	_ // earlier versions tell the index of their copy of the state
	tagLeaving
)

// maxField is the longest field, maxRoles the highest number of roles that are read.
const (
	maxField = 255
	maxRoles = 16
)

var errMeta = errors.New("meta of a member cannot be read")

func (m Meta) encode() ([]byte, error) {
	b := []byte{metaFormat}
	fits := true
	field := func(tag byte, s string) {
		if s != "" {
			fits = fits && len(s) <= maxField
			b = append(append(b, tag, byte(len(s))), s...) //nolint:gosec // checked just above
		}
	}
	field(tagCluster, m.Cluster)
	field(tagUID, m.UID)
	field(tagAddress, m.Address)
	for _, r := range m.Roles {
		field(tagRole, r)
	}
	field(tagVersion, m.Version)
	field(tagZone, m.Zone)
	if m.leaving {
		b = append(b, tagLeaving, 0)
	}
	// The field that Close adds must fit as well.
	if !fits || len(m.Roles) > maxRoles || len(b)+2 > memberlist.MetaMaxSize {
		return nil, problem.New(problem.InvalidArgument,
			"what this node tells of itself takes %d bytes, allowed are %d", len(b),
			memberlist.MetaMaxSize-2).
			WithHint("choose a shorter zone or advertised name")
	}
	return b, nil
}

// decodeMeta reads the result of encode. It ignores fields of newer versions.
func decodeMeta(b []byte) (Meta, error) {
	var m Meta
	if len(b) == 0 || len(b) > memberlist.MetaMaxSize || b[0] != metaFormat {
		return m, errMeta
	}
	for b = b[1:]; len(b) > 0; {
		if len(b) < 2 || len(b) < 2+int(b[1]) {
			return Meta{}, errMeta
		}
		if err := m.set(b[0], b[2:2+int(b[1])]); err != nil {
			return Meta{}, err
		}
		b = b[2+int(b[1]):]
	}
	if m.Cluster == "" || m.UID == "" {
		return Meta{}, errMeta
	}
	return m, nil
}

func (m *Meta) set(tag byte, value []byte) error {
	switch tag {
	case tagCluster:
		m.Cluster = string(value)
	case tagUID:
		m.UID = string(value)
	case tagAddress:
		m.Address = string(value)
	case tagRole:
		if len(m.Roles) == maxRoles {
			return errMeta
		}
		m.Roles = append(m.Roles, string(value))
	case tagVersion:
		m.Version = string(value)
	case tagZone:
		m.Zone = string(value)
	case tagLeaving:
		m.leaving = true
	}
	return nil
}
