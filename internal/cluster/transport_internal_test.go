package cluster

import (
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"
)

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
