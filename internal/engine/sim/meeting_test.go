package sim

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/ports"
)

// Whoever is not of the group gets no seat and holds up nobody: silent callers, junk, another size, another
// key, a seat taken twice.
func TestStrangersAtTheMeetingPoint(t *testing.T) {
	c := fast()
	c.RPCAddr, c.DPSize, c.GroupKey = ports.TakeAddr(t), 2, "key of this start"
	zero := make(chan error, 1)
	var s *Server
	go func() {
		var err error
		s, err = startServer(t.Context(), c)
		zero <- err
	}()
	dial := func() net.Conn {
		var conn net.Conn
		eventually(t, func() bool {
			var err error
			conn, err = net.Dial("tcp", c.RPCAddr)
			return err == nil
		})
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	for range 3 {
		dial() // says nothing
	}
	_, err := dial().Write([]byte(strings.Repeat("x", 64)))
	require.NoError(t, err)
	hello := frame{kind: frameHello, rank: 1, count: 2, value: c.collectiveHash()}
	require.NoError(t, writeHello(dial(), hello, "key of another start"))
	hello.rank = 2
	require.NoError(t, writeHello(dial(), hello, c.GroupKey))
	hello.rank, hello.count = 1, 3
	require.NoError(t, writeHello(dial(), hello, c.GroupKey))
	other := c
	other.DPRank = 1
	one, err := startServer(t.Context(), other)
	require.NoError(t, err)
	defer func() { require.NoError(t, one.Close()) }()
	require.NoError(t, <-zero)
	defer func() { require.NoError(t, s.Close()) }()
	status, _ := ask(t, one, "/v1/completions", wholeBody)
	assert.Equal(t, 200, status)
}

func TestARankOfAnotherStartWaitsInVain(t *testing.T) {
	c := fast()
	c.RPCAddr, c.DPSize, c.GroupKey, c.HandshakeTimeout = ports.TakeAddr(t), 2, "epoch 2",
		300*time.Millisecond
	old := c
	old.DPRank, old.GroupKey = 1, "epoch 1"
	late := make(chan error, 1)
	go func() {
		_, err := startServer(context.Background(), old)
		late <- err
	}()
	_, err := startServer(t.Context(), c)
	require.ErrorContains(t, err, "1 of 2 ranks came")
	require.ErrorContains(t, <-late, "waited for its group in vain")
}

// Sixteen ranks on two addresses, each in a process of its own: one wave steps them all, and the end of one
// ends all.
func TestAGroupOverTwoAddressesStepsTogether(t *testing.T) {
	const ranks = 16
	l, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Skip("this machine has no 127.0.0.2")
	}
	require.NoError(t, l.Close())
	t.Setenv(groupKeyVar, "secret of this start")
	base := ports.Take(t, ranks+1, host(0), host(ranks-1))
	var all []*simProcess
	for rank := range ranks {
		p := launchOn(t, base+rank, "--host", host(rank), "--data-parallel-size", strconv.Itoa(ranks),
			"--data-parallel-rank", strconv.Itoa(rank),
			"--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", strconv.Itoa(base+ranks),
			"--sim-speed", "50", "--sim-step-ms", "0")
		all = append(all, p)
	}
	at := func(rank int) string { return fmt.Sprintf("http://%s:%d", host(rank), all[rank].port) }
	steps := func(rank int) uint64 {
		resp, err := client.Get(at(rank) + "/_sim/stats")
		require.NoError(t, err)
		defer func() { _ = resp.Body.Close() }()
		var s Stats
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&s))
		return s.Steps
	}
	for _, p := range all {
		p.waitReady(t)
	}
	require.Contains(t, tryAsk(at(ranks-1)+"/v1/completions",
		`{"prompt":"x","max_tokens":20,"ignore_eos":true}`), `"length"`)
	for rank := range ranks {
		eventually(t, func() bool { return steps(rank) == 32 }) // two times the sync interval, idle ranks too
	}
	kill := all[ranks/2]
	require.NoError(t, kill.cmd.Process.Kill())
	for rank, p := range all {
		if p != kill {
			// over gloo an idle peer dies of its next request
			_ = tryAsk(at(rank)+"/v1/completions", wholeBody)
		}
	}
	for _, p := range all {
		if p != kill {
			assert.Zero(t, p.exitCode(t))
		}
	}
}

// host puts the first half of the ranks on one address and the rest on another.
func host(rank int) string {
	if rank < 8 {
		return "127.0.0.1"
	}
	return "127.0.0.2"
}
