package system

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/harness"
	"github.com/dpserve/dpserve/test/ports"
)

// pairPrompts are bodies of streamed chats with the text that one engine alone gives for each.
type pairPrompts struct {
	bodies []string
	texts  map[string]string
}

// knownTexts asks a simulated engine of its own for the texts of n prompts of about length tokens.
func knownTexts(t *testing.T, n, length, tokens int) *pairPrompts {
	t.Helper()
	addr := ports.TakeAddr(t)
	_, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	cfg, _, err := sim.ParseFlags([]string{
		"--host", "127.0.0.1", "--port", port, "--served-model-name", "pd", "--sim-speed", "1000",
		"--max-model-len", "32768",
	})
	require.NoError(t, err)
	harness.StartSim(t, cfg)
	p := &pairPrompts{texts: map[string]string{}}
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	for i := range n {
		body := harness.Chat("pd", fmt.Sprintf("prompt %d", i)+strings.Repeat(" and it goes on", length/4),
			tokens, true)
		s := askAt(&http.Client{Transport: transport}, addr, body)
		require.True(t, s.OK(), s)
		p.bodies, p.texts[body] = append(p.bodies, body), s.Text
	}
	return p
}

// askAt sends a chat to an endpoint or an engine, and reads the answer to its end.
func askAt(c *http.Client, addr, body string) *harness.Stream {
	began := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), harness.HungAfter)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/v1/chat/completions",
		strings.NewReader(body))
	if err != nil {
		return &harness.Stream{Err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(req)
	if err != nil {
		return &harness.Stream{Err: err}
	}
	return harness.ReadAnswer(resp, began)
}

// pairLoad are clients that ask for known texts until end.
type pairLoad struct {
	stop chan struct{}
	wg   sync.WaitGroup
	once sync.Once

	mu      sync.Mutex
	ok      int
	lost    int            // ended with an error after the first byte
	ways    map[string]int // remote, local, fallback
	ranks   map[string]int // "prefill>decode"
	refused []string       // errors before the first byte
	wrong   []string       // texts that are not those of an unbroken run
}

// startPairLoad runs clients that send the prompts in turn to each endpoint.
func startPairLoad(t *testing.T, p *pairPrompts, clients int, at ...string) *pairLoad {
	t.Helper()
	l := &pairLoad{stop: make(chan struct{}), ways: map[string]int{}, ranks: map[string]int{}}
	c := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: clients}}
	for n := range clients {
		l.wg.Go(func() {
			for i := n; ; i++ {
				select {
				case <-l.stop:
					return
				default:
				}
				body := p.bodies[i%len(p.bodies)]
				l.note(p.texts[body], askAt(c, at[i%len(at)], body))
			}
		})
	}
	t.Cleanup(func() { l.end(); c.CloseIdleConnections() })
	return l
}

func (l *pairLoad) note(want string, s *harness.Stream) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !strings.HasPrefix(want, s.Text) || s.OK() && s.Text != want {
		l.wrong = append(l.wrong, fmt.Sprintf("%v\ngot  %q\nwant %q", s, s.Text, want))
	}
	switch {
	case s.OK():
		l.ok++
		l.ways[s.Way]++
		l.ranks[s.Prefill+">"+s.Rank]++
	case s.FirstByte():
		l.lost++
	default:
		l.refused = append(l.refused, s.String())
	}
}

// end lets the requests under way end. Idempotent.
func (l *pairLoad) end() {
	l.once.Do(func() { close(l.stop) })
	l.wg.Wait()
}

// count is how many answers went one way so far; "" = all.
func (l *pairLoad) count(way string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if way == "" {
		return l.ok
	}
	return l.ways[way]
}

// more waits for n more answers of a way.
func (l *pairLoad) more(t *testing.T, n int, way string) {
	t.Helper()
	from := l.count(way)
	err := harness.WaitFor(harness.Patience, 20*time.Millisecond, func() error {
		if got := l.count(way) - from; got < n {
			return fmt.Errorf("%d of %d answers (%s): %v", got, n, way, l)
		}
		return nil
	})
	require.NoError(t, err)
}

func (l *pairLoad) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return fmt.Sprintf("ok %d, ways %v, lost %d, refused %q, wrong %d", l.ok, l.ways, l.lost,
		l.refused[:min(5, len(l.refused))], len(l.wrong))
}

// check ends the load: no text is wrong, no request failed before its first byte, and at most so many streams
// were lost.
func (l *pairLoad) check(t *testing.T, mostLost int) {
	t.Helper()
	l.end()
	t.Logf("%v", l)
	assert.Empty(t, l.wrong[:min(3, len(l.wrong))], "%d texts are wrong", len(l.wrong))
	assert.Empty(t, l.refused[:min(5, len(l.refused))], "%d requests failed before their first byte",
		len(l.refused))
	assert.LessOrEqual(t, l.lost, mostLost, "streams")
}

// allMet says whether every pair of an application's ranks has met.
func allMet(st *client.AppStatus) error {
	if st.PD == nil {
		return fmt.Errorf("%s: status says nothing about pairs", st.Status)
	}
	// the ingress may not know every rank yet that the status calls ready
	pairs := readyRanks(st, "prefill") * readyRanks(st, "decode")
	if pairs == 0 || st.PD.All != pairs || st.PD.Met != pairs {
		return fmt.Errorf("%s, %d of %d pairs have met, of %d: %s", st.Status, st.PD.Met, st.PD.All, pairs,
			st.PD.Pairs)
	}
	return nil
}

// unitsOf are the ranks of units of one rank, by unit.
func unitsOf(st *client.AppStatus) map[string]client.RankStatus {
	out := map[string]client.RankStatus{}
	for _, u := range st.Units {
		for _, k := range u.Ranks {
			out[u.Unit] = k
		}
	}
	return out
}

// readyRanks counts the ready ranks of a pool.
func readyRanks(st *client.AppStatus, pool string) int {
	n := 0
	for unit, k := range unitsOf(st) {
		if strings.HasPrefix(unit, "pd."+pool+"/") && k.Phase == "ready" {
			n++
		}
	}
	return n
}
