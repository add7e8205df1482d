package noderpc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/internal/state"
)

// trip marshals a message and reads it into its zero value, as the wire does.
func trip[M proto.Message](t require.TestingT, m M) M {
	data, err := proto.Marshal(m)
	require.NoError(t, err)
	out, ok := m.ProtoReflect().New().Interface().(M)
	require.True(t, ok)
	require.NoError(t, proto.Unmarshal(data, out))
	return out
}

func anyName() *rapid.Generator[string] { return rapid.StringMatching(`[a-z][a-z0-9./-]{0,20}`) }

func anyWords() *rapid.Generator[string] { return rapid.StringN(0, 40, 200) }

// moment is a time with the precision of the wire, or none.
func anyMoment() *rapid.Generator[time.Time] {
	return rapid.Map(rapid.Int64Range(0, 1<<62), fromNanos)
}

func anyGrants() *rapid.Generator[[]state.RankGrant] {
	one := rapid.Custom(func(t *rapid.T) state.RankGrant {
		return state.RankGrant{
			Rank: rapid.IntRange(0, 1<<20).Draw(t, "rank"), Node: anyName().Draw(t, "node"),
			Slot:    rapid.IntRange(-1, 4096).Draw(t, "slot"),
			Devices: some(rapid.IntRange(0, 64), 8).Draw(t, "devices"),
			Share:   rapid.IntRange(0, 9999).Draw(t, "share"),
		}
	})
	return some(one, 6)
}

// some is a list that is nil when it is empty, as those read from the wire are.
func some[V any](of *rapid.Generator[V], most int) *rapid.Generator[[]V] {
	return rapid.Map(rapid.SliceOfN(of, 0, most), func(s []V) []V {
		if len(s) == 0 {
			return nil
		}
		return s
	})
}

func anyEvent(node string) *rapid.Generator[msg.UnitEvent] {
	return rapid.Custom(func(t *rapid.T) msg.UnitEvent {
		return msg.UnitEvent{
			Node: node, Number: rapid.Uint64().Draw(t, "number"), Unit: anyName().Draw(t, "unit"),
			Epoch: rapid.Uint64().Draw(t, "epoch"),
			Kind:  rapid.SampledFrom(eventKinds()).Draw(t, "kind"),
			Rank:  rapid.IntRange(-1, 4096).Draw(t, "rank"), Reason: anyWords().Draw(t, "reason"),
			LogTail: some(anyWords(), maxTail).Draw(t, "tail"), WasReady: rapid.Bool().Draw(t, "ready"),
			Asked: rapid.Bool().Draw(t, "asked"),
			At:    anyMoment().Draw(t, "at"),
		}
	})
}

func anyNode() *rapid.Generator[state.Node] {
	return rapid.Custom(func(t *rapid.T) state.Node {
		return state.Node{
			ID: anyName().Draw(t, "id"), UID: anyName().Draw(t, "uid"),
			Advertise: anyName().Draw(t, "advertise"), Address: anyName().Draw(t, "address"),
			Gossip: anyName().Draw(t, "gossip"), Zone: anyWords().Draw(t, "zone"),
			Version: anyWords().Draw(t, "version"),
			Roles: some(rapid.SampledFrom([]state.Role{
				state.RoleControl, state.RoleWorker,
				state.RoleIngress,
			}), 3).Draw(t, "roles"),
			Resources: state.Resources{
				Slots:   rapid.IntRange(0, 64).Draw(t, "slots"),
				Devices: some(rapid.IntRange(0, 64), 8).Draw(t, "devices"),
				Near:    some(rapid.SliceOfN(rapid.IntRange(0, 64), 1, 4), 3).Draw(t, "near"),
				Models: some(rapid.Just(state.DeviceModel{
					Kind: "nvidia", Name: "H", MemoryMiB: 80 << 10, Driver: "550", Devices: []int{0, 1},
				}), 2).Draw(t, "models"),
				PortLo: rapid.IntRange(0, 65535).Draw(t, "lo"),
				PortHi: rapid.IntRange(0, 65535).Draw(t, "hi"),
			},
		}
	})
}

func TestReportsSurviveTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := anyNode().Draw(t, "node")
		want := &msg.NodeReport{
			Node: n, Incarnation: rapid.Uint64().Draw(t, "incarnation"), Wall: anyMoment().Draw(t, "wall"),
			Index:  rapid.Uint64().Draw(t, "index"),
			Events: some(anyEvent(n.ID), 5).Draw(t, "events"),
			Units:  some(anyEvent(n.ID), 5).Draw(t, "units"),
		}
		req, err := encodeReport(want)
		require.NoError(t, err)
		got, unknown, err := decodeReport(trip(t, req))
		require.NoError(t, err)
		assert.Zero(t, unknown)
		assert.Equal(t, want, got)
	})
}

func TestOrdersSurviveTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := &msg.StartRank{
			App: &app.Application{
				Name: anyName().Draw(t, "app"), NumGroups: rapid.IntRange(1, 9).Draw(t, "groups"),
				Engine: app.Engine{
					Kind: app.KindSim,
					Args: app.Args{{Name: "seed", Value: int64(1<<62 + 1)}},
				},
			},
			AppRevision: rapid.Uint64().Draw(t, "revision"), Unit: anyName().Draw(t, "unit"),
			Group: rapid.IntRange(0, 1000).Draw(t, "group"),
			Epoch: rapid.Uint64Min(1).Draw(t, "epoch"), AllRanks: anyGrants().Draw(t, "all"),
			Ranks: append(anyGrants().Draw(t, "ranks"), state.RankGrant{Node: "a", Slot: -1}),
			Block: state.Block{
				Node: anyName().Draw(t, "node"),
				Base: rapid.IntRange(0, 60000).Draw(t, "base"),
				Size: rapid.IntRange(0, 5000).Draw(t, "size"),
			},
		}
		req, err := encodeStartRank(want)
		require.NoError(t, err)
		got, err := decodeStartRank(trip(t, req))
		require.NoError(t, err)
		assert.Equal(t, want, got)

		stop := &msg.StopRank{
			Unit: want.Unit, Epoch: want.Epoch,
			Grace: time.Duration(rapid.Int64Min(0).Draw(t, "grace")), Reason: anyWords().Draw(t, "reason"),
		}
		stopped, err := decodeStopRank(trip(t, encodeStopRank(stop)))
		require.NoError(t, err)
		assert.Equal(t, stop, stopped)
	})
}

func TestLogsSurviveTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := msg.LogQuery{
			App: anyName().Draw(t, "app"), Unit: anyName().Draw(t, "unit"),
			Rank: rapid.IntRange(-1, 4096).Draw(t, "rank"),
			Tail: rapid.IntRange(0, 1<<20).Draw(t, "tail"), Since: anyMoment().Draw(t, "since"),
			Follow: rapid.Bool().Draw(t, "follow"),
		}
		got, err := decodeQuery(trip(t, encodeQuery(q)))
		require.NoError(t, err)
		assert.Equal(t, q, got)
		l := msg.LogLine{
			Unit: q.Unit, Rank: q.Rank, Epoch: rapid.Uint64().Draw(t, "epoch"), At: anyMoment().Draw(t, "at"),
			Stream: rapid.SampledFrom([]string{"stdout", "stderr", "dpserve"}).Draw(t, "stream"),
			Text:   anyWords().Draw(t, "text"),
		}
		assert.Equal(t, l, decodeLine(trip(t, encodeLine(&l))))
	})
}

func TestLeaseSurvivesTheWire(t *testing.T) {
	want := msg.Lease{
		TTL: 10 * time.Second, Acked: 7, Leader: "a", Index: 9,
		Waiting: []msg.Waiting{{
			App: "chat", Revision: 3, Reason: "no room",
			Units: map[string]uint64{"chat/0/0": 2, "chat/0/1": 0},
		}},
	}
	got, err := decodeLease(trip(t, encodeLease(want)))
	require.NoError(t, err)
	assert.Equal(t, want, got)
	_, err = decodeLease(&dpservev1.RenewReply{Leader: "a"})
	require.EqualError(t, err, "message from another node: ttl_nano is out of bounds")
	got, err = decodeLease(&dpservev1.RenewReply{
		TtlNano: 1, Leader: "a",
		Waiting: []*dpservev1.Waiting{{}, {App: "chat"}},
	})
	require.NoError(t, err, "no lease is lost over an application that cannot be read")
	assert.Equal(t, []msg.Waiting{{App: "chat"}}, got.Waiting)
}

// TestFreeTextIsMadeFit: an engine may write any bytes; its node must not lose its lease over them.
func TestFreeTextIsMadeFit(t *testing.T) {
	e := msg.UnitEvent{
		Unit: "chat/0", Kind: msg.UnitKilling, Reason: "bad \xff byte",
		LogTail: []string{string(make([]byte, 1<<20)), "caf\xe9"},
	}
	got := trip(t, encodeEvent(&e))
	assert.Equal(t, "bad � byte", got.GetReason())
	assert.Len(t, got.GetLogTail()[0], maxLine)
	assert.Equal(t, "caf�", got.GetLogTail()[1])
}

// TestReportIsBounded: events that do not fit wait, and all units are included, without log lines if
// necessary.
func TestReportIsBounded(t *testing.T) {
	tail := make([]string, maxTail)
	for i := range tail {
		tail[i] = string(make([]byte, maxLine))
	}
	events := make([]msg.UnitEvent, 1024)
	for i := range events {
		events[i] = msg.UnitEvent{
			Node: "a", Number: uint64(i + 1), Unit: "chat/0", Kind: msg.UnitGone,
			LogTail: tail,
		}
	}
	req, err := encodeReport(&msg.NodeReport{
		Node: state.Node{ID: "a", UID: "u"}, Events: events,
		Units: events,
	})
	require.NoError(t, err)
	assert.Less(t, proto.Size(req), maxRequest)
	got, _, err := decodeReport(req)
	require.NoError(t, err)
	assert.Less(t, len(got.Events), 120)
	assert.Greater(t, len(got.Events), 50)
	assert.Equal(t, uint64(len(got.Events)), got.Events[len(got.Events)-1].Number, "the first ones")
	assert.Len(t, got.Units, 1024)
	assert.Len(t, got.Units[0].LogTail, maxTail)
	assert.Empty(t, got.Units[1023].LogTail)
}

func TestUnknownEventsAreLeftOut(t *testing.T) {
	req, err := encodeReport(&msg.NodeReport{Node: state.Node{ID: "a", UID: "u"}, Events: []msg.UnitEvent{
		{Number: 1, Unit: "chat/0", Kind: "dancing"},
		{Number: 2, Unit: "chat/0", Kind: msg.UnitReady},
		{Number: 3, Kind: msg.UnitReady},
	}})
	require.NoError(t, err)
	got, unknown, err := decodeReport(req)
	require.NoError(t, err)
	assert.Equal(t, 2, unknown)
	require.Len(t, got.Events, 1)
	assert.Equal(t, uint64(2), got.Events[0].Number)
}

// TestUnknownKindStaysInTheDigest: a unit whose newest event is of a later version's kind stays in the
// digest.
func TestUnknownKindStaysInTheDigest(t *testing.T) {
	got, unknown, err := decodeReport(&dpservev1.RenewRequest{
		Node: []byte(`{"id":"b","uid":"uid-b","roles":["worker"]}`),
		Units: []*dpservev1.UnitEvent{
			{
				Unit: "chat/0/0", Epoch: 3, Number: 9, Kind: "asleep", Rank: 4, Reason: "of a later version",
				WasReady: true,
			},
			// of a process that has found the unit's engines
			{Unit: "chat/0/1", Epoch: 1, Number: 8, Kind: string(msg.UnitPresent)},
			{Unit: "chat/0/2", Epoch: 1, Number: 7, Kind: string(msg.UnitReady)},
			{Unit: "", Epoch: 1, Number: 6, Kind: "asleep"},
		},
	})
	require.NoError(t, err)
	assert.Equal(t, 2, unknown)
	require.Len(t, got.Units, 3)
	assert.Equal(t, msg.UnitEvent{
		Node: "b", Number: 9, Unit: "chat/0/0", Epoch: 3, Kind: msg.UnitPresent,
		Rank: -1,
	}, got.Units[0])
	assert.Equal(t, msg.UnitPresent, got.Units[1].Kind)
	assert.Equal(t, msg.UnitReady, got.Units[2].Kind)
}

func TestTakenGoesPastWhatWasLeftOut(t *testing.T) {
	sent := func(numbers ...uint64) (out []*dpservev1.UnitEvent) {
		for _, n := range numbers {
			out = append(out, &dpservev1.UnitEvent{Number: n})
		}
		return out
	}
	kept := func(numbers ...uint64) (out []msg.UnitEvent) {
		for _, n := range numbers {
			out = append(out, msg.UnitEvent{Number: n})
		}
		return out
	}
	assert.Equal(t, uint64(4), acknowledged(3, kept(2, 3), sent(1, 2, 3, 4)),
		"4 was left out, all before it is taken")
	assert.Equal(t, uint64(3), acknowledged(2, kept(2, 4), sent(1, 2, 3, 4)), "4 is not taken yet")
	assert.Equal(t, uint64(0), acknowledged(0, kept(1), sent(1, 2)))
	assert.Equal(t, uint64(2), acknowledged(0, nil, sent(1, 2)), "all were left out")
	assert.Equal(t, uint64(9), acknowledged(9, nil, nil))
}

func TestOrdersOutOfBoundsAreRefused(t *testing.T) {
	good := func() *dpservev1.StartRankRequest {
		r, err := encodeStartRank(&msg.StartRank{
			App: &app.Application{Name: "chat"}, Unit: "chat/0",
			Epoch: 1, Ranks: []state.RankGrant{{Node: "a"}},
		})
		require.NoError(t, err)
		return r
	}
	_, err := decodeStartRank(good())
	require.NoError(t, err)
	for what, spoil := range map[string]func(r *dpservev1.StartRankRequest){
		"no application": func(r *dpservev1.StartRankRequest) { r.App = nil },
		"no name":        func(r *dpservev1.StartRankRequest) { r.App = []byte(`{}`) },
		"null":           func(r *dpservev1.StartRankRequest) { r.App = []byte(`null`) },
		"no unit":        func(r *dpservev1.StartRankRequest) { r.Unit = "" },
		"long unit":      func(r *dpservev1.StartRankRequest) { r.Unit = string(make([]byte, maxName+1)) },
		"no epoch":       func(r *dpservev1.StartRankRequest) { r.Epoch = 0 },
		"no ranks":       func(r *dpservev1.StartRankRequest) { r.Ranks = nil },
		"negative rank":  func(r *dpservev1.StartRankRequest) { r.Ranks[0].Rank = -1 },
		"no node":        func(r *dpservev1.StartRankRequest) { r.Ranks[0].Node = "" },
		"ports":          func(r *dpservev1.StartRankRequest) { r.Block.Base, r.Block.Size = 65535, 2 },
		"nil grant":      func(r *dpservev1.StartRankRequest) { r.AllRanks = []*dpservev1.RankGrant{nil} },
	} {
		r := good()
		spoil(r)
		_, err := decodeStartRank(r)
		require.Error(t, err, what)
	}
}

// FuzzConversions: decoding any bytes of a peer does not panic, and a decoded value survives another round
// trip.
func FuzzConversions(f *testing.F) {
	req, err := encodeReport(&msg.NodeReport{
		Node:   state.Node{ID: "a", UID: "u"},
		Events: []msg.UnitEvent{{Number: 2, Unit: "chat/0", Kind: msg.UnitReady}},
	})
	require.NoError(f, err)
	start, err := encodeStartRank(&msg.StartRank{
		App: &app.Application{Name: "chat"}, Unit: "chat/0",
		Epoch: 1, Ranks: []state.RankGrant{{Node: "a"}},
	})
	require.NoError(f, err)
	for _, m := range []proto.Message{
		req, start, encodeStopRank(&msg.StopRank{Unit: "chat/0", Epoch: 1}),
		encodeQuery(msg.LogQuery{Rank: -1}), toProblem(state.ErrNameTaken),
	} {
		data, err := proto.Marshal(m)
		require.NoError(f, err)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var report dpservev1.RenewRequest
		if proto.Unmarshal(data, &report) == nil {
			if r, _, err := decodeReport(&report); err == nil {
				again, err := encodeReport(r)
				require.NoError(t, err)
				_, err = proto.Marshal(again)
				require.NoError(t, err)
			}
		}
		var start dpservev1.StartRankRequest
		if proto.Unmarshal(data, &start) == nil {
			if m, err := decodeStartRank(&start); err == nil {
				require.NotEmpty(t, m.Ranks)
				require.LessOrEqual(t, m.Block.Base+m.Block.Size, 1<<16)
			}
		}
		var stop dpservev1.StopRankRequest
		if proto.Unmarshal(data, &stop) == nil {
			if m, err := decodeStopRank(&stop); err == nil {
				require.GreaterOrEqual(t, m.Grace, time.Duration(0))
			}
		}
		var logs dpservev1.LogsRequest
		if proto.Unmarshal(data, &logs) == nil {
			if q, err := decodeQuery(&logs); err == nil {
				require.GreaterOrEqual(t, q.Rank, -1)
			}
		}
		var p dpservev1.Problem
		if proto.Unmarshal(data, &p) == nil {
			require.Error(t, fromStatus("a", toStatus(fromProblem(&p))))
		}
		var joined dpservev1.JoinReply
		if proto.Unmarshal(data, &joined) == nil {
			j := decodeJoined(&joined, nil)
			require.LessOrEqual(t, len(j.Seeds), maxSeeds)
			require.Error(t, j.check([32]byte{}, &state.Node{}))
		}
	})
}
