package cluster

import (
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"
)

// nowhere is a Layer without other nodes.
type nowhere struct{ net.Listener }

func (nowhere) Dial(string, string, time.Duration) (net.Conn, error) { return nil, net.ErrClosed }

// Raft's pipeline may leave a node that has come back without entries for as long as its leader leads
// (transportInFlight): entries go one message at a time.
func TestEntriesAreNotPipelined(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	n := newNetwork(Config{Layer: nowhere{listener}, Log: slog.New(slog.DiscardHandler)}, "uid",
		func(string) []string { return nil }, func(string) string { return "" })
	defer n.closeAll()
	_, err = n.AppendEntriesPipeline("other", "other")
	require.ErrorIs(t, err, raft.ErrPipelineReplicationNotSupported)
}
