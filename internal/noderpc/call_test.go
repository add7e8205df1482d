package noderpc

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

// samples are messages of every type that crosses nodes.
func samples() []sample {
	at := time.Unix(1_700_000_000, 7).UTC()
	record := state.Node{
		ID: "a", UID: "uid-a", Address: "10.0.0.1:7947", Roles: []state.Role{state.RoleWorker}, Level: 1,
		Resources: state.Resources{Slots: 8, Devices: []int{0, 1}, Near: [][]int{{0, 1}}, PortHi: 9},
	}
	event := msg.UnitEvent{
		Node: "a", Number: 1<<63 + 1, Unit: "chat/0/0", Epoch: 3, Kind: msg.UnitGone, Rank: -1,
		Reason: "bad \"quotes\"\n", LogTail: []string{"<last>", "words"}, Exit: "code 1",
		WasReady: true, Asked: true, At: at,
	}
	grants := []state.RankGrant{{Rank: 3, Node: "a", Slot: -1, Devices: []int{4}, Share: 2500}}
	return []sample{
		sampleOf(msg.NodeReport{
			Node: record, Incarnation: 1<<64 - 1, Wall: at, Index: 9, Trouble: "full", Stopping: true,
			AfterStop: true, RestartGrace: time.Minute, Events: []msg.UnitEvent{event},
			Units: []msg.UnitEvent{event},
		}),
		sampleOf(msg.Lease{
			TTL: 10 * time.Second, Acked: 7, Leader: "a", Index: 9,
			GossipKey: make([]byte, state.GossipKeySize),
			Waiting: []msg.Waiting{
				{App: "chat", Revision: 3, Reason: "no room", Units: map[string]uint64{"u": 2}},
			},
		}),
		sampleOf(msg.StartRank{
			App: &app.Application{Name: "chat", NumGroups: 2, Engine: app.Engine{
				Kind: app.KindSim, Args: app.Args{{Name: "seed", Value: int64(1<<62 + 1)}},
			}},
			AppRevision: 4, Unit: "chat/0", Group: 1, Epoch: 1<<63 + 1, Ranks: grants, AllRanks: grants,
			Block: state.Block{Node: "a", Base: 60_000, Size: 64},
		}),
		sampleOf(msg.StopRank{Unit: "chat/0", Epoch: 1, Grace: time.Minute, Reason: "superseded"}),
		sampleOf(msg.Assign{App: "chat", Group: 1, ReplicaID: "chat.1.0"}),
		sampleOf(msg.AssignReply{Rank: 1, Epoch: 2, DPSize: 3}),
		sampleOf(msg.Publish{Unit: "moe/0", Epoch: 1, Rank: 2, Addr: "10.0.0.1", Port: 7, Settings: "s"}),
		sampleOf(msg.Await{Unit: "moe/0", Epoch: 1, Rank: 2}),
		sampleOf(msg.AwaitReply{Addr: "10.0.0.1", Port: 7, Settings: "s"}),
		sampleOf(msg.LogQuery{App: "chat", Unit: "chat/0", Rank: -1, Tail: 3, Since: at, Follow: true}),
		sampleOf(msg.LogLines{{Unit: "chat/0", Rank: 1, Epoch: 2, At: at, Stream: "stdout", Text: "line"}}),
		sampleOf(msg.NodeCounts{
			Ranks:  map[string][]client.RankStatus{"chat/0": {{Rank: 1, Node: "b", TokensPerS: 2.5}}},
			Queued: map[string]int{"chat": 4},
			Pairs:  map[string]client.PDStatus{"pd": {Transfer: "nixl", Met: 2}},
			Traffic: map[string]*client.Traffic{"chat": {
				Requests: 9, TTFT: client.Histogram{Bounds: []float64{.5}, Counts: []uint64{8, 1}},
			}},
		}),
		sampleOf([]msg.GroupMessage{{
			Kind: msg.GroupHold, App: "demo", Group: 2, ID: 1<<63 + 1, Tokens: 9000, Age: time.Second,
			Client: 5, Hits: []routing.Hit{{Rank: 3, Tokens: 64, Host: 16, Disk: 32}}, Rank: routing.ID(2, 1),
		}}),
		sampleOf(state.Command{DeleteApp: &state.DeleteApp{Name: "chat"}}),
		sampleOf(state.Result{Revision: 1, Apps: map[string]uint64{"chat": 2}, Index: 3}),
		sampleOf(certificate{Certificate: []byte("pem"), Authority: []byte("pem")}),
		sampleOf(joinRequest{Token: "secret", CSR: []byte("der"), Node: record}),
		sampleOf(Joined{Cluster: "c", Files: pki.Files{Cert: []byte("pem")}, Seeds: []state.Node{record}}),
		sampleOf(cluster.Update{Leader: "uid-a", State: json.RawMessage(`{"index":3}`)}),
	}
}

// sample is a message with its type.
type sample struct {
	data     []byte
	survives func(t require.TestingT)
	// readsAny decodes any bytes: they are refused, or a message that survives.
	readsAny func(t require.TestingT, data []byte)
}

func sampleOf[M any](m M) sample {
	data, err := encode(&m)
	if err != nil {
		panic(err)
	}
	return sample{
		data: data,
		survives: func(t require.TestingT) {
			got, err := decode[M](data, func(what string) { require.Fail(t, "unknown "+what) })
			require.NoError(t, err, "%T", m)
			assert.Equal(t, &m, got)
		},
		readsAny: func(t require.TestingT, data []byte) {
			got, err := decode[M](data, nil)
			if err != nil {
				code := problem.CodeOf(fromStatus("b", toStatus(err)))
				require.NotEqual(t, problem.Internal, code, "%v", err)
				return
			}
			again, err := encode(got)
			if err != nil {
				return // a time that JSON cannot say
			}
			_, err = decode[M](again, nil)
			require.NoError(t, err, "%T %s", m, data)
		},
	}
}

func TestMessagesSurviveTheWire(t *testing.T) {
	for _, s := range samples() {
		s.survives(t)
	}
}

// FuzzMessages: any bytes of a node are refused with a typed error, or are a message within its bounds.
func FuzzMessages(f *testing.F) {
	all := samples()
	for i, s := range all {
		f.Add(uint8(i), s.data)
	}
	f.Add(uint8(0), []byte(`null`))
	f.Fuzz(func(t *testing.T, which uint8, data []byte) { all[int(which)%len(all)].readsAny(t, data) })
}

// MB6: unknown fields of a message are counted and passed over, but an unknown command for the log is
// refused.
func TestFieldsOfLaterVersionsArePassedOver(t *testing.T) {
	counted := ""
	got, err := decode[msg.StopRank]([]byte(`{"Unit":"chat/0","Epoch":2,"Mood":"blue"}`),
		func(what string) { counted += what })
	require.NoError(t, err)
	assert.Equal(t, &msg.StopRank{Unit: "chat/0", Epoch: 2}, got)
	assert.Equal(t, "field", counted)

	_, err = decode[state.Command]([]byte(`{"dance":{}}`), func(what string) { counted += what })
	require.ErrorIs(t, err, state.ErrUnknownCommand, "the log's rule is strict")
	assert.Equal(t, "field", counted)
	_, err = decode[msg.StopRank]([]byte(`{"Unit":7}`), nil)
	assert.Equal(t, problem.InvalidArgument, problem.CodeOf(err))
	require.ErrorContains(t, err, "read a message of another node: ")
}
