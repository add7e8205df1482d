package inprocess

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/harness"
)

// nothingMoved asserts that no node is lost, no unit was started again and no engine has ended.
func nothingMoved(t *testing.T, c *harness.Cluster, p *harness.Peer, engines int) {
	t.Helper()
	for id, n := range p.State().Nodes {
		assert.False(t, n.Lost, "node %s is lost: %s", id, n.Reason)
	}
	for id, u := range p.State().Units {
		assert.Equal(t, uint64(1), u.Epoch, "%s: %s", id, u.Reason)
	}
	assert.Len(t, c.Engines.Live(), engines)
}

// try deploys something that nothing else needs and returns the answer.
func try(t *testing.T, p *harness.Peer, name string) (code int, text string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	return put(ctx, p, spread(name, 1, "route_prefix: /"+name))
}

// HF1: the disk of the leader of three does not return from a write. Another node leads within 7 s; no node
// is lost, no engine restarted, no request fails, with either rule; when the disk is back, so is the node.
func TestLeadersDiskHangs(t *testing.T) {
	t.Parallel()
	for _, rule := range []string{"serve", "fence"} {
		for _, hang := range []time.Duration{8 * time.Second, time.Minute} {
			t.Run(fmt.Sprint(rule, " ", hang), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) { sickLeader(t, rule, (*harness.Disk).Hang, hang) })
			})
		}
	}
}

// MB10: every write fails for two leases. No lease runs out: an engine whose lease does is ended.
func TestLeadersDiskIsFull(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { sickLeader(t, "fence", (*harness.Disk).Fill, 20*time.Second) })
}

// sickLeader has a leader of three whose disk is sick for so long.
func sickLeader(t *testing.T, rule string, sicken func(*harness.Disk), long time.Duration) {
	c := harness.New(t, harness.Nodes(3), harness.Slots(4), harness.OnLeaseLoss(rule))
	c.Expect(harness.NodeFails, harness.DiskFails)
	c.WaitVoters(3)
	c.Deploy(spread("a", 6))
	c.WaitStatus("a", "RUNNING")
	time.Sleep(5 * time.Second)
	sick := c.Leader()
	var well []*harness.Peer
	var loads []*traffic
	for _, p := range c.Peers() {
		if p != sick {
			well = append(well, p)
		}
		loads = append(loads, ask(t, p, "a", 400*time.Millisecond, 10))
	}
	time.Sleep(2 * time.Second)
	engines := len(c.Engines.Live())

	sicken(sick.Disk)
	began := time.Now()
	refused := make(chan int, 1)
	go func() {
		code, _ := try(t, sick, "refused")
		refused <- code
	}()
	for sick.Leads() {
		time.Sleep(10 * time.Millisecond)
	}
	stood := time.Since(began)
	c.Leader(well...)
	took := time.Since(began)
	t.Logf("stood down %s after the write, another node leads after %s", stood, took)
	assert.LessOrEqual(t, stood, 2*time.Second, "1.5 s of them are for the write")
	assert.LessOrEqual(t, took, 7*time.Second, "an election time-out more than 5 s when the vote is split")
	assert.False(t, sick.Leads())
	assert.NotEqual(t, http.StatusAccepted, <-refused)
	deployed(t, well[0], spread("b", 1, "route_prefix: /b"))
	well[0].WaitStatus("b", "RUNNING")
	time.Sleep(long - time.Since(began))
	nothingMoved(t, c, well[0], engines+1)

	sick.Disk.Heal()
	c.Until("it is back", func() error {
		if sick.State().Apps["b"] == nil {
			return fmt.Errorf("its copy is old")
		}
		return nil
	})
	time.Sleep(20 * time.Second)
	nothingMoved(t, c, sick, engines+1)
	for _, l := range loads {
		assert.Zero(t, clean(t, l.end()), "streams broken")
	}
}

// MB10: one control node and a worker. While the disk of the log is full, or hangs, leases are renewed and
// engines live on, with either rule; what would change the state is refused, and done again when the disk is
// well.
func TestOnlyVotersDiskIsSick(t *testing.T) {
	t.Parallel()
	for _, rule := range []string{"serve", "fence"} {
		for name, sicken := range map[string]func(*harness.Disk){
			"full":  (*harness.Disk).Fill,
			"hangs": (*harness.Disk).Hang,
		} {
			t.Run(rule+" "+name, func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					c := harness.New(t, harness.Nodes(2), harness.Slots(4),
						harness.Roles(1, "worker", "ingress"), harness.OnLeaseLoss(rule))
					c.Expect(harness.NodeFails, harness.DiskFails)
					c.Deploy(spread("a", 4))
					c.WaitStatus("a", "RUNNING")
					time.Sleep(5 * time.Second)
					loads := []*traffic{
						ask(t, c.Peer(0), "a", 400*time.Millisecond, 10),
						ask(t, c.Peer(1), "a", 400*time.Millisecond, 10),
					}

					sicken(c.Peer(0).Disk)
					refused := func() {
						code, text := try(t, c.Peer(0), "refused")
						require.Equal(t, http.StatusServiceUnavailable, code, text)
						assert.Contains(t, text, "the disk of the data dir refuses writes")
					}
					refused()
					for range 12 {
						time.Sleep(5 * time.Second)
						for id, n := range c.List() {
							assert.Equal(t, "alive", n.State, "%s: %s", id, n.Reason)
							assert.Greater(t, n.LeaseLeftS, 6.0, id)
						}
						nothingMoved(t, c, c.Peer(1), 4)
					}
					assert.Empty(t, c.Journal.Find("lease cannot be renewed"))
					refused() // by a node that knows no leader, not even itself

					c.Peer(0).Disk.Heal()
					deployed(t, c.Peer(0), spread("b", 1, "route_prefix: /b"))
					c.WaitStatus("b", "RUNNING")
					time.Sleep(20 * time.Second)
					want := 5
					// a write that hangs may come to the disk all the same
					if c.Peer(0).State().Apps["refused"] != nil {
						c.WaitStatus("refused", "RUNNING")
						want = 6
					}
					nothingMoved(t, c, c.Peer(1), want)
					for _, l := range loads {
						assert.Zero(t, clean(t, l.end()), "streams broken")
					}
				})
			})
		}
	}
}

// MB10: a worker dies while the disk of the only voter fails. The loss is decided when the disk works again,
// not before.
func TestSickOnlyVoterTakesNobodyForLost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(2), harness.Slots(4), harness.Roles(1, "worker", "ingress"))
		c.Expect(harness.NodeFails, harness.DiskFails)
		c.Deploy(spread("a", 2))
		c.WaitStatus("a", "RUNNING")
		c.Peer(0).Disk.Fill()
		try(t, c.Peer(0), "refused")
		c.Peer(1).Drop()
		time.Sleep(30 * time.Second)
		assert.False(t, c.Peer(0).State().Nodes["node-2"].Lost)
		c.Peer(0).Disk.Heal()
		<-c.Peer(0).When(lost("node-2"))
		c.WaitStatus("a", "RUNNING")
	})
}

// HF44: what runs is served, a known unit is stopped, a start waits for the disk, and the node ends.
func TestAWorkersDiskHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(2), harness.Slots(4), harness.OnDisk(),
			harness.Roles(0, "control", "ingress"), harness.Roles(1, "worker"))
		c.Expect(harness.NodeFails, harness.DiskFails)
		c.Deploy(spread("a", 2))
		c.WaitStatus("a", "RUNNING")
		c.Deploy(spread("b", 1, "route_prefix: /b"))
		c.WaitStatus("b", "RUNNING")
		time.Sleep(5 * time.Second)
		load := ask(t, c.Peer(0), "a", 400*time.Millisecond, 10)

		c.Peer(1).Files.Hang()
		deployed(t, c.Peer(0), spread("late", 1, "route_prefix: /late"))
		time.Sleep(time.Minute)
		for id, n := range c.List() {
			assert.Equal(t, "alive", n.State, "%s: %s", id, n.Reason)
		}
		for id, u := range c.Peer(0).State().Units {
			assert.Equal(t, uint64(1), u.Epoch, id)
		}
		assert.Len(t, c.Engines.Live(), 3, "the start waits")
		assert.Equal(t, state.Starting, c.Peer(0).State().Units["late/0/0"].Phase)
		code, text := c.Do(http.MethodDelete, "/api/v1/apps/b", "")
		require.Less(t, code, 300, text)
		c.Until("b is gone", func() error {
			if n := len(c.Engines.Live()); n != 2 {
				return fmt.Errorf("%d engines", n)
			}
			return nil
		})
		assert.Zero(t, clean(t, load.end()), "streams broken")

		worker, began := c.Peer(1), time.Now()
		err := worker.End()
		assert.LessOrEqual(t, time.Since(began), 20*time.Second)
		require.ErrorIs(t, err, diskfile.ErrHangs)
		require.ErrorContains(t, err, "data dir "+worker.DataDir()+": its disk does not answer")
		worker.Files.Heal()
	})
}
