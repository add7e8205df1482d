package harness

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/test/ports"
)

// Members is a cluster of running dpserve processes on loopback addresses of their own, all with the same
// port numbers. Use it from the test's goroutine; Load's clients are the exception.
type Members struct {
	*Expected
	T   testing.TB
	All []*Member // in the order in which they joined

	dir       string
	net       string // the rig's addresses without their last number
	slots     int
	timers    map[string]time.Duration
	nodePort  int
	gossip    int
	http      int
	admin     int
	engines   int // the first of the ports of each node's engines
	token     string
	addresses int
	apps      map[string]bool // that the test asked about
}

// MembersOption changes how a cluster begins.
type MembersOption func(*Members)

// MemberSlots is how many ranks fit on each node.
func MemberSlots(n int) MembersOption { return func(c *Members) { c.slots = n } }

// Pace is the factor by which restarts in a test cluster are faster than real ones. Leases and the ranks'
// streams are as fast as a shared machine allows without taking a node for lost or silent that only waits for
// the processor. The waits of raft and of the gossip are short already.
const (
	Pace         = 10
	streamPace   = 4
	leasePace    = 5
	RealLease    = 10 * time.Second
	RealRegrant  = 12 * time.Second
	LeaseTTL     = RealLease / leasePace
	LeaseRegrant = RealRegrant / leasePace
)

// CalmLease is lease_ttl of a cluster that is Calm.
const CalmLease = 2 * LeaseTTL

// LongLeases gives longer leases: none ends because the machine is busy.
func LongLeases(c *Members) {
	c.timers["lease_ttl"], c.timers["lease_regrant"] = CalmLease, 2*LeaseRegrant
}

// Calm gives longer leases, and streams their real time: on a busy machine no node is taken for silent or
// lost. It is for tests whose nodes all live, or are asked to end.
func Calm(c *Members) {
	LongLeases(c)
	delete(c.timers, "stream_suspect")
	delete(c.timers, "stream_out")
}

func memberTimers() map[string]time.Duration {
	return map[string]time.Duration{
		"lease_ttl": LeaseTTL, "lease_renew": 2 * time.Second / leasePace, "lease_regrant": LeaseRegrant,
		"stream_heartbeat": 250 * time.Millisecond / streamPace, "stream_suspect": time.Second / streamPace,
		"stream_out":  3 * time.Second / streamPace,
		"start_retry": time.Second / Pace, "restart_min": time.Second / Pace,
		"resend":     2 * time.Second / Pace,
		"kill_grace": 5 * time.Second / Pace,
	}
}

// StartMembers makes a cluster of n nodes, or of one for each list of flags: node 0 begins it, the others
// join. It returns when all are alive and those with role control that should vote do. At the test's end
// nothing is left running, or the test fails.
func StartMembers(t testing.TB, flags [][]string, options ...MembersOption) *Members {
	t.Helper()
	c := &Members{
		Expected: &Expected{}, T: t, apps: map[string]bool{}, dir: DataDir(t), net: loopNet(t),
		slots: 64, timers: memberTimers(),
	}
	c.Expect(slowMachine)
	for _, o := range options {
		o(c)
	}
	first := c.net + "1" // a port that a program has on every address is found on one
	c.nodePort = ports.Take(t, 4, first)
	c.gossip, c.http, c.admin = c.nodePort+1, c.nodePort+2, c.nodePort+3
	c.engines = ports.FreeRun(t, enginesOfANode, first)
	t.Cleanup(c.end)
	for i, f := range flags {
		m := c.Add(string(rune('a'+i)), f...)
		if i == 0 {
			c.token = m.firstToken()
		}
	}
	c.Settled()
	return c
}

// Each gives the same flags to n nodes.
func Each(n int, flags ...string) [][]string { return slices.Repeat([][]string{flags}, n) }

// Add starts one more node that joins the cluster, and does not wait for it; the first one begins the
// cluster.
func (c *Members) Add(name string, flags ...string) *Member {
	c.T.Helper()
	m := &Member{Name: name, rig: c, flags: flags, dir: filepath.Join(c.dir, name)}
	m.Move(c.NextIP())
	if len(c.All) == 0 {
		m.Start()
	} else {
		m.Join(c.token)
	}
	c.All = append(c.All, m)
	return m
}

// NextIP returns an address of the rig that no node has yet.
func (c *Members) NextIP() string {
	c.addresses++
	return c.net + strconv.Itoa(c.addresses)
}

// Token returns the token that new nodes join with.
func (c *Members) Token() string { return c.token }

// NodePort returns the address that other nodes join at.
func (c *Members) NodePort() int { return c.nodePort }

// By is the node of a name.
func (c *Members) By(name string) *Member {
	c.T.Helper()
	for _, m := range c.All {
		if m.Name == name {
			return m
		}
	}
	c.T.Fatalf("there is no node %q", name)
	return nil
}

// Up are the nodes whose process runs and is not stopped.
func (c *Members) Up() []*Member {
	return slices.DeleteFunc(slices.Clone(c.All), func(m *Member) bool { return !m.Runs() || m.frozen })
}

// Nodes is the list of nodes, as the first that answers tells it.
func (c *Members) Nodes() (list []client.NodeStatus, err error) {
	err = fmt.Errorf("no node of %d runs", len(c.All))
	for _, m := range c.Up() {
		if list, err = m.Nodes(); err == nil {
			return list, nil
		}
	}
	return nil, err
}

// WaitNode waits until a node's status is as wanted.
func (c *Members) WaitNode(name, what string, want func(s *client.NodeStatus) bool) {
	c.T.Helper()
	c.Eventually("node "+name+" "+what, func() error {
		list, err := c.Nodes()
		if err != nil {
			return err
		}
		for i := range list {
			if list[i].Node == name && want(&list[i]) {
				return nil
			}
		}
		return fmt.Errorf("nodes are %s", brief(list))
	})
}

// Settled waits until the running nodes are alive, the others are not, and the right number of nodes votes:
// 1, 3 or 5.
func (c *Members) Settled() {
	c.T.Helper()
	c.Eventually("all nodes alive, voters as they should be", func() error {
		list, err := c.Nodes()
		if err != nil {
			return err
		}
		return c.settled(list)
	})
}

func (c *Members) settled(list []client.NodeStatus) error {
	control, present, voters, leaders := 0, 0, 0, 0
	alive := map[string]bool{}
	for i := range list {
		s := &list[i]
		alive[s.Node] = s.State == "alive"
		if slices.Contains(s.Roles, "control") {
			control++
			if s.State != "lost" {
				present++
			}
		}
		if s.Voter {
			voters++
		}
		if s.Leader {
			leaders++
		}
	}
	for _, m := range c.All {
		if alive[m.Name] != (m.Runs() && !m.frozen) {
			return fmt.Errorf("node %s: nodes are %s", m.Name, brief(list))
		}
	}
	// lost nodes alone bring nobody down to one vote
	want := max(votersFor(present), min(votersFor(control), 3))
	if voters != want || leaders != 1 {
		return fmt.Errorf("%d of %d control nodes vote, want %d, and %d lead: %s", voters, control, want,
			leaders, brief(list))
	}
	return nil
}

// votersFor is how many of n control nodes vote.
func votersFor(n int) int { return (min(n, 5)-1)/2*2 + 1 }

func brief(list []client.NodeStatus) string {
	var out []string
	for i := range list {
		s := &list[i]
		text := fmt.Sprintf("%s %s ranks=%d", s.Node, s.State, s.Ranks)
		if s.Leader {
			text += " leads"
		}
		if s.Voter {
			text += " votes"
		}
		out = append(out, text)
	}
	return strings.Join(out, ", ")
}

// Leader is the node that leads.
func (c *Members) Leader() *Member {
	c.T.Helper()
	name := ""
	c.Eventually("a leader", func() error {
		list, err := c.Nodes()
		for i := range list {
			if list[i].Leader {
				name = list[i].Node
			}
		}
		if err == nil && name == "" {
			err = fmt.Errorf("nodes are %s", brief(list))
		}
		return err
	})
	return c.By(name)
}

// Eventually polls until f returns nil, or fails the test with f's last error.
func (c *Members) Eventually(what string, f func() error) {
	c.T.Helper()
	if err := WaitFor(Patience, pollEvery, f); err != nil {
		c.T.Fatalf("waiting for %s: %v", what, err)
	}
}

// pollEvery is the wait between two questions of a test that waits.
const pollEvery = 50 * time.Millisecond

// end checks that the nodes have nothing in hand, stops all at once, and looks for what they left behind.
func (c *Members) end() {
	for _, m := range c.Up() {
		//nolint:testifylint // all nodes are checked
		assert.NoError(c.T, soon(func() error { return idle(m.ask, slices.Collect(maps.Keys(c.apps))...) }),
			"work in hand at node %s", m.Name)
	}
	before := map[string]int{}
	for _, m := range c.All {
		before[m.Name] = len(m.Log())
	}
	for _, m := range c.All {
		m.signal(syscall.SIGCONT)
		m.signal(os.Interrupt)
	}
	for _, m := range c.All {
		m.gone()
	}
	// On a busy machine it takes seconds to read all command lines once.
	//nolint:testifylint // the nodes' logs are looked at too
	assert.NoError(c.T, soon(func() error {
		if pids := c.leftovers(); len(pids) > 0 {
			return fmt.Errorf("%v", pids)
		}
		return nil
	}), "processes left behind")
	for _, m := range c.All {
		c.check(c.T, "node "+m.Name, m.Log(), before[m.Name])
	}
	if c.T.Failed() {
		for _, m := range c.All {
			c.T.Logf("node %s at %s\n%s", m.Name, m.IP, m.Log())
		}
	}
}

// leftovers returns the processes whose command line names an address of the rig: its nodes and their
// engines.
func (c *Members) leftovers() (pids []int) {
	for pid, args := range commands() {
		if strings.Contains(strings.Join(args, " "), c.net) && Alive(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

var rigs atomic.Int64

// enginesOfANode is how many ports each node has for engines.
const enginesOfANode = 4000

// loopNet is a range of loopback addresses for one cluster, 127.X.Y., that no other cluster of tests has
// until t ends: a listener on its last address is the sign.
func loopNet(t testing.TB) string {
	t.Helper()
	const signPort = 19_999
	for range 1000 {
		prefix := fmt.Sprintf("127.%d.%d.", 1+os.Getpid()%250, 1+rigs.Add(1)%250)
		sign, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", prefix+"254:"+strconv.Itoa(signPort))
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			t.Skipf("this machine has no loopback addresses but 127.0.0.1: %v", err)
		}
		t.Cleanup(func() { _ = sign.Close() })
		return prefix
	}
	t.Fatal("no range of loopback addresses is free")
	return ""
}

var tokenLine = regexp.MustCompile(`--token (\S+)`)

// timerFlag is --timers.
func (c *Members) timerFlag() string {
	var out []string
	for name, d := range c.timers {
		out = append(out, name+"="+d.String())
	}
	slices.Sort(out)
	return strings.Join(out, ",")
}
