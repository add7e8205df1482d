package system

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// handEngine starts a simulated engine by hand and returns its URL.
func handEngine(t *testing.T) string {
	t.Helper()
	addr := ports.TakeAddr(t)
	_, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	harness.Run(t, "engine", "sim", "--host", "127.0.0.1", "--port", port, "--served-model-name", "edge",
		"--sim-step-ms", "5")
	deadline := time.Now().Add(harness.Patience)
	for {
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr)
		if err == nil {
			require.NoError(t, c.Close())
			return "http://" + addr
		}
		require.True(t, time.Now().Before(deadline), "the engine does not listen: %v", err)
		time.Sleep(10 * time.Millisecond)
	}
}

func edgeApp(urls ...string) string {
	var ranks []string
	for _, u := range urls {
		ranks = append(ranks, fmt.Sprintf("{url: %q}", u))
	}
	return "applications: [{name: edge, model: {id: edge}, routing: {policy: round-robin}, " +
		"engine: {kind: attach, ranks: [" + strings.Join(ranks, ", ") + "]}}]"
}

// load runs streams until it is ended, and keeps what came of them.
type load struct {
	stop context.CancelFunc
	wg   sync.WaitGroup
	mu   sync.Mutex
	good map[string]int // per rank
	bad  []string
}

func startLoad(r *harness.Real, streams int) *load {
	ctx, stop := context.WithCancel(context.Background())
	l := &load{stop: stop, good: map[string]int{}}
	for range streams {
		l.wg.Go(func() {
			for ctx.Err() == nil {
				s := r.StreamChat(context.Background(), "edge", "hello", 20)
				l.mu.Lock()
				if s.OK() && s.Chunks > 0 {
					l.good[s.Rank]++
				} else {
					l.bad = append(l.bad, s.String())
				}
				l.mu.Unlock()
			}
		})
	}
	r.T.Cleanup(func() { stop(); l.wg.Wait() })
	return l
}

// serves waits until each of the ranks has served n more streams.
func (l *load) serves(r *harness.Real, n int, ranks ...string) {
	r.T.Helper()
	l.mu.Lock()
	before := map[string]int{}
	for k, v := range l.good {
		before[k] = v
	}
	l.mu.Unlock()
	r.Eventually(func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, k := range ranks {
			if l.good[k] < before[k]+n {
				return fmt.Errorf("rank %s served %d: %v, errors %v", k, l.good[k]-before[k], l.good, l.bad)
			}
		}
		return nil
	}, "streams on "+strings.Join(ranks, ", "))
}

func (l *load) end(t *testing.T) {
	t.Helper()
	l.stop()
	l.wg.Wait()
	assert.Empty(t, l.bad, "no stream fails")
}

// rankEpochs are the epoch and the incarnation of every ready rank.
func rankEpochs(r *harness.Real) map[string]string {
	out := map[string]string{}
	for _, u := range r.App("edge").Units {
		for _, k := range u.Ranks {
			if k.Phase == "ready" {
				out[u.Unit] = fmt.Sprintf("%d %s", k.Epoch, k.Incarnation)
			}
		}
	}
	return out
}

// SK6: Ranks come and go under load: no stream notices, whoever stays is not touched, and the change outlives
// the node.
func TestRanksComeAndGo(t *testing.T) {
	t.Parallel()
	first, second := handEngine(t), handEngine(t)
	dir := harness.DataDir(t)
	r := harness.StartIn(t, dir)
	r.Deploy(edgeApp(first))
	r.WaitStatus("edge", "RUNNING")
	was := rankEpochs(r)

	l := startLoad(r, 6)
	l.serves(r, 5, "0/0")
	code, body := r.Do(http.MethodPost, "/api/v1/apps/edge/ranks", fmt.Sprintf(`{"url": %q}`, second))
	require.Equal(t, http.StatusAccepted, code, body)
	assert.Contains(t, body, `"rank":1,"url":"`+second+`"`)
	l.serves(r, 5, "0/0", "0/1")
	st := r.WaitStatus("edge", "RUNNING")
	assert.Equal(t, 2, st.DPSize)
	assert.Equal(t, 2, st.Desired)
	assert.Equal(t, was["edge/0/0"], rankEpochs(r)["edge/0/0"], "the first one was not touched")
	both := rankEpochs(r)

	code, body = r.Do(http.MethodDelete, "/api/v1/apps/edge/ranks?url="+url.QueryEscape(first), "")
	require.Equal(t, http.StatusAccepted, code, body)
	r.Eventually(func() error {
		if n := len(r.App("edge").Units); n != 1 {
			return fmt.Errorf("%d units", n)
		}
		return nil
	}, "the first rank drained and gone")
	l.serves(r, 5, "0/1")
	l.end(t)
	assert.Equal(t, both["edge/0/1"], rankEpochs(r)["edge/0/1"],
		"the second one kept its number, epoch and incarnation")
	_, ok := r.Rank("edge", 0, 0)
	assert.False(t, ok)
	r.Quiet()

	r.Stop()
	r = harness.StartIn(t, dir)
	st = r.WaitStatus("edge", "RUNNING")
	require.Len(t, st.Units, 1)
	k := st.Units[0].Ranks[0]
	assert.Equal(t, 1, k.Rank, "the number outlives the node too")
	assert.Equal(t, second, k.URL)
	assert.True(t, r.StreamChat(t.Context(), "edge", "hello", 3).OK())
	r.Quiet()
}
