package membership

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/dpserve/dpserve/internal/problem"
)

// maxKeys is how many keys are in use while one replaces another.
const maxKeys = 2

// Gossip is this node's part of the gossip. It is safe for concurrent use.
type Gossip struct {
	cfg       Config
	table     *table
	ring      *memberlist.Keyring
	transport *transport
	list      *memberlist.Memberlist // nil before Start

	mu   sync.Mutex
	meta []byte // encoded; Close changes it

	life sync.Mutex // held by Start and Close
	done chan struct{}
	wg   sync.WaitGroup
}

// New binds the port, so that a taken port is reported early. Start begins the gossip.
func New(ctx context.Context, cfg Config) (*Gossip, error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	ring, err := memberlist.NewKeyring(nil, cfg.Key)
	if err != nil {
		return nil, fmt.Errorf("gossip key: %w", err)
	}
	ip, port, err := cfg.advertised(ctx)
	if err != nil {
		return nil, err
	}
	g := &Gossip{
		cfg: cfg, table: &table{members: map[string]*Member{}}, ring: ring, done: make(chan struct{}),
	}
	if err := g.setMeta(cfg.Meta); err != nil {
		return nil, err
	}
	if g.transport, err = newTransport(ctx, cfg.Network, cfg.Bind, ip, port); err != nil {
		return nil, err
	}
	if _, _, err := g.transport.FinalAdvertiseAddr("", 0); err != nil {
		_ = g.transport.Shutdown()
		return nil, err
	}
	return g, nil
}

// Address returns the IP:PORT at which others reach this node's gossip.
func (g *Gossip) Address() string {
	ip, port, err := g.transport.FinalAdvertiseAddr("", 0)
	if err != nil {
		return ""
	}
	return (&memberlist.Node{Addr: ip, Port: uint16(port)}).Address() //nolint:gosec // a port
}

// Start joins the other nodes that can be reached, and keeps looking for missing seeds. It does not wait for
// them.
func (g *Gossip) Start() error {
	g.life.Lock()
	defer g.life.Unlock()
	if g.list != nil || g.closed() {
		return problem.New(problem.Internal, "the gossip was started or closed before")
	}
	list, err := memberlist.Create(g.config())
	if err != nil {
		return problem.New(problem.Internal, "start the gossip: %w", err)
	}
	g.list = list
	g.wg.Go(g.lookForSeeds)
	return nil
}

// config returns the configuration of memberlist.
func (g *Gossip) config() *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	c.Name = g.cfg.name()
	c.Transport = g.transport
	c.Keyring = g.ring
	c.GossipVerifyIncoming, c.GossipVerifyOutgoing = true, true
	c.ProbeInterval, c.ProbeTimeout = g.cfg.Timers.Probe, g.cfg.Timers.ProbeTimeout
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = suspicionMult, suspicionMax
	c.GossipInterval = min(gossipEvery, g.cfg.Timers.Probe)
	c.PushPullInterval = pushPull
	c.TCPTimeout = streamTimeout
	c.Logger = log.New(newLogReader(g.cfg.Log, g.cfg.Refused), "", 0)
	d := &delegate{g: g}
	c.Delegate, c.Events, c.Merge, c.Alive, c.Ping = d, g.table, d, d, d
	return c
}

// Members returns this node's view, with itself: one entry per UID, sorted by node. Removed nodes are not in
// it.
func (g *Gossip) Members() []Member {
	return slices.DeleteFunc(g.table.list(), func(m Member) bool { return g.cfg.Revoked(m.UID) })
}

func (g *Gossip) setMeta(m Meta) error {
	b, err := m.encode()
	if err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.meta = b
	return nil
}

func (g *Gossip) encodedMeta() []byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.meta
}

// SetKeys sets the one or two keys that this node accepts; it encrypts with the first. A rotation has three
// steps, and all nodes take one before any node takes the next: the new key after the old one, the old key
// after the new one, the new key alone.
func (g *Gossip) SetKeys(keys ...[]byte) error {
	g.life.Lock()
	defer g.life.Unlock()
	if len(keys) == 0 || len(keys) > maxKeys {
		return problem.New(problem.InvalidArgument, "gossip has one key or %d, these are %d", maxKeys,
			len(keys))
	}
	for _, k := range keys {
		if len(k) != KeySize {
			return problem.New(problem.InvalidArgument, "a gossip key has %d bytes, this one has %d", KeySize,
				len(k))
		}
	}
	// Never three keys at a time: RemoveKey would change a list that memberlist is reading, because the
	// keyring shares it.
	err := errors.Join(g.removeOtherKeys(keys...), g.ring.AddKey(keys[0]), g.ring.UseKey(keys[0]),
		g.removeOtherKeys(keys...))
	for _, k := range keys[1:] {
		err = errors.Join(err, g.ring.AddKey(k))
	}
	return err
}

// removeOtherKeys removes the keys that are not in keys, except the one in use.
func (g *Gossip) removeOtherKeys(keys ...[]byte) error {
	var err error
	for _, k := range g.ring.GetKeys()[1:] {
		if !slices.ContainsFunc(keys, func(kept []byte) bool { return bytes.Equal(kept, k) }) {
			err = errors.Join(err, g.ring.RemoveKey(k))
		}
	}
	return err
}

// Close announces that this node leaves, for at most a second, and ends.
func (g *Gossip) Close() error { return g.end(true) }

func (g *Gossip) end(farewell bool) error {
	g.life.Lock()
	defer g.life.Unlock()
	if g.closed() {
		return nil
	}
	close(g.done)
	if g.list == nil {
		return g.transport.Shutdown()
	}
	if farewell {
		g.announceLeave()
	}
	err := g.list.Shutdown()
	g.wg.Wait()
	return err
}

// announceLeave tells the others that this is no failure. memberlist's own message reaches the delegates as a
// death, so Meta says it first. A node that misses both finds out by silence.
func (g *Gossip) announceLeave() {
	m := g.cfg.Meta
	m.leaving = true
	if g.setMeta(m) == nil {
		_ = g.list.UpdateNode(leaveTimeout)
	}
	_ = g.list.Leave(leaveTimeout)
}

func (g *Gossip) closed() bool {
	select {
	case <-g.done:
		return true
	default:
		return false
	}
}

// lookForSeeds looks for missing seeds until Close.
func (g *Gossip) lookForSeeds() {
	seek := time.NewTimer(0)
	defer seek.Stop()
	for {
		select {
		case <-g.done:
			return
		case <-seek.C:
			g.rejoin()
			seek.Reset(g.rejoinPause())
		}
	}
}

// rejoinPause is short while no other node is alive.
func (g *Gossip) rejoinPause() time.Duration {
	if g.table.isAlone() {
		return min(aloneRejoin, g.cfg.Timers.Rejoin)
	}
	return g.cfg.Timers.Rejoin
}

// rejoin asks some of the missing seeds for their view. It ends a split, which gossip alone would never do.
func (g *Gossip) rejoin() {
	var addresses []string
	for _, seed := range g.cfg.Seeds() {
		if a, err := g.numericAddress(seed); err == nil {
			addresses = append(addresses, a)
		}
	}
	missing := g.table.missing(addresses)
	rand.Shuffle(len(missing), func(i, j int) { missing[i], missing[j] = missing[j], missing[i] })
	for i, a := range missing {
		if g.closed() || i >= seedsPerRound && !g.table.isAlone() {
			return
		}
		if _, err := g.list.Join([]string{a}); err != nil {
			g.cfg.Log.Debug("gossip does not reach a seed", "seed", a, "err", err.Error())
		}
	}
}

// delegate answers memberlist. memberlist calls it under its own lock, so it must not call memberlist and
// must not wait.
type delegate struct{ g *Gossip }

var (
	_ memberlist.Delegate      = (*delegate)(nil)
	_ memberlist.MergeDelegate = (*delegate)(nil)
	_ memberlist.AliveDelegate = (*delegate)(nil)
	_ memberlist.PingDelegate  = (*delegate)(nil)
)

// NodeMeta returns what this node announces.
func (d *delegate) NodeMeta(int) []byte { return d.g.encodedMeta() }

// NotifyAlive refuses members of other clusters, removed members, and nodes that are not dpserve's.
func (d *delegate) NotifyAlive(n *memberlist.Node) error { return d.g.checkMember(n) }

// NotifyMerge refuses the whole view of a peer that knows members of another cluster, so that two clusters
// never mix.
func (d *delegate) NotifyMerge(peers []*memberlist.Node) error {
	for _, n := range peers {
		if meta, err := decodeMeta(n.Meta); err == nil && meta.Cluster != d.g.cfg.Meta.Cluster {
			return fmt.Errorf("%s belongs to cluster %s, not %s", n.Name, meta.Cluster, d.g.cfg.Meta.Cluster)
		}
	}
	return nil
}

// NotifyPingComplete records that a member answered.
func (d *delegate) NotifyPingComplete(n *memberlist.Node, _ time.Duration, _ []byte) {
	d.g.table.recordAnswer(n.Name)
}

// dpserve sends no messages of its own by the gossip, and adds nothing to those of memberlist.

func (d *delegate) AckPayload() []byte              { return nil }
func (d *delegate) NotifyMsg([]byte)                {}
func (d *delegate) GetBroadcasts(int, int) [][]byte { return nil }
func (d *delegate) LocalState(bool) []byte          { return nil }
func (d *delegate) MergeRemoteState([]byte, bool)   {}

func (g *Gossip) checkMember(n *memberlist.Node) error {
	meta, err := decodeMeta(n.Meta)
	if err != nil {
		return err
	}
	switch {
	case meta.Cluster != g.cfg.Meta.Cluster:
		return fmt.Errorf("it belongs to cluster %s, not %s", meta.Cluster, g.cfg.Meta.Cluster)
	case g.cfg.Revoked(meta.UID):
		if g.table.isJustRemoved(n.Name, time.Now()) {
			return fmt.Errorf("uid %s %s", meta.UID, justRemoved)
		}
		return fmt.Errorf("uid %s was removed from the cluster", meta.UID)
	}
	_, _, err = splitName(n.Name)
	return err
}

// numericAddress returns the IP:PORT of a seed, in the form of Member.Gossip.
func (g *Gossip) numericAddress(seed string) (string, error) {
	host, port, err := net.SplitHostPort(seed)
	if err != nil {
		return "", err
	}
	ctx, cancel := g.transport.within(resolveTimeout)
	defer cancel()
	ip, err := resolve(ctx, host)
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(ip.String(), port), nil
}
