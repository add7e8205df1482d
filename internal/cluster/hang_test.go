package cluster_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/memnet"
)

// hangs is a disk whose calls do not return between begin and end. It is safe for concurrent use.
type hangs struct {
	mu    sync.Mutex
	until chan struct{} // nil = it answers
	reads bool          // reads hang, instead of writes
}

// begin makes calls hang until end.
func (h *hangs) begin(reads bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.until, h.reads = make(chan struct{}), reads
}

func (h *hangs) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.until != nil {
		close(h.until)
		h.until = nil
	}
}

func (h *hangs) wait(read bool) {
	h.mu.Lock()
	until, mine := h.until, h.reads == read
	h.mu.Unlock()
	if until != nil && mine {
		<-until
	}
}

// on returns a config whose disk hangs between begin and end.
func (h *hangs) on(cfg cluster.Config) cluster.Config {
	cfg.Stores = func(s cluster.LogStore) cluster.LogStore { return hungDisk{s, h} }
	return cfg
}

type hungDisk struct {
	cluster.LogStore
	hangs *hangs
}

func (d hungDisk) StoreLogs(logs []*raft.Log) error {
	d.hangs.wait(false)
	return d.LogStore.StoreLogs(logs)
}

func (d hungDisk) DeleteRange(from, to uint64) error {
	d.hangs.wait(false)
	return d.LogStore.DeleteRange(from, to)
}

func (d hungDisk) Set(key, value []byte) error {
	d.hangs.wait(false)
	return d.LogStore.Set(key, value)
}

func (d hungDisk) SetUint64(key []byte, value uint64) error {
	d.hangs.wait(false)
	return d.LogStore.SetUint64(key, value)
}

func (d hungDisk) GetLog(index uint64, l *raft.Log) error {
	d.hangs.wait(true)
	return d.LogStore.GetLog(index, l)
}

func (d hungDisk) IsMonotonic() bool { return true }

// hostLayer connects the hosts of a network in memory.
type hostLayer struct {
	net.Listener
	host *memnet.Host
}

func (l hostLayer) Dial(_, to string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return l.host.DialContext(ctx, "tcp", to)
}

// room is a group of voters with the default timers, in memory and on fake time. The first one's disk can
// hang.
type room struct {
	t    *testing.T
	net  *memnet.Network
	all  []*cluster.Cluster
	disk *hangs
}

const roomPort = ":9000"

// followsWithin is how long a node may take to follow after its disk answers again: its next run begins a
// second later, and raft's leader tries to send entries to a node that has failed for long only every 10.24
// s.
const followsWithin = 12 * time.Second

func hostOf(i int) string { return fmt.Sprintf("127.0.0.%d", i+1) }

// inRoom runs f in a bubble with n voters. The first one leads.
func inRoom(t *testing.T, n int, f func(t *testing.T, r *room)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &room{t: t, net: &memnet.Network{}, disk: &hangs{}}
		defer r.close()
		for i := range n {
			r.enter(i)
		}
		r.until("the first one leads", time.Minute, func() bool { return r.all[0].Leader() })
		r.propose(r.all[0], putApp("demo", "one"))
		f(t, r)
	})
}

// close ends all voters, also after a failure: a goroutine that is left in a bubble ends the whole test
// binary.
func (r *room) close() {
	r.disk.end()
	for _, c := range r.all {
		if err := c.Close(); err != nil {
			r.t.Errorf("close %s: %v", c.NodeID(), err)
		}
	}
	time.Sleep(time.Minute) // connections see that both ends are gone
}

func (r *room) enter(i int) {
	r.t.Helper()
	host := r.net.Host(hostOf(i))
	l, err := host.Listen(hostOf(i) + roomPort)
	require.NoError(r.t, err)
	cfg := cluster.Config{NodeID: fmt.Sprintf("node-%d", i+1), Layer: hostLayer{l, host}, Forward: r.forward}
	if i == 0 {
		cfg = r.disk.on(cfg)
	} else {
		cfg.Member, cfg.ClusterID = true, r.all[0].ClusterID()
	}
	c, err := cluster.Open(cfg)
	require.NoError(r.t, err)
	r.all = append(r.all, c)
	if i == 0 {
		require.NoError(r.t, c.Ready(r.t.Context()))
	}
	r.propose(r.all[0], state.Command{PutNode: &state.PutNode{Node: state.Node{
		ID: c.NodeID(), UID: c.UID(), Address: hostOf(i) + roomPort, Roles: []state.Role{state.RoleControl},
	}}})
	if i > 0 {
		require.NoError(r.t, r.all[0].AddStandby(r.t.Context(), c.UID()))
		require.NoError(r.t, c.Ready(r.t.Context()))
		require.NoError(r.t, r.all[0].Promote(r.t.Context(), c.UID()))
		r.until("all know of the voter", time.Minute, func() bool {
			for _, m := range r.all {
				if len(m.Members()) != i+1 || !m.Members()[i].Voter {
					return false
				}
			}
			return true
		})
	}
}

func (r *room) forward(ctx context.Context, leader state.Node, c state.Command) (state.Result, error) {
	for _, m := range r.all {
		if m.UID() == leader.UID {
			return m.ProposeHere(ctx, c)
		}
	}
	return state.Result{}, errCut
}

func (r *room) propose(at *cluster.Cluster, cmd state.Command) {
	r.t.Helper()
	_, err := at.Propose(r.t.Context(), cmd)
	require.NoError(r.t, err)
}

// until waits at most limit and returns how much time has passed.
func (r *room) until(what string, limit time.Duration, is func() bool) time.Duration {
	r.t.Helper()
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		synctest.Wait()
		if is() {
			return time.Since(began)
		}
		if time.Since(began) > limit {
			r.t.Fatalf("not within %s: %s", limit, what)
		}
	}
}

// otherLeads reports whether another voter leads, and the first one does not claim to lead.
func (r *room) otherLeads() bool { return !r.all[0].Leader() && r.otherLeader() != nil }

// otherLeader returns the leader if it is not the first voter, else nil.
func (r *room) otherLeader() *cluster.Cluster {
	for _, c := range r.all[1:] {
		if c.Leader() {
			return c
		}
	}
	return nil
}

func hasApp(c *cluster.Cluster, name string) bool { return c.State().Apps[name] != nil }

// confirmed reports whether a node confirms its leadership within a second.
func (r *room) confirmed(c *cluster.Cluster) error {
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Second)
	defer cancel()
	return c.Confirm(ctx)
}

// electedWithin is how long the election of another leader may take: 1.5 s for the write, a heartbeat
// time-out of up to 2 s, an election, and one more election time-out if the vote is split.
const electedWithin = 7 * time.Second

// HF1: a write of the leader's log does not return. Another node leads within electedWithin and accepts
// writes. When the disk answers again, the first node follows, and nothing is lost.
func TestLeaderWithAHungDiskStepsDown(t *testing.T) {
	for _, hang := range []time.Duration{12 * time.Second, time.Minute} {
		t.Run(hang.String(), func(t *testing.T) {
			inRoom(t, 3, func(t *testing.T, r *room) {
				first := r.all[0]
				require.NoError(t, r.confirmed(first))
				r.disk.begin(false)
				began := time.Now()
				answer := make(chan error, 1)
				go func() {
					_, err := first.ProposeHere(t.Context(), putApp("demo", "two"))
					answer <- err
				}()
				t.Logf("another one leads after %s",
					r.until("another one leads", electedWithin, r.otherLeads))
				require.ErrorIs(t, <-answer, cluster.ErrDisk)
				require.ErrorIs(t, first.Fault(), cluster.ErrDisk)
				require.ErrorContains(t, first.Fault(), "a call has not returned for 1.5s")
				assert.False(t, first.Holds(), "others vote")
				require.Error(t, r.confirmed(first))
				r.propose(r.all[1], putApp("other", "x"))

				time.Sleep(hang - time.Since(began))
				assert.NotContains(t, first.State().Apps, "other", "it is not back while its disk hangs")
				r.disk.end()
				r.until("it follows", followsWithin, func() bool { return hasApp(first, "other") })
				require.NoError(t, first.Ready(t.Context()))
				r.until("the fault is over", 10*time.Second, func() bool { return first.Fault() == nil })
				assert.Contains(t, first.State().Apps, "demo")
				r.propose(first, putApp("third", "y"))
				for _, c := range r.all {
					r.until("all have it", time.Second, func() bool { return hasApp(c, "third") })
				}
			})
		})
	}
}

// HF1: raft cannot go on without the entry that it reads, so the run ends, and with it its heartbeats.
func TestLeaderWhoseReadsHangStepsDown(t *testing.T) {
	inRoom(t, 3, func(t *testing.T, r *room) {
		r.disk.begin(true)
		go func() { _, _ = r.all[0].ProposeHere(t.Context(), putApp("demo", "two")) }()
		r.until("another one leads", electedWithin, r.otherLeads)
		r.propose(r.all[1], putApp("other", "x"))
		r.disk.end()
		r.until("it follows", followsWithin, func() bool { return hasApp(r.all[0], "other") })
	})
}

// TestFollowerWithAHungDiskDisturbsNobody: the follower leaves and comes back, and the leader stays.
func TestFollowerWithAHungDiskDisturbsNobody(t *testing.T) {
	inRoom(t, 3, func(t *testing.T, r *room) {
		require.NoError(t, r.all[0].StepDown(t.Context()))
		r.until("another one leads", electedWithin, r.otherLeads)
		leader := r.otherLeader()
		term := leader.Term()
		r.disk.begin(false)
		r.propose(leader, putApp("other", "x"))
		r.until("the fault is seen", 5*time.Second, func() bool { return r.all[0].Fault() != nil })
		time.Sleep(10 * time.Second)
		r.propose(leader, putApp("third", "y"))
		r.disk.end()
		r.until("it follows", followsWithin, func() bool { return hasApp(r.all[0], "third") })
		assert.True(t, leader.Leader())
		assert.Equal(t, term, leader.Term(), "nobody had to vote")
	})
}

// HF1: the data dir stays locked until the hanging write has returned.
func TestCloseOverAHungDiskIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, dir := &hangs{}, t.TempDir()
		c, err := cluster.Open(h.on(cluster.Config{DataDir: dir}))
		require.NoError(t, err)
		require.NoError(t, c.Ready(t.Context()))
		h.begin(false)
		go func() { _, _ = c.ProposeHere(t.Context(), putApp("demo", "one")) }()
		time.Sleep(3 * time.Second)
		began := time.Now()
		require.ErrorIs(t, c.Close(), diskfile.ErrHangs)
		assert.Less(t, time.Since(began), 15*time.Second)
		_, err = cluster.Open(cluster.Config{DataDir: dir})
		require.Error(t, err, "the hung write has the data dir still")
		h.end()
		time.Sleep(time.Second)
		c, err = cluster.Open(cluster.Config{DataDir: dir})
		require.NoError(t, err)
		require.NoError(t, c.Close())
	})
}

// TestOnlyVoterHoldsWhileItsDiskHangs: no other node can lead, so the voter's decisions stay valid; it
// changes nothing.
func TestOnlyVoterHoldsWhileItsDiskHangs(t *testing.T) {
	inRoom(t, 1, func(t *testing.T, r *room) {
		c := r.all[0]
		r.disk.begin(false)
		go func() { _, _ = c.ProposeHere(t.Context(), putApp("demo", "two")) }()
		r.until("it holds", 5*time.Second, c.Holds)
		for range 60 {
			time.Sleep(time.Second)
			require.NoError(t, r.confirmed(c))
		}
		assert.False(t, c.Leader())
		assert.Equal(t, problem.Conflict, problem.CodeOf(c.StepDown(t.Context())), "there is no other voter")
		_, err := c.Propose(t.Context(), putApp("demo", "three"))
		require.ErrorIs(t, err, cluster.ErrDisk)
		r.disk.end()
		r.until("it leads", 10*time.Second, c.Leader)
		assert.False(t, c.Holds())
		require.NoError(t, r.confirmed(c))
	})
}

// TestNoHoldWithOtherVoters: the log on disk may name another voter, even one that raft does not know.
func TestNoHoldWithOtherVoters(t *testing.T) {
	inRoom(t, 1, func(t *testing.T, r *room) {
		c := r.all[0]
		require.NoError(t, c.AddStandby(t.Context(), "somebody"))
		r.disk.begin(false)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.Error(t, c.Promote(ctx, "somebody"), "not written, as far as raft knows")
		synctest.Wait() // raft answers before it steps down
		assert.False(t, c.Holds())
		require.Error(t, r.confirmed(c))
	})
}

// TestConfirmCountsOnlyWhatWasSentAfterIt: answers to earlier messages do not prove that the node leads now.
func TestConfirmCountsOnlyWhatWasSentAfterIt(t *testing.T) {
	inRoom(t, 3, func(t *testing.T, r *room) {
		for i := range 20 {
			for other := 1; other < 3; other++ {
				r.net.Delay(hostOf(other), hostOf(0), 200*time.Millisecond)
			}
			time.Sleep(time.Second + time.Duration(17*i)*time.Millisecond)
			require.True(t, r.all[0].Leader())
			for other := 1; other < 3; other++ { // nothing that is sent from now on arrives
				r.net.Silence(hostOf(0), hostOf(other))
			}
			require.Error(t, r.confirmed(r.all[0]))
			for other := 1; other < 3; other++ {
				r.net.Heal(hostOf(0), hostOf(other))
				r.net.Delay(hostOf(other), hostOf(0), 0)
			}
			r.until("the first one leads again", time.Minute, func() bool {
				for _, c := range r.all[1:] {
					if c.Leader() {
						_ = c.StepDown(t.Context())
					}
				}
				return r.all[0].Leader()
			})
		}
	})
}
