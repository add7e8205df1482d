package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/controller"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/internal/server"
	"github.com/dpserve/dpserve/test/memnet"
)

// Cluster runs whole nodes in this process: the binary's own wiring, with network, raft log and engines in
// memory. It runs in a synctest bubble, so time is fake: it stands still while a goroutine computes, and
// waiting costs nothing. The methods of a Cluster ask the first node, those of a Peer another node. A Cluster
// is safe for concurrent use by the goroutines of its bubble.
type Cluster struct {
	*Expected
	T       testing.TB
	Net     *memnet.Network
	Engines *Engines
	Journal *Journal

	node   *server.Node
	client *http.Client
	peers  []*Peer
	made   settings // how nodes are made
}

// Option changes how New builds a cluster.
type Option func(*settings)

type settings struct {
	nodes int
	disk  string           // of data dirs; "" = in memory
	roles map[int][]string // by node; none = all
	grows bool             // it is a cluster even with one node

	machine func(i int) (gpus string, labels map[string]string) // see Machine
	config  server.Config
}

// Nodes sets the number of nodes. One node runs alone. Several nodes form a cluster before New returns.
func Nodes(n int) Option { return func(s *settings) { s.nodes = n } }

// Timers sets the timers of --timers.
func Timers(t map[string]time.Duration) Option { return func(s *settings) { s.config.Timers = t } }

// Grows starts a single node as the first of a cluster, so that others can join.
func Grows() Option { return func(s *settings) { s.grows = true } }

// Slots sets how many ranks fit on a node.
func Slots(n int) Option { return func(s *settings) { s.config.Slots = n } }

// EnginesLiveOn has engines outlive their node, unless it is asked to stop, as under `dpserve start`.
func EnginesLiveOn() Option { return func(s *settings) { s.config.Shims = true } }

// Metrics sets --metrics-bind.
func Metrics(addr string) Option { return func(s *settings) { s.config.MetricsBind = addr } }

// Resolver sets how the leader resolves services.
func Resolver(r controller.Resolver) Option { return func(s *settings) { s.config.Resolver = r } }

// New starts a cluster inside a synctest bubble and ends it with the test. At the end no request may be open,
// no goroutine may run, and the journal may hold no WARN or ERROR line that the test does not expect. Without
// options the cluster is one node with every default.
func New(t testing.TB, options ...Option) *Cluster {
	t.Helper()
	s := settings{nodes: 1, roles: map[int][]string{}, config: server.DefaultConfig()}
	s.config.GPUs = "none" // whatever this machine has
	for _, o := range options {
		o(&s)
	}
	c := &Cluster{Expected: &Expected{}, T: t, Net: &memnet.Network{}, Journal: &Journal{}}
	c.Engines = newEngines(c.Net)
	c.Journal.started = c.Engines.name
	s.config.DataDir, s.config.Executable = "", "dpserve"
	s.config.LogFormat, s.config.LogLevel = "json", "info"
	if s.disk != "" {
		s.disk = t.TempDir() // before the cleanup: it goes after the nodes
	}
	c.made = s
	c.T.Cleanup(c.end)
	for range s.nodes {
		c.Grow()
	}
	return c
}

// end drains the nodes and checks that they leave nothing behind.
func (c *Cluster) end() {
	c.Reconnect()
	for _, m := range c.Running() {
		//nolint:testifylint // all are checked
		assert.NoError(c.T, c.soon(func() error { return m.idle() }), "work in hand at node %s", m.ID)
	}
	before := len(c.Journal.String())
	for _, m := range c.peers {
		m.Disk.Heal()
		m.Files.Heal()
	}
	for _, m := range c.peers {
		m.stop()
	}
	for _, m := range c.peers {
		assert.NoError(c.T, m.drained(), "node %s drains", m.ID) //nolint:testifylint // all are ended
	}
	for _, m := range c.peers {
		assert.NoError(c.T, m.closed(), "node %s closes", m.ID) //nolint:testifylint // as above
	}
	if len(c.peers) > 1 {
		time.Sleep(afterwards)
	}
	assert.Empty(c.T, c.Engines.Live(), "engines left behind")
	for _, e := range c.Engines.Live() {
		e.Kill() // the bubble ends with its goroutines
	}
	assert.Empty(c.T, c.Engines.Faults(), "two owners of a rank")
	c.check(c.T, "the nodes", c.Journal.String(), before)
	if c.T.Failed() {
		c.T.Logf("journal:\n%s", c.Journal)
	}
}

// Do sends one admin request.
func (c *Cluster) Do(method, path, body string) (code int, text string) {
	c.T.Helper()
	req, err := http.NewRequestWithContext(context.Background(), method, "http://"+c.node.AdminAddr()+path,
		strings.NewReader(body))
	require.NoError(c.T, err)
	req.Header.Set("Authorization", "Bearer "+c.node.AdminToken())
	resp, err := c.client.Do(req)
	require.NoError(c.T, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(c.T, err)
	return resp.StatusCode, string(b)
}

// Deploy puts an app.yaml through the admin API.
func (c *Cluster) Deploy(yaml string) {
	c.T.Helper()
	code, text := c.Do(http.MethodPut, "/api/v1/apps?file=app.yaml", yaml)
	require.Equal(c.T, http.StatusAccepted, code, text)
}

// Delete deletes an app and does not wait until it is gone.
func (c *Cluster) Delete(app string) {
	c.T.Helper()
	code, text := c.Do(http.MethodDelete, "/api/v1/apps/"+app, "")
	require.Equal(c.T, http.StatusAccepted, code, text)
}

// Apps is the status of every app.
func (c *Cluster) Apps() []client.AppStatus {
	c.T.Helper()
	code, text := c.Do(http.MethodGet, "/api/v1/apps", "")
	require.Equal(c.T, http.StatusOK, code, text)
	var list struct{ Apps []client.AppStatus }
	require.NoError(c.T, json.Unmarshal([]byte(text), &list))
	return list.Apps
}

// App is one app's status; ok is false if there is none.
func (c *Cluster) App(name string) (st client.AppStatus, ok bool) {
	c.T.Helper()
	for _, a := range c.Apps() {
		if a.Name == name {
			return a, true
		}
	}
	return client.AppStatus{}, false
}

// Unit is one unit's status; the zero value if it is not listed.
func (c *Cluster) Unit(id string) client.UnitStatus {
	c.T.Helper()
	for _, a := range c.Apps() {
		for _, u := range a.Units {
			if u.Unit == id {
				return u
			}
		}
	}
	return client.UnitStatus{}
}

// Rank is one rank's status; the zero value if it is not listed.
func (c *Cluster) Rank(app string, group, rank int) client.RankStatus {
	c.T.Helper()
	st, _ := c.App(app)
	for _, u := range st.Units {
		for _, k := range u.Ranks {
			if k.Group == group && k.Rank == rank {
				return k
			}
		}
	}
	return client.RankStatus{}
}

// Router is the public client of an app's Router, over the cluster's network. It ends with the test.
func (c *Cluster) Router(app string) *client.RouterClient {
	c.T.Helper()
	cl, err := client.New(c.node.AdminAddr(), client.WithToken(c.node.AdminToken()),
		client.WithTransport(&http.Transport{DialContext: c.Net.DialContext}))
	require.NoError(c.T, err)
	c.T.Cleanup(cl.Close)
	return cl.Router(app)
}

// WaitStatus lets time pass until the app has the status.
func (c *Cluster) WaitStatus(app, want string) client.AppStatus {
	c.T.Helper()
	var st client.AppStatus
	c.Until("app "+app+" "+want, func() error {
		st, _ = c.App(app)
		if st.Status != want {
			return fmt.Errorf("it is %q: %s", st.Status, st.Message)
		}
		return nil
	})
	return st
}

// WaitUnit lets time pass until a unit is in a phase at an epoch; 0 = any.
func (c *Cluster) WaitUnit(id, phase string, epoch uint64) client.UnitStatus {
	c.T.Helper()
	var u client.UnitStatus
	c.Until(fmt.Sprintf("unit %s %s at epoch %d", id, phase, epoch), func() error {
		if u = c.Unit(id); u.Phase != phase || epoch != 0 && u.Epoch != epoch {
			return fmt.Errorf("it is %s at epoch %d: %s", u.Phase, u.Epoch, u.Reason)
		}
		return nil
	})
	return u
}

// Steps of Until. What a test measures comes from the times in status and events, never from when Until
// returned.
const (
	untilStep  = 5 * time.Millisecond
	untilLimit = 10 * time.Minute
)

// Until lets fake time pass until f returns nil, or fails the test with f's last error.
func (c *Cluster) Until(what string, f func() error) {
	c.T.Helper()
	deadline, step := time.Now().Add(untilLimit), untilStep
	for {
		synctest.Wait()
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			c.T.Fatalf("waiting for %s: %v", what, err)
		}
		time.Sleep(step)
		step = min(2*step, time.Second)
	}
}

// soon lets fake time pass until f returns nil, at most endPatience, and returns f's last error.
func (c *Cluster) soon(f func() error) error {
	return WaitFor(endPatience, untilStep, func() error {
		synctest.Wait()
		return f()
	})
}

// Quiet lets time pass until nothing is in flight, queued or reserved at any node.
func (c *Cluster) Quiet() {
	c.T.Helper()
	for _, m := range c.Running() {
		c.Until("in-flight, queue and reservations 0 at "+m.ID, m.idle)
	}
}

// Change is one entry of the admin API's events.
type Change = client.Event

// Events are the state changes of an app so far, in order.
func (c *Cluster) Events(app string) []Change {
	c.T.Helper()
	// the stream has no end of its own
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet,
		"http://"+c.node.AdminAddr()+"/api/v1/events?since=0&app="+app, nil)
	require.NoError(c.T, err)
	req.Header.Set("Authorization", "Bearer "+c.node.AdminToken())
	resp, err := c.client.Do(req)
	require.NoError(c.T, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.ErrorIs(c.T, err, context.DeadlineExceeded)
	var out []Change
	for line := range strings.Lines(string(b)) {
		if data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: "); ok {
			var e Change
			require.NoError(c.T, json.Unmarshal([]byte(data), &e), data)
			out = append(out, e)
		}
	}
	return out
}

// Post sends a request to the OpenAI endpoint.
func (c *Cluster) Post(ctx context.Context, path, body string, header ...string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+c.node.HTTPAddr()+path,
		strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return c.client.Do(req)
}

// StreamChat runs one streaming chat request to its end. header are names and values.
func (c *Cluster) StreamChat(ctx context.Context, model string, maxTokens int, header ...string) *Stream {
	return c.Chat(ctx, model, maxTokens, true, header...)
}

// Chat runs one chat request, streaming or not, to its end. An answer that is not streamed counts as one
// chunk.
func (c *Cluster) Chat(ctx context.Context, model string, maxTokens int, stream bool,
	header ...string,
) *Stream {
	start := time.Now()
	resp, err := c.Post(ctx, "/v1/chat/completions", Chat(model, "hello", maxTokens, stream), header...)
	if err != nil {
		return &Stream{Err: err}
	}
	defer resp.Body.Close()
	if !stream && resp.StatusCode == http.StatusOK {
		return readWhole(resp, start)
	}
	return readStream(resp, start)
}

// Fail makes the engine of a rank fail.
func (c *Cluster) Fail(app string, group, rank int, f sim.Fault) {
	c.T.Helper()
	require.NoError(c.T, c.Inject(c.Rank(app, group, rank).URL, f))
}

// Inject makes the engine at a URL fail. The error says that the engine could not be reached.
func (c *Cluster) Inject(url string, f sim.Fault) error {
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	_, err = c.ask(http.MethodPost, url+"/_sim/fail", string(b))
	return err
}

// Recover ends the failures of a rank's engine.
func (c *Cluster) Recover(app string, group, rank int) {
	c.T.Helper()
	require.NoError(c.T, c.Heal(c.Rank(app, group, rank).URL))
}

// Heal ends the failures of the engine at a URL. The error says that the engine could not be reached.
func (c *Cluster) Heal(url string) error {
	_, err := c.ask(http.MethodPost, url+"/_sim/recover", "")
	return err
}

// Stats returns the open and the ended requests of the engine at a URL.
func (c *Cluster) Stats(url string) (st sim.Stats, err error) {
	text, err := c.ask(http.MethodGet, url+"/_sim/stats", "")
	if err == nil {
		err = json.Unmarshal([]byte(text), &st)
	}
	return st, err
}

// ask sends a request to an engine directly.
func (c *Cluster) ask(method, url, body string) (string, error) {
	req, err := http.NewRequestWithContext(context.Background(), method, url, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, resp.Status, b)
	}
	return string(b), err
}

// Feed is the ranks' streams: what a second ingress would follow.
func (c *Cluster) Feed() msg.Feed { return c.node.Feed() }

// Store is the cluster's state: what a second ingress would follow.
func (c *Cluster) Store() msg.Store { return c.node.Store() }

// Kill ends the engine of a rank as SIGKILL from outside does; false if it has none.
func (c *Cluster) Kill(app string, group, rank int) bool {
	c.T.Helper()
	e := c.Engines.At(c.Rank(app, group, rank).URL)
	if e != nil {
		e.Kill()
	}
	return e != nil
}
