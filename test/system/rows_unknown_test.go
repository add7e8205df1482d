package system

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/noderpc"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/harness"
)

// standIn is a member of a cluster of which nothing runs but this test: it speaks to the others as another
// release might.
type standIn struct {
	state.Node
	port  *nodeport.Port
	conns map[string]*grpc.ClientConn
}

func newStandIn(t *testing.T, c *harness.Members, name, release string) *standIn {
	t.Helper()
	ip := c.NextIP()
	n := state.Node{
		ID: name, UID: "uid-of-" + name, Address: ip + ":7947", Gossip: ip + ":7946",
		Roles: []state.Role{state.RoleIngress}, Version: release,
	}
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	joined, err := noderpc.Join(ctx, noderpc.JoinConfig{
		Address: c.Up()[0].NodePort(), Token: c.Token(), Node: n,
	})
	require.NoError(t, err)
	creds, err := joined.Files.Credentials()
	require.NoError(t, err)
	port := nodeport.New(nodeport.Config{Credentials: func() *pki.Credentials { return creds }})
	s := &standIn{Node: n, port: port, conns: map[string]*grpc.ClientConn{}}
	t.Cleanup(func() {
		for _, cc := range s.conns {
			assert.NoError(t, cc.Close())
		}
		assert.NoError(t, s.port.Close())
	})
	for _, m := range c.All {
		cc, err := s.port.GRPC(m.NodePort(), "")
		require.NoError(t, err)
		s.conns[m.Name] = cc
	}
	return s
}

// invoke calls a method of a node with a message in any form, and returns the answer.
func invoke(ctx context.Context, cc *grpc.ClientConn, method, text string) (reply []byte, err error) {
	err = cc.Invoke(ctx, method, []byte(text), &reply, grpc.CallContentSubtype(noderpc.CodecName))
	return reply, err
}

// renew renews the stand-in's lease. Its record and its report have more than this version knows, and one
// event is of a kind that nobody knows.
func (s *standIn) renew(ctx context.Context, at string) ([]byte, error) {
	record, err := json.Marshal(s.Node)
	if err != nil {
		return nil, err
	}
	record = append(record[:len(record)-1], `,"colour":"blue"}`...)
	wall, err := time.Now().MarshalJSON()
	if err != nil {
		return nil, err
	}
	return invoke(ctx, s.conns[at], "/dpserve.v1.Control/Renew", fmt.Sprintf(
		`{"Node":%s,"Incarnation":7,"Wall":%s,"Mood":"good",`+
			`"Events":[{"Number":1,"Unit":"wide/0/0","Kind":"sings"}]}`,
		record, wall))
}

// news adds a field that no version knows.
func news[M proto.Message](m M) M {
	raw := protowire.AppendTag(nil, 2026, protowire.BytesType)
	m.ProtoReflect().SetUnknown(protowire.AppendBytes(raw, []byte("what a later release has to say")))
	return m
}

// counted is a counter's sum over the lines of /metrics that have all of the words.
func counted(t *testing.T, m *harness.Member, words ...string) (sum float64) {
	t.Helper()
	_, text, err := m.Ask("GET", "/metrics", "")
	require.NoError(t, err)
lines:
	for line := range strings.Lines(text) {
		for _, w := range words {
			if strings.HasPrefix(line, "#") || !strings.Contains(line, w) {
				continue lines
			}
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(strings.TrimSpace(line),
			' '):]), 64)
		require.NoError(t, err, line)
		sum += v
	}
	return sum
}

// MB6: a member of a later release sends what this one does not know. Upgrades are in upgrade_test.go.
func TestMB6UnknownMessages(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, harness.Each(2), harness.MemberSlots(4), harness.Calm)
	a, b := c.All[0], c.All[1]
	a.Want(spread("wide", 4))
	st := c.Running("wide")
	before := seats(&st)
	load := harness.StartLoad(t, "wide", 4, 20, a.HTTP, b.HTTP)
	load.Reaches(10)

	s := newStandIn(t, c, "new", "v9.0.0")
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	reply, err := s.renew(ctx, a.Name)
	require.NoError(t, err, "it is heard all the same")
	var lease struct{ Acked uint64 }
	require.NoError(t, json.Unmarshal(reply, &lease))
	assert.Equal(t, uint64(1), lease.Acked, "an event that nobody knows is not kept for ever")
	for _, method := range []string{"/dpserve.v1.Control/Dance", "/dpserve.v9.Weather/Tell"} {
		for _, m := range c.All {
			_, err := invoke(ctx, s.conns[m.Name], method, "{}")
			assert.Equal(t, codes.Unimplemented, status.Code(err), "%s: %v", method, err)
		}
	}
	for _, m := range c.All {
		s.posts(ctx, t, m)
		for kind, least := range map[string]float64{"method": 2, "post": 2} {
			// posts have no answer: the node counts them when it has read them
			require.Eventually(t, func() bool {
				return counted(t, m, "dpserve_unknown_messages_total", `kind="`+kind+`"`) >= least
			}, harness.Patience, 10*time.Millisecond, "%s at %s", kind, m.Name)
		}
	}
	for _, kind := range []string{"field", "unit_event"} {
		assert.NotZero(t, counted(t, a, "dpserve_unknown_messages_total", `kind="`+kind+`"`), kind)
	}
	load.Reaches(20)
	y := load.End()
	assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "what clients saw: %v", y)
	st = c.Running("wide")
	assert.Equal(t, before, seats(&st), "nothing was stopped")
	assert.NotContains(t, a.Log()+b.Log(), "panic")
	assert.True(t, a.Runs() && b.Runs())
	c.AllQuiet()
}

// posts follows a node's ranks, and posts to them what they do not know. The stream lives on.
func (s *standIn) posts(ctx context.Context, t *testing.T, m *harness.Member) {
	t.Helper()
	stream, err := dpservev1.NewReplicaClient(s.conns[m.Name]).Subscribe(ctx)
	require.NoError(t, err)
	require.NoError(t, stream.Send(news(&dpservev1.SubscribeRequest{Ingress: s.ID})))
	_, err = stream.Recv()
	require.NoError(t, err)
	for rank := range uint32(4) { // two of them are here
		p := news(&dpservev1.Post{Unit: "wide/0/" + strconv.Itoa(int(rank)), Epoch: 1, Rank: rank})
		require.NoError(t, stream.Send(&dpservev1.SubscribeRequest{Posts: []*dpservev1.Post{p}}))
	}
	require.NoError(t, stream.Send(&dpservev1.SubscribeRequest{Resync: true}))
	for range 3 {
		_, err = stream.Recv()
		require.NoError(t, err, "the stream goes on")
	}
	require.NoError(t, stream.CloseSend())
}
