package msg

import (
	"cmp"
	"slices"
	"time"

	"github.com/dpserve/dpserve/routing"
)

// GroupMessageKind is the closed list of what ingresses tell each other about requests that wait for a
// lockstep group. One ingress owns the queue of a group; the others hand it what it decides by, and keep the
// requests.
type GroupMessageKind uint8

// GroupHold and GroupCancel go to the owner, the others come from it.
const (
	// a request waits; again with the same ID: its hits are others now
	GroupHold GroupMessageKind = iota + 1
	// it waits no longer, or has not taken the rank that it was given
	GroupCancel
	// it may go to Rank, which has not been asked yet
	GroupRelease
	// the owner cannot serve the group: another one must decide
	GroupReturn
)

// GroupMessage is one such message. No bytes of the request are in it: they stay where the client has sent
// them, and go from there to the rank.
type GroupMessage struct {
	Kind   GroupMessageKind
	App    string
	Group  int
	ID     uint64         // of the request: as in Admit.ReqID
	Tokens int            // GroupHold: of the prompt
	Hits   []routing.Hit  // GroupHold
	Age    time.Duration  // GroupHold: how long it has waited
	Client uint64         // GroupHold: equal for the requests of one client; 0 = it had its turn before
	Rank   routing.RankID // GroupRelease
}

// Bounds of a GroupMessage.
const (
	MaxGroupHits = 1024 // of a request: the longest ones stay
	maxGroup     = 65_535
	maxGroupAge  = 24 * time.Hour
	maxGroupWork = 1 << 30 // tokens of a prompt
)

// Validate refuses a message out of bounds.
func (m *GroupMessage) Validate() error {
	m.Age = min(max(m.Age, 0), maxGroupAge)
	return cmp.Or(checkName(m.App, "app"), checkBounds(m.Kind >= GroupHold && m.Kind <= GroupReturn, "kind"),
		checkBounds(m.Group >= 0 && m.Group <= maxGroup, "group"),
		checkBounds(m.Tokens >= 0 && m.Tokens <= maxGroupWork, "tokens"),
		checkBounds(len(m.Hits) <= MaxGroupHits && slices.IsSortedFunc(m.Hits, func(a, b routing.Hit) int {
			return cmp.Compare(a.Rank, b.Rank)
		}), "hits"),
		checkBounds(!slices.ContainsFunc(m.Hits, func(h routing.Hit) bool {
			return min(h.Tokens, h.Host, h.Disk) < 0 || max(h.Tokens, h.Host, h.Disk) > maxGroupWork
		}), "hits.tokens"))
}

// GroupLinks carries messages between the ingresses of two nodes. Safe for concurrent use; it never blocks.
type GroupLinks interface {
	// Bind says who takes the messages. It is called once, first.
	Bind(peer GroupPeer)
	// Reach reports whether a node can be an owner now: its ingress answers. It connects if it does not.
	Reach(node string) bool
	// Send hands a message over and does not keep it; false: it is lost, because there is no link, or its
	// queue is full.
	Send(node string, m *GroupMessage) bool
}

// GroupPeer is an ingress, as its links see it. The calls must not block. Calls about one node come one after
// the other.
type GroupPeer interface {
	// ReceiveGroup takes a message, which is valid during the call, except its Hits.
	ReceiveGroup(from string, m *GroupMessage)
	// OwnerChanged says that Reach of a node gives another answer now.
	OwnerChanged(node string)
	// HolderLost says that a node's ingress has no link to this one any more: nobody waits for what it held.
	HolderLost(node string)
}
