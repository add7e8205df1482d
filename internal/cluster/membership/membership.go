// Package membership is the phone book of a cluster: which nodes gossip sees, and where. It decides nothing:
// the state says which nodes are members, the leases say which ones serve.
//
// A member's name is its node and the incarnation of its process, so a node that comes back is a new member.
// Seeds that are not alive are asked again, because memberlist stops looking for the dead after 30 s and two
// halves of a split would never find each other. Everything is encrypted with a key of the cluster; members
// of another cluster and removed UIDs are refused. Delegates never call memberlist, which calls them under
// its lock.
package membership

import (
	"cmp"
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
)

// Defaults and bounds. A silent node is suspected after at most two probes. It is dead after the suspicion
// time: between SuspicionMult · log(N+1) · Probe, at least SuspicionMult · Probe = 0.9 s, and suspicionMax
// times that, by how many nodes confirm it.
const (
	Probe        = 300 * time.Millisecond // between probes
	ProbeTimeout = 150 * time.Millisecond // of a direct probe
	Rejoin       = 10 * time.Second       // between attempts to reach seeds that are not alive

	suspicionMult = 3
	suspicionMax  = 2

	gossipEvery    = 100 * time.Millisecond
	pushPull       = 15 * time.Second       // between exchanges of the whole view with one other node
	streamTimeout  = 2 * time.Second        // of a push and pull, or a probe over TCP
	leaveTimeout   = 500 * time.Millisecond // of the message of a leave
	aloneRejoin    = time.Second            // instead of Rejoin while no other node is alive
	seedsPerRound  = 3                      // while another node is alive
	resolveTimeout = 2 * time.Second
)

// KeySize is the length of a gossip key in bytes.
const KeySize = 32

// Timers are the times that --timers and tests may change. Zero values are the constants of this package.
type Timers struct {
	Probe, ProbeTimeout, Rejoin time.Duration
}

// Member is what a node announces of itself, and when it was last heard.
type Member struct {
	Cluster  string    `json:"cluster"`
	UID      string    `json:"uid"`
	Node     string    `json:"node"`
	Address  string    `json:"address"` // HOST:PORT of the node port
	Gossip   string    `json:"-"`       // IP:PORT
	LastSeen time.Time `json:"-"`
}

// Config names this node and says how it reaches others.
type Config struct {
	Self        Member // Cluster, UID, Node and Address
	Incarnation uint64 // random per process, so that a node that restarts is a new member at any address
	Host        string // IP or host that the others reach; the port is bound there
	Port        int    // for UDP and TCP; 0 picks a free one
	Key         []byte // KeySize bytes: DeriveKey
	// Seeds returns the gossip addresses (HOST:PORT) of nodes that should exist. It is called before each
	// attempt.
	Seeds func() []string
	// Revoked reports whether the node with this UID was removed. Nil: none was. It must not block.
	Revoked func(uid string) bool
	// Refused counts refused messages. Nil: not counted. It must not block.
	Refused   func(reason Reason)
	Timers    Timers
	Transport memberlist.NodeAwareTransport // nil: UDP and TCP
	Log       *slog.Logger
}

// DeriveKey makes the gossip key from the cluster's secret.
func DeriveKey(secret []byte, cluster string) ([]byte, error) {
	key, err := hkdf.Key(sha256.New, secret, []byte(cluster), "dpserve gossip 1", KeySize)
	if err != nil {
		return nil, fmt.Errorf("derive the gossip key: %w", err)
	}
	return key, nil
}

// Gossip is this node's part of the gossip. It is safe for concurrent use.
type Gossip struct {
	cfg  Config
	list *memberlist.Memberlist

	keys    sync.Mutex // held over a change of the key
	ring    *memberlist.Keyring
	mu      sync.Mutex
	members map[string]*Member // those that are alive, by memberlist's name: one per process

	end context.CancelFunc
	wg  sync.WaitGroup
}

// Start binds the port and begins to gossip. It looks for the seeds, and for those of them that get lost
// later, and does not wait for them.
func Start(ctx context.Context, cfg Config) (*Gossip, error) {
	if cfg.Self.Node == "" || cfg.Self.UID == "" || cfg.Self.Cluster == "" || len(cfg.Key) != KeySize {
		return nil, problem.New(problem.InvalidArgument,
			"gossip needs a node name, a UID, a cluster and a key of %d bytes", KeySize)
	}
	ip, err := resolve(ctx, cfg.Host)
	if err != nil || ip.IsUnspecified() {
		return nil, problem.New(problem.InvalidArgument, "gossip on %q needs an address that others reach",
			cfg.Host).WithHint("set --advertise IP")
	}
	if cfg.Revoked == nil {
		cfg.Revoked = func(string) bool { return false }
	}
	if cfg.Refused == nil {
		cfg.Refused = func(Reason) {}
	}
	g := &Gossip{cfg: cfg, members: map[string]*Member{}}
	if g.ring, err = memberlist.NewKeyring(nil, cfg.Key); err != nil {
		return nil, fmt.Errorf("gossip key: %w", err)
	}
	c := memberlist.DefaultLANConfig()
	c.Name = cfg.Self.Node + "#" + strconv.FormatUint(cfg.Incarnation, 16)
	c.BindAddr, c.AdvertiseAddr, c.BindPort, c.AdvertisePort = ip.String(), ip.String(), cfg.Port, cfg.Port
	if cfg.Transport != nil {
		c.Transport = cfg.Transport
	}
	c.Keyring = g.ring
	c.ProbeInterval = cmp.Or(cfg.Timers.Probe, Probe)
	c.ProbeTimeout = cmp.Or(cfg.Timers.ProbeTimeout, ProbeTimeout)
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = suspicionMult, suspicionMax
	c.GossipInterval = min(gossipEvery, c.ProbeInterval)
	c.PushPullInterval = pushPull
	c.TCPTimeout = streamTimeout
	c.Logger = log.New(newLogReader(cfg.Log, cfg.Refused), "", 0)
	d := &delegate{g: g}
	if d.meta, err = json.Marshal(cfg.Self); err != nil || len(d.meta) > memberlist.MetaMaxSize {
		return nil, problem.New(problem.InvalidArgument,
			"the names and the address of this node take %d bytes in the gossip, allowed are %d", len(d.meta),
			memberlist.MetaMaxSize).WithHint("choose a shorter --node-id or --advertise")
	}
	c.Delegate, c.Events, c.Merge, c.Alive, c.Ping = d, d, d, d, d
	if g.list, err = memberlist.Create(c); err != nil {
		return nil, problem.New(problem.Unavailable, "gossip cannot listen on %s: %w",
			net.JoinHostPort(ip.String(), strconv.Itoa(cfg.Port)), err).
			WithHint("is another dpserve running there? choose another --advertise, or stop it")
	}
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	g.end = end
	g.wg.Go(func() { g.lookForSeeds(life) })
	return g, nil
}

// Address returns the IP:PORT at which others reach this node's gossip.
func (g *Gossip) Address() string { return g.list.LocalNode().Address() }

// Members returns the processes that are alive, with this one, sorted by node.
func (g *Gossip) Members() []Member {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []Member
	for _, name := range slices.Sorted(maps.Keys(g.members)) {
		out = append(out, *g.members[name])
	}
	return out
}

// Find returns a node that is alive. A node that has just restarted may be in the book twice: its process
// that was heard last counts.
func (g *Gossip) Find(uid string) (found Member, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, m := range g.members {
		if m.UID == uid && !m.LastSeen.Before(found.LastSeen) {
			found, ok = *m, true
		}
	}
	return found, ok
}

// SetKey replaces the key. Nodes with different keys do not hear each other, and find each other again
// within Rejoin.
func (g *Gossip) SetKey(key []byte) error {
	g.keys.Lock()
	defer g.keys.Unlock()
	// The old key is removed from the end of the list: memberlist may be reading it.
	err := errors.Join(g.ring.AddKey(key), g.ring.UseKey(key))
	for _, old := range g.ring.GetKeys()[1:] {
		err = errors.Join(err, g.ring.RemoveKey(old))
	}
	return err
}

// Close announces that this node leaves, for at most half a second, and ends.
func (g *Gossip) Close() error {
	_ = g.list.Leave(leaveTimeout) // who misses it finds out by silence
	return g.shutdown()
}

func (g *Gossip) shutdown() error {
	g.end()
	err := g.list.Shutdown()
	g.wg.Wait()
	return err
}

// lookForSeeds asks some of the missing seeds for their view, again and again. It ends a split, which gossip
// alone would never do.
func (g *Gossip) lookForSeeds(ctx context.Context) {
	for wait := time.Duration(0); pause.For(ctx, wait) == nil; {
		missing, alone := g.missingSeeds()
		rand.Shuffle(len(missing), func(i, j int) { missing[i], missing[j] = missing[j], missing[i] })
		if !alone {
			missing = missing[:min(len(missing), seedsPerRound)]
		}
		for _, seed := range missing {
			if ctx.Err() != nil {
				return
			}
			if _, err := g.list.Join([]string{seed}); err != nil {
				g.cfg.Log.Debug("gossip does not reach a seed", "seed", seed, "err", err.Error())
			}
		}
		wait = cmp.Or(g.cfg.Timers.Rejoin, Rejoin)
		if _, alone := g.missingSeeds(); alone {
			wait = min(aloneRejoin, wait)
		}
	}
}

// missingSeeds returns the seeds without a living member, and whether no other node is alive.
func (g *Gossip) missingSeeds() (missing []string, alone bool) {
	seeds := g.cfg.Seeds()
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, m := range g.members {
		seeds = slices.DeleteFunc(seeds, func(seed string) bool { return seed == m.Gossip })
	}
	return seeds, len(g.members) <= 1
}

// delegate answers memberlist. memberlist calls it under its own lock, so it must not call memberlist and
// must not wait.
type delegate struct {
	g    *Gossip
	meta []byte
}

// NodeMeta returns what this node announces.
func (d *delegate) NodeMeta(int) []byte { return d.meta }

// NotifyAlive refuses members of other clusters, removed members, and nodes that are not dpserve's.
func (d *delegate) NotifyAlive(n *memberlist.Node) error {
	m, err := readMember(n)
	switch {
	case err != nil:
		return err
	case m.Cluster != d.g.cfg.Self.Cluster:
		return fmt.Errorf("it belongs to cluster %s, not %s", m.Cluster, d.g.cfg.Self.Cluster)
	case d.g.cfg.Revoked(m.UID):
		return fmt.Errorf("uid %s %s", m.UID, wasRemoved)
	}
	return nil
}

// NotifyMerge refuses the whole view of a peer that knows members of another cluster, so that two clusters
// never mix.
func (d *delegate) NotifyMerge(peers []*memberlist.Node) error {
	for _, n := range peers {
		if m, err := readMember(n); err == nil && m.Cluster != d.g.cfg.Self.Cluster {
			return fmt.Errorf("%s belongs to cluster %s, not %s", n.Name, m.Cluster, d.g.cfg.Self.Cluster)
		}
	}
	return nil
}

func (d *delegate) NotifyJoin(n *memberlist.Node) {
	m, err := readMember(n)
	if err != nil {
		return // NotifyAlive has refused it
	}
	d.g.mu.Lock()
	defer d.g.mu.Unlock()
	d.g.members[n.Name] = &m
}

func (d *delegate) NotifyUpdate(n *memberlist.Node) { d.NotifyJoin(n) }

func (d *delegate) NotifyLeave(n *memberlist.Node) {
	d.g.mu.Lock()
	defer d.g.mu.Unlock()
	delete(d.g.members, n.Name)
}

func (d *delegate) NotifyPingComplete(n *memberlist.Node, _ time.Duration, _ []byte) {
	d.g.mu.Lock()
	defer d.g.mu.Unlock()
	if m := d.g.members[n.Name]; m != nil {
		m.LastSeen = time.Now()
	}
}

// dpserve sends no messages of its own by the gossip, and adds nothing to those of memberlist.

func (d *delegate) AckPayload() []byte              { return nil }
func (d *delegate) NotifyMsg([]byte)                {}
func (d *delegate) GetBroadcasts(int, int) [][]byte { return nil }
func (d *delegate) LocalState(bool) []byte          { return nil }
func (d *delegate) MergeRemoteState([]byte, bool)   {}

var errMeta = errors.New("what it says of itself cannot be read")

// readMember reads what a node announces.
func readMember(n *memberlist.Node) (Member, error) {
	m := Member{Gossip: n.Address(), LastSeen: time.Now()}
	if len(n.Meta) > memberlist.MetaMaxSize || json.Unmarshal(n.Meta, &m) != nil ||
		m.Cluster == "" || m.UID == "" {
		return Member{}, errMeta
	}
	return m, nil
}

// resolve returns an IP address of a host.
func resolve(ctx context.Context, host string) (net.IP, error) {
	if ip := net.ParseIP(host); ip != nil {
		return ip, nil
	}
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	ips, err := net.DefaultResolver.LookupIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	return ips[0], nil
}
