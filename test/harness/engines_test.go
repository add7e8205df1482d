package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
	"github.com/dpserve/dpserve/test/memnet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stored counts the blocks of a rank's events.
type stored struct {
	mu     sync.Mutex
	blocks int
	resets int
}

func (s *stored) Stored(e *kvevents.Stored) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.blocks += len(e.Hashes)
}
func (*stored) Removed(*kvevents.Removed) {}
func (*stored) Cleared()                  {}
func (s *stored) Reset(bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.blocks, s.resets = 0, s.resets+1
}

// Engines in this process publish their KV events on the memory network, on fake time: what the profile
// renders is all they need. One that begins again at the same place is followed again.
func TestEnginesInThisProcessPublishEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var net0 memnet.Network
		engines := newEngines(&net0)
		a := &app.Application{
			Name: "chat", Model: app.Model{ID: "chat"}, NumGroups: 1,
			DataParallel: app.DataParallel{DPSize: 1, Coupling: app.Independent},
			Engine: app.Engine{Kind: app.KindSim, Args: app.Args{{
				Name:  "block_size",
				Value: int64(16),
			}}},
			Routing: app.Routing{Policy: "scoring"},
		}
		l, err := engine.Render(&engine.Spec{App: a, Base: 20000, Executable: "dpserve"}, nil)
		require.NoError(t, err)
		seen := &stored{}
		sub, err := kvevents.New(kvevents.Config{
			Endpoints: kvevents.Endpoints{Bind: l.Events.Bind, Replay: l.Events.Replay}, Sink: seen,
			Dial: func(ctx context.Context, addr string) (net.Conn, error) {
				return net0.DialContext(ctx, "tcp", addr)
			},
			Listen: func(_ context.Context, addr string) (net.Listener, error) { return net0.Listen(addr) },
		})
		require.NoError(t, err)
		require.NoError(t, sub.Start(t.Context()))
		client := &http.Client{Transport: &http.Transport{DialContext: net0.DialContext}}
		for range 2 {
			p, err := engines.Start(t.Context(), node.LaunchOrder{Launch: l}, io.Discard, io.Discard)
			require.NoError(t, err)
			time.Sleep(time.Second)
			ask(t, client, l.URL, 16*4*5) // five blocks; a token is up to four bytes
			time.Sleep(5 * time.Second)
			seen.mu.Lock()
			assert.Equal(t, 5, seen.blocks)
			seen.mu.Unlock()
			client.CloseIdleConnections()
			p.Kill()
			<-p.Exited()
		}
		require.NoError(t, sub.Close())
		assert.Positive(t, seen.resets)
		assert.Empty(t, engines.Live())
		ports := engine.PortsOf(20000, 1)
		for _, port := range []int{ports.HTTP(0), ports.Replay(0), ports.KV(0)} {
			ln, err := net0.Listen(fmt.Sprintf("127.0.0.1:%d", port))
			require.NoError(t, err, "left bound")
			require.NoError(t, ln.Close())
		}
	})
}

func ask(t *testing.T, c *http.Client, url string, bytes int) {
	t.Helper()
	body := fmt.Sprintf(`{"model":"chat","prompt":%q,"max_tokens":1}`, strings.Repeat("x", bytes))
	resp, err := c.Post(url+"/v1/completions", "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode)
}

// A whole node in this process whose policy reads the KV index: events of every rank arrive at its DPServer.
func TestAClusterInThisProcessFollowsEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(t)
		c.Deploy(`applications:
  - name: chat
    model: {id: chat}
    engine: {kind: sim, args: {block_size: 16}}
    data_parallel: {dp_size: 2, coupling: lockstep}
    routing: {policy: scoring}
`)
		c.WaitStatus("chat", "RUNNING")
		for rank := range 2 {
			ask(t, c.client, c.Rank("chat", 0, rank).URL, 16*4*5)
		}
		c.Until("events of both ranks", func() error {
			for rank := range 2 {
				if kv := c.Rank("chat", 0, rank).KV; kv == nil || kv.Events == nil || kv.Events.Batches == 0 {
					return fmt.Errorf("rank %d: %+v", rank, kv)
				}
			}
			return nil
		})
		c.Delete("chat")
		c.Until("chat gone", func() error {
			if _, ok := c.App("chat"); ok {
				return errStays
			}
			return nil
		})
	})
}

var errStays = errors.New("it is there")
