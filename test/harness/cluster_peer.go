package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/server"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/memnet"
)

// afterwards is how long the goroutines of connections between nodes may need to see that both ends are gone.
const afterwards = 30 * time.Second

// Peer is one node of a Cluster, on a host of its own. Its methods ask this node.
type Peer struct {
	*Cluster
	ID    string
	Host  string // of everything that it binds
	Disk  *Disk  // of its log
	Files *Disk  // of its files that change, with OnDisk

	root          *Cluster
	config        server.Config
	place         *memnet.Host
	journalWriter *journalWriter
	stop          context.CancelFunc
	served        chan error
	once          sync.Once
	err           error

	gone    atomic.Bool // closed or dropped
	dropped atomic.Bool
}

// Roles sets the roles of the i-th node, counted from 0; the default is all roles. The first node needs
// control.
func Roles(i int, roles ...string) Option { return func(s *settings) { s.roles[i] = roles } }

// Machine sets --gpus and --labels of the i-th node, counted from 0.
func Machine(of func(i int) (gpus string, labels map[string]string)) Option {
	return func(s *settings) { s.machine = of }
}

// OnLeaseLoss sets --on-lease-loss: serve, the default, or fence.
func OnLeaseLoss(rule string) Option { return func(s *settings) { s.config.OnLeaseLoss = rule } }

// journalWriter writes a node's log lines to the journal until the node is dropped.
type journalWriter struct {
	journal *Journal
	dead    atomic.Bool
}

// Write takes one line.
func (v *journalWriter) Write(line []byte) (int, error) {
	if v.dead.Load() {
		return len(line), nil
	}
	return v.journal.Write(line)
}

// Grow starts one more node: alone, or the first of a cluster, or one that joins the first. It belongs to the
// cluster that New gave.
func (c *Cluster) Grow() *Peer {
	c.T.Helper()
	s, i := c.made, len(c.peers)
	cfg := s.config
	m := &Peer{
		ID: "node-" + strconv.Itoa(i+1), Host: "127.0.0." + strconv.Itoa(i+1), Disk: &Disk{}, Files: &Disk{},
		root: c,
	}
	if s.disk != "" {
		cfg.DataDir = filepath.Join(s.disk, m.ID)
	}
	m.place, m.journalWriter = c.Net.Host(m.Host), &journalWriter{journal: c.Journal}
	cfg.NodeID, cfg.LogWriter, cfg.Network, cfg.Stores = m.ID, m.journalWriter, m.place, m.Disk.under
	cfg.Launcher, cfg.Replace = launcher{c.Engines, m.Host}, m.Files.replace
	if roles := s.roles[i]; len(roles) > 0 {
		cfg.Roles = roles
	}
	if s.machine != nil {
		cfg.GPUs, cfg.Labels = s.machine(i)
	}
	if s.nodes > 1 || s.grows {
		cfg.Advertise, cfg.HTTPBind, cfg.AdminBind = m.Host, m.Host+":8000", m.Host+":8265"
	}
	if i > 0 {
		address, token := c.node.FirstToken()
		cfg.Join = &server.Join{Address: address, Token: token}
	}
	self := *c
	m.Cluster = &self
	self.client = &http.Client{Transport: &http.Transport{
		DialContext:         m.place.DialContext,
		MaxIdleConnsPerHost: 64,
	}}
	require.NoError(c.T, m.start(cfg))
	if i == 0 {
		c.node, c.client = self.node, self.client
	}
	c.peers = append(c.peers, m)
	for _, p := range c.peers {
		p.peers = c.peers
	}
	return m
}

// start builds the node and lets it serve.
func (m *Peer) start(cfg server.Config) error {
	n, err := server.New(cfg)
	if err != nil {
		return err
	}
	m.config, m.node, m.served, m.once = cfg, n, make(chan error, 1), sync.Once{}
	ctx, stop := context.WithCancel(context.Background())
	m.stop = stop
	m.gone.Store(false)
	go func() { m.served <- n.Serve(ctx) }()
	return nil
}

// OnDisk gives each node a data dir, on which it can start again after Close.
func OnDisk() Option { return func(s *settings) { s.disk = "yes" } }

// LetGo ends the node's process as an error does: nothing asks the node to stop.
func (m *Peer) LetGo() {
	m.T.Helper()
	require.NoError(m.T, m.node.Close())
	require.NoError(m.T, m.drained())
	m.client.CloseIdleConnections()
	m.gone.Store(true)
}

// BreakEndpoint ends the node's process as a failure of its OpenAI endpoint does.
func (m *Peer) BreakEndpoint() error {
	m.place.Shut(m.Host + ":8000")
	err := m.drained()
	require.NoError(m.T, m.node.Close())
	m.client.CloseIdleConnections()
	m.gone.Store(true)
	return err
}

// Again starts a node that was closed on its data dir, as `dpserve start` does, with other timers if there
// are any.
func (m *Peer) Again(timers map[string]time.Duration) error {
	cfg, first := m.config, m.root.node == m.node
	cfg.Join, cfg.Timers = nil, timers
	err := m.start(cfg)
	if first {
		m.root.node = m.node
	}
	return err
}

// Boot starts a node that was dropped: its machine is on again, with what its disk holds.
func (m *Peer) Boot() error {
	_ = m.drained() // a node that was dropped has no result
	_ = m.closed()
	m.place.Up()
	m.journalWriter.dead.Store(false)
	err := m.Again(nil)
	m.dropped.Store(err != nil)
	return err
}

// drained waits until the node, after stop, has answered its last request. A dropped node has no result: its
// sockets were closed under it, as with a killed process.
func (m *Peer) drained() error {
	m.once.Do(func() { m.err = <-m.served })
	if m.dropped.Load() {
		return nil
	}
	return m.err
}

// closed ends the goroutines and sockets of the node that are left in this process.
func (m *Peer) closed() error {
	err := m.node.Close()
	m.client.CloseIdleConnections()
	if m.dropped.Load() {
		return nil
	}
	return err
}

// Peer is the i-th node, from 0.
func (c *Cluster) Peer(i int) *Peer { return c.peers[i] }

// Running are the nodes that were neither closed nor dropped.
func (c *Cluster) Running() []*Peer {
	return slices.DeleteFunc(slices.Clone(c.peers), func(m *Peer) bool { return m.Gone() })
}

// HasEnded says whether the node has ended by itself.
func (m *Peer) HasEnded() bool { return len(m.served) > 0 }

// Gone says whether the node was closed or dropped.
func (m *Peer) Gone() bool { return m.gone.Load() }

// Peers are all nodes, also those that were dropped.
func (c *Cluster) Peers() []*Peer { return c.peers }

// Close drains the node and ends it, as SIGTERM does.
func (m *Peer) Close() {
	m.T.Helper()
	m.stop()
	require.NoError(m.T, m.drained())
	require.NoError(m.T, m.node.Close())
	m.client.CloseIdleConnections()
	m.gone.Store(true)
}

// End is Close for a node whose end may fail.
func (m *Peer) End() error {
	m.stop()
	err := errors.Join(m.drained(), m.node.Close())
	m.client.CloseIdleConnections()
	m.dropped.Store(true) // its result is told
	m.gone.Store(true)
	return err
}

// DataDir is the node's data dir, with OnDisk.
func (m *Peer) DataDir() string { return m.config.DataDir }

// Drop ends the node as SIGKILL does: its connections are reset, its engines die, and it sends nothing more.
// Its goroutines in this process end by themselves.
func (m *Peer) Drop() {
	m.journalWriter.dead.Store(true)
	m.dropped.Store(true)
	m.gone.Store(true)
	m.place.Down()
	for _, e := range m.Engines.On(m.Host) {
		e.Kill()
	}
	m.stop()
	m.node.Kill()
}

// Silence cuts the node off from some others, or from all: nothing arrives any more in either direction, and
// no connection is reset.
func (m *Peer) Silence(others ...*Peer) {
	for _, o := range m.orAll(others) {
		m.Net.Silence(m.Host, o.Host)
		m.Net.Silence(o.Host, m.Host)
	}
}

func (m *Peer) orAll(list []*Peer) []*Peer {
	if len(list) > 0 {
		return list
	}
	var out []*Peer
	for _, o := range m.peers {
		if o.Host != m.Host {
			out = append(out, o)
		}
	}
	return out
}

// Reconnect ends every cut and silence.
func (c *Cluster) Reconnect() {
	for i, a := range c.peers {
		for _, b := range c.peers[:i] {
			c.Net.Heal(a.Host, b.Host)
		}
	}
}

// HTTP is the base URL of the node's OpenAI endpoint, for its own host.
func (m *Peer) HTTP() string { return "http://" + m.node.HTTPAddr() }

// Admin is the base URL of the node's admin API, for its own host.
func (m *Peer) Admin() string { return "http://" + m.node.AdminAddr() }

// Epoch is the highest epoch of a unit in the node's copy of the state.
func (m *Peer) Epoch(unit string) uint64 { return m.State().Epochs[unit] }

// State is the node's copy of the state.
func (m *Peer) State() *state.State { return m.node.Store().State() }

// Leads says whether the node believes that it leads.
func (m *Peer) Leads() bool {
	l, ok := m.node.Store().(interface{ Leader() bool })
	return ok && l.Leader()
}

// Leader waits for a node that leads among those that run.
func (c *Cluster) Leader(among ...*Peer) *Peer {
	c.T.Helper()
	if len(among) == 0 {
		among = c.peers
	}
	var found *Peer
	c.Until("a leader", func() error {
		for _, m := range among {
			if !m.gone.Load() && m.Leads() {
				found = m
				return nil
			}
		}
		return fmt.Errorf("nobody leads")
	})
	return found
}

// Led lets time pass until the node's admin API finds the leader.
func (c *Cluster) Led() {
	c.T.Helper()
	c.Until("the admin API answers", func() error {
		if code, text := c.Do(http.MethodGet, "/api/v1/apps", ""); code != http.StatusOK {
			return fmt.Errorf("%d %s", code, text)
		}
		return nil
	})
}

// List is `dpserve nodes` by name; nil while no node answers.
func (c *Cluster) List() map[string]client.NodeStatus {
	c.T.Helper()
	code, text := c.Do(http.MethodGet, "/api/v1/nodes", "")
	if code != http.StatusOK {
		return nil
	}
	var list struct{ Nodes []client.NodeStatus }
	require.NoError(c.T, json.Unmarshal([]byte(text), &list))
	out := map[string]client.NodeStatus{}
	for i := range list.Nodes {
		out[list.Nodes[i].Node] = list.Nodes[i]
	}
	return out
}

// WaitVoters lets time pass until that many nodes vote.
func (c *Cluster) WaitVoters(want int) {
	c.T.Helper()
	c.Until(fmt.Sprintf("%d voters", want), func() error {
		votes := 0
		for _, n := range c.List() {
			if n.Voter {
				votes++
			}
		}
		if votes != want {
			return fmt.Errorf("there are %d", votes)
		}
		return nil
	})
}

// idle says which requests the node still has.
func (m *Peer) idle() error {
	if _, _, n := m.node.Totals(); n > 0 {
		return fmt.Errorf("%d requests at the ingress", n)
	}
	return idle(m.ask)
}

// ask is a GET at the node's admin API.
func (m *Peer) ask(path string) (code int, text string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, m.Admin()+path, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := m.Send(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// When returns the time at which the node's copy of the state first satisfies the condition.
func (m *Peer) When(is func(*state.State) bool) <-chan time.Time {
	out := make(chan time.Time, 1)
	go func() {
		for {
			changed := m.node.Store().Changed()
			if is(m.State()) {
				out <- time.Now()
				return
			}
			select {
			case <-changed:
			case <-m.T.Context().Done():
				return
			}
		}
	}()
	return out
}

// Send sends a request from the node's host, with its admin token where its admin API is asked.
func (m *Peer) Send(r *http.Request) (*http.Response, error) {
	if r.URL.Host == m.node.AdminAddr() {
		r.Header.Set("Authorization", "Bearer "+m.node.AdminToken())
	}
	return m.client.Do(r)
}
