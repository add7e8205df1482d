package system

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/harness"
)

// pacedClients runs clients that send a fixed number of short requests per second to several nodes, whether
// or not they are answered.
type pacedClients struct {
	stop context.CancelFunc
	wg   sync.WaitGroup
	mu   sync.Mutex
	ok   int
	bad  []string
}

func startRate(t *testing.T, app string, perSecond int, at ...string) *pacedClients {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	l := &pacedClients{stop: stop}
	client := &http.Client{
		Transport: &http.Transport{MaxIdleConnsPerHost: perSecond},
		Timeout:   harness.HungAfter,
	}
	l.wg.Go(func() {
		tick := time.NewTicker(time.Second / time.Duration(perSecond))
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-tick.C:
				l.wg.Go(func() { l.one(client, at[i%len(at)], app) })
			case <-ctx.Done():
				return
			}
		}
	})
	t.Cleanup(func() { stop(); l.wg.Wait(); client.CloseIdleConnections() })
	return l
}

func (l *pacedClients) one(client *http.Client, at, app string) {
	s := func() *harness.Stream {
		req, err := http.NewRequestWithContext(context.Background(), http.MethodPost,
			"http://"+at+"/v1/chat/completions", strings.NewReader(harness.Chat(app, "hello", 2, true)))
		if err != nil {
			return &harness.Stream{Err: err}
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := client.Do(req)
		if err != nil {
			return &harness.Stream{Err: err}
		}
		return harness.ReadStream(resp)
	}()
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.OK() {
		l.ok++
	} else {
		l.bad = append(l.bad, s.String())
	}
}

// end gives the number of good answers and what the others were.
func (l *pacedClients) end() (ok int, bad []string) {
	l.stop()
	l.wg.Wait()
	return l.ok, l.bad
}

// fleet are n simulated engines in this process.
func fleet(t *testing.T, n int) (urls []string) {
	t.Helper()
	for range n {
		cfg, _, err := sim.ParseFlags([]string{
			"--host", "127.0.0.1", "--port", "0", "--served-model-name",
			"edge", "--sim-step-ms", "2",
		})
		require.NoError(t, err)
		s := harness.StartSim(t, cfg)
		urls = append(urls, s.URL())
	}
	return urls
}

// SK6: 40 engines register and leave while their successors register, at 200 requests a second, through both
// nodes of a cluster. Twice here, 20 times in an acceptance run.
func TestSK6FleetSwap(t *testing.T) {
	t.Parallel()
	rounds := 2
	if accepting() {
		rounds = 20
	}
	const engines, perSecond = 40, 200
	c := harness.StartMembers(t, harness.Each(2), harness.Calm)
	c.Expect(harness.EngineFails)
	a, b := c.All[0], c.All[1]
	fleets := [2][]string{fleet(t, engines), fleet(t, engines)}
	a.Want(edgeApp(fleets[0]...))
	registered(c, fleets[0])
	load := startRate(t, "edge", perSecond, a.HTTP, b.HTTP)
	for i := range rounds {
		old, young := fleets[i%2], fleets[(i+1)%2]
		began := time.Now()
		each(young, func(n int, u string) {
			change(t, c.All[n%2], http.MethodPost, "", fmt.Sprintf(`{"url": %q}`, u))
		})
		added := time.Since(began)
		each(old, func(n int, u string) {
			change(t, c.All[n%2], http.MethodDelete, "?url="+url.QueryEscape(u), "")
		})
		registered(c, young)
		t.Logf("40 engines registered in %s, the others were gone after %s", added.Round(time.Millisecond),
			time.Since(began).Round(time.Millisecond))
	}
	ok, bad := load.end()
	assert.Empty(t, bad)
	t.Logf("%d answers", ok)
	c.AllQuiet()
}

// each calls f for every URL, a few at once.
func each(urls []string, f func(n int, url string)) {
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for n := w; n < len(urls); n += 4 {
				f(n, urls[n])
			}
		})
	}
	wg.Wait()
}

func change(t *testing.T, m *harness.Member, method, query, body string) {
	t.Helper()
	code, text, err := m.Ask(method, "/api/v1/apps/edge/ranks"+query, body)
	if assert.NoError(t, err) {
		assert.Equal(t, http.StatusAccepted, code, text)
	}
}

// registered waits until exactly these engines are in the application, ready, and in every node's router: no
// entry is stale.
func registered(c *harness.Members, urls []string) {
	c.T.Helper()
	want := map[string]bool{}
	for _, u := range urls {
		want[u] = true
	}
	ranks := map[string]bool{}
	c.Eventually(fmt.Sprintf("%d engines are registered and no other", len(urls)), func() error {
		st, err := c.All[0].AppOf("edge")
		if err != nil {
			return err
		}
		clear(ranks)
		for seat, k := range seats(&st) {
			if !want[k.URL] || k.Phase != "ready" {
				return fmt.Errorf("rank %s: %s %s", seat, k.Phase, k.URL)
			}
			ranks[seat] = true
		}
		if len(ranks) != len(urls) || st.Status != "RUNNING" {
			return fmt.Errorf("%d ranks: %w", len(ranks), errStatus(&st))
		}
		return nil
	})
	for _, m := range c.All {
		c.Eventually("the router of "+m.Name+" knows them all", func() error {
			route, err := m.Route("edge")
			if err != nil {
				return err
			}
			for r, state := range route {
				if !ranks[r] || state != "ok" {
					return fmt.Errorf("rank %s is %s", r, state)
				}
			}
			if len(route) != len(ranks) {
				return fmt.Errorf("it knows %d of %d", len(route), len(ranks))
			}
			return nil
		})
	}
}
