package msg

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

func TestMessagesOutOfBoundsAreRefused(t *testing.T) {
	long := strings.Repeat("x", maxName+1)
	order := func(spoil func(m *StartRank)) *StartRank {
		m := &StartRank{
			App: &app.Application{Name: "chat"}, Unit: "chat/0", Epoch: 1,
			Ranks: []state.RankGrant{{Node: "a"}},
		}
		spoil(m)
		return m
	}
	report := func(spoil func(r *NodeReport)) *NodeReport {
		r := &NodeReport{Node: state.Node{ID: "a", UID: "u"}, Units: []UnitEvent{{Unit: "chat/0"}}}
		spoil(r)
		return r
	}
	hold := func(spoil func(m *GroupMessage)) *GroupMessage {
		m := &GroupMessage{Kind: GroupHold, App: "demo", Hits: []routing.Hit{{Rank: 1}, {Rank: 2}}}
		spoil(m)
		return m
	}
	require.NoError(t, order(func(*StartRank) {}).Validate())
	require.NoError(t, report(func(*NodeReport) {}).Validate())
	require.NoError(t, hold(func(*GroupMessage) {}).Validate())
	require.EqualError(t, (&Lease{Leader: "a"}).Validate(), "message from another node: ttl is out of bounds")
	for i, m := range []interface{ Validate() error }{
		order(func(m *StartRank) { m.App = nil }),
		order(func(m *StartRank) { m.App.Name = "" }),
		order(func(m *StartRank) { m.Unit = "" }),
		order(func(m *StartRank) { m.Unit = long }),
		order(func(m *StartRank) { m.Epoch = 0 }),
		order(func(m *StartRank) { m.Group = -1 }),
		order(func(m *StartRank) { m.Ranks = nil }),
		order(func(m *StartRank) { m.Ranks[0].Rank = -1 }),
		order(func(m *StartRank) { m.AllRanks = []state.RankGrant{{}} }),
		order(func(m *StartRank) { m.Block = state.Block{Base: 65535, Size: 2} }),
		order(func(m *StartRank) { m.Block = state.Block{Base: 1 << 62, Size: 1 << 62} }),
		&StopRank{Unit: "chat/0", Grace: -1},
		&Assign{App: "chat", ReplicaID: long},
		&Publish{Unit: "moe/0"},
		&Await{},
		&LogQuery{App: long},
		&Lease{TTL: 1, Leader: "a", GossipKey: make([]byte, 3)},
		report(func(r *NodeReport) { r.Node.UID = "" }),
		report(func(r *NodeReport) { r.Node.Roles = make([]state.Role, maxRoles+1) }),
		report(func(r *NodeReport) { r.Node.Zone = strings.Repeat("x", maxNodeRecord) }),
		report(func(r *NodeReport) { r.Units[0].Unit = "" }),
		report(func(r *NodeReport) { r.Events = make([]UnitEvent, maxEvents+1) }),
		hold(func(m *GroupMessage) { m.Kind = GroupReturn + 1 }),
		hold(func(m *GroupMessage) { m.App = "" }),
		hold(func(m *GroupMessage) { m.Group = maxGroup + 1 }),
		hold(func(m *GroupMessage) { m.Tokens = -1 }),
		hold(func(m *GroupMessage) { m.Hits[0].Rank = 3 }),
		hold(func(m *GroupMessage) { m.Hits[0].Host = -1 }),
		hold(func(m *GroupMessage) { m.Hits = make([]routing.Hit, MaxGroupHits+1) }),
	} {
		require.ErrorContains(t, m.Validate(), "is out of bounds", "%d: %+v", i, m)
	}
}

func TestTextsAndTimesAreCut(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	r := &NodeReport{
		Node: state.Node{ID: "a", UID: "u"}, Trouble: long, RestartGrace: 9 * time.Hour,
		Events: []UnitEvent{{Unit: "chat/0", Reason: long, LogTail: []string{long, "caf\xe9"}}},
	}
	require.NoError(t, r.Validate())
	assert.Equal(t, maxRestartGrace, r.RestartGrace)
	assert.Len(t, r.Trouble, maxText)
	assert.Len(t, r.Events[0].Reason, maxText)
	assert.Equal(t, []string{long[:1000], "caf"}, r.Events[0].LogTail)
	q := LogQuery{Rank: -7, Tail: -1}
	require.NoError(t, q.Validate())
	assert.Equal(t, LogQuery{Rank: -1}, q)
	m := GroupMessage{Kind: GroupHold, App: "demo", Age: -1}
	require.NoError(t, m.Validate())
	assert.Zero(t, m.Age)
}

// MB6: a unit whose newest event is of a later version's kind is present.
func TestUnknownKindStaysInTheDigest(t *testing.T) {
	r := &NodeReport{
		Events: []UnitEvent{{Number: 1, Unit: "chat/0/0", Kind: "dancing"}, {Number: 2, Kind: UnitReady}},
		Units: []UnitEvent{
			{Node: "b", Unit: "chat/0/0", Epoch: 3, Number: 9, Kind: "asleep", Rank: 4, WasReady: true},
			{Node: "b", Unit: "chat/0/1", Epoch: 1, Number: 8, Kind: UnitPresent},
		},
	}
	assert.Equal(t, 2, r.PassOverUnknown())
	assert.Equal(t, UnitPresent, r.Events[0].Kind)
	assert.Equal(t, UnitReady, r.Events[1].Kind)
	assert.Equal(t, UnitEvent{
		Node: "b", Number: 9, Unit: "chat/0/0", Epoch: 3, Kind: UnitPresent, Rank: -1,
	}, r.Units[0])
	assert.Zero(t, r.PassOverUnknown())
}
