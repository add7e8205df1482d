package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/state"
)

// newTestLog is raft's log of a node that knows the name of one other.
func newTestLog(level slog.Level) (*raftLog, *bytes.Buffer) {
	var out bytes.Buffer
	to := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: level}))
	return newRaftLog(to, func(uid string) string { return map[string]string{"uid3": "gpu-3"}[uid] }, never),
		&out
}

func TestRaftLogNamesNodes(t *testing.T) {
	l, out := newTestLog(slog.LevelDebug)
	l.Warn("failed to contact", "server-id", raft.ServerID("uid3"), "time", time.Second)
	l.With("peer", raft.ServerAddress("uid3")).Info("entering follower state", "leader-id",
		raft.ServerID("uid9"))
	l.Error("failed to appendEntries to", "peer", raft.Server{ID: "uid3", Address: "uid3"}, "error",
		errors.New("refused"))
	assert.NotContains(t, out.String(), "uid3")
	assert.Equal(t, 3, strings.Count(out.String(), "gpu-3"), out)
	assert.Contains(t, out.String(), "leader-id=uid9", "a node without a known name")
}

// HF31: the log does not mention a peer that is down for a moment. A peer that stays away is one warning in
// ten minutes, for all kinds of messages.
func TestRaftWarnsOfAPeerThatStaysAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, out := newTestLog(slog.LevelInfo)
		fail := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
				l.Error("failed to heartbeat to", "peer", raft.ServerAddress("uid3"), "error",
					errors.New("refused"))
				l.Error("failed to make requestVote RPC", "target", raft.Server{ID: "uid3"}, "error",
					errors.New("refused"))
			}
		}
		for range 5 {
			fail(4 * time.Second)
			time.Sleep(time.Minute) // it is back
		}
		assert.Empty(t, out.String())
		fail(9 * time.Minute)
		require.Equal(t, 1, strings.Count(out.String(), "\n"), out)
		assert.Contains(t, out.String(),
			`level=WARN msg="consensus does not reach a node" component=cluster peer=gpu-3 for=5s `+
				"err=refused")
		fail(10 * time.Minute)
		assert.Equal(t, 2, strings.Count(out.String(), "\n"), out)
	})
}

// TestRaftTellsTwoShortAbsencesApart: a node that answers between two failures was not away in between.
func TestRaftTellsTwoShortAbsencesApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, out := newTestLog(slog.LevelInfo)
		answered := time.Time{}
		l.lastAnswer = func(string) time.Time { return answered }
		fail := func() {
			l.Error("failed to heartbeat to", "peer", raft.ServerAddress("uid3"), "error",
				errors.New("refused"))
		}
		fail()
		time.Sleep(time.Second)
		answered = time.Now()
		time.Sleep(6 * time.Second)
		fail()
		assert.Empty(t, out.String())
		time.Sleep(peerPatience)
		fail()
		assert.Contains(t, out.String(), "consensus does not reach a node")
		assert.Contains(t, out.String(), "for=5s")
	})
}

// TestRaftPeerOfANewerTermHasAnswered: raft logs it as an error, but it is an answer.
func TestRaftPeerOfANewerTermHasAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, out := newTestLog(slog.LevelInfo)
		for range 20 {
			l.Error("peer has newer term, stopping replication", "peer", raft.Server{ID: "uid3"})
			time.Sleep(time.Second)
		}
		assert.Empty(t, out.String())
	})
}

// TestNetworkKnowsWhoAnswered: a node has answered when it accepted a heartbeat and entries; one of them is
// not enough.
func TestNetworkKnowsWhoAnswered(t *testing.T) {
	n := &network{logs: map[raft.ServerID]logEnd{}}
	assert.Zero(t, n.lastAnswer("uid3"))
	early, late := time.Unix(100, 0), time.Unix(200, 0)
	n.logs["uid3"] = logEnd{beat: late}
	assert.Zero(t, n.lastAnswer("uid3"), "a disk that hangs answers heartbeats")
	n.logs["uid3"] = logEnd{beat: late, entries: early}
	assert.Equal(t, early, n.lastAnswer("uid3"))
	n.logs["uid3"] = logEnd{beat: early, entries: late}
	assert.Equal(t, early, n.lastAnswer("uid3"))
}

// TestRaftErrorsOfOtherKinds: a connection that the other end closed is no error, nor is a transport that was
// told to stop. Any other error is one line in 30 s.
func TestRaftErrorsOfOtherKinds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, out := newTestLog(slog.LevelInfo)
		l.Error("failed to decode incoming command", "error",
			&net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET})
		l.Error("failed to decode incoming command", "error", raft.ErrTransportShutdown)
		l.Error("failed to send snapshot to", "error", fmt.Errorf("a snapshot: %w", raft.ErrRaftShutdown))
		assert.Empty(t, out.String())
		for range 60 {
			l.Error("failed to decode incoming command", "error", errors.New("unknown rpc type 77"))
			time.Sleep(500*time.Millisecond + time.Millisecond)
		}
		assert.Equal(t, 1, strings.Count(out.String(), "level=ERROR"), out)
		l.Error("failed to decode incoming command", "error", errors.New("unknown rpc type 77"))
		assert.Equal(t, 2, strings.Count(out.String(), "level=ERROR"), out)
	})
}

// TestNamesOutliveTheState: a node that was removed keeps its name, also where the log has been cut off
// behind a snapshot, and an error of dialing it has the name.
func TestNamesOutliveTheState(t *testing.T) {
	old := state.New()
	old.Nodes = map[string]*state.Node{"gpu-3": {ID: "gpu-3", UID: "uid3"}}
	data, err := old.Encode()
	require.NoError(t, err)
	f := newFSM()
	book := addressBook{state: f.State}
	f.restored = book.readState
	require.NoError(t, f.Restore(io.NopCloser(bytes.NewReader(data))))
	f.published.Store(state.New())
	assert.Equal(t, "gpu-3", book.nameOf("uid3"))
	_, err = (&layer{resolve: book.addresses, nameOf: book.nameOf}).Dial("uid3", time.Second)
	require.EqualError(t, err, "no address is known of node gpu-3")
}

// noPeers is a Layer without other nodes.
type noPeers struct{ net.Listener }

func (noPeers) Dial(string, string, time.Duration) (net.Conn, error) { return nil, net.ErrClosed }

// TestEntriesAreNotPipelined: raft's pipeline may never send entries again to a node that has come back
// (transportInFlight), so entries are sent one message at a time.
func TestEntriesAreNotPipelined(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	n := newNetwork(Config{Layer: noPeers{listener}, Log: slog.New(slog.DiscardHandler)}, "uid",
		func(string) []string { return nil }, func(string) string { return "" })
	defer n.closeAll()
	_, err = n.AppendEntriesPipeline("other", "other")
	require.ErrorIs(t, err, raft.ErrPipelineReplicationNotSupported)
}
