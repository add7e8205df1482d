package rankassigner

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// store is a Store and Proposer in memory that can be made to panic or to block.
type store struct {
	mu      sync.Mutex
	state   *state.State
	changed chan struct{}
	panics  int
	gate    chan struct{} // Propose waits for it
	most    int           // highest number of concurrent proposals
	now     int
}

func newStore() *store { return &store{state: state.New(), changed: make(chan struct{})} }

func (s *store) State() *state.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.panics > 0 {
		s.panics--
		panic("store")
	}
	return s.state.Clone()
}

func (s *store) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

func (s *store) Propose(ctx context.Context, c state.Command) (state.Result, error) {
	s.mu.Lock()
	s.now++
	s.most = max(s.most, s.now)
	gate := s.gate
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.now--
	}()
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return state.Result{}, ctx.Err()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.state.Apply(s.state.Index+1, &c)
	if err == nil {
		close(s.changed)
		s.changed = make(chan struct{})
	}
	return r, err
}

type rig struct {
	*Assigner
	store *store
	t     *testing.T
}

func node(id string, slots int) state.Node {
	return state.Node{
		ID: id, UID: "uid-" + id, Roles: []state.Role{state.RoleControl, state.RoleWorker},
		Resources: state.Resources{Slots: slots, PortLo: 20000, PortHi: 29999},
	}
}

// rigged runs f in a bubble of fake time with a started assigner.
func rigged(t *testing.T, f func(t *testing.T, r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		for _, id := range []string{"a", "b"} {
			_, err := s.Propose(t.Context(), state.Command{PutNode: &state.PutNode{Node: node(id, 64)}})
			require.NoError(t, err)
		}
		r := &rig{New(Config{Store: s, Proposer: s, Log: slog.New(slog.DiscardHandler)}), s, t}
		system := inbox.NewSystem(slog.New(slog.DiscardHandler))
		require.NoError(t, r.Start(system))
		f(t, r)
		require.NoError(t, r.Close())
		require.NoError(t, r.Close())
		system.Shutdown()
		time.Sleep(time.Second) // fake time: protoactor's own goroutines end
	})
}

func (r *rig) deploy(name string, dp int, coupling app.Coupling) {
	spec, err := json.Marshal([]*app.Application{application(name, dp, coupling)})
	require.NoError(r.t, err)
	_, err = r.store.Propose(r.t.Context(),
		state.Command{PutApps: &state.PutApps{Apps: []state.AppSpec{{Name: name, Spec: spec}}}})
	require.NoError(r.t, err)
}

func application(name string, dp int, coupling app.Coupling) *app.Application {
	return &app.Application{
		Name: name, NumGroups: 1, PlacementGroupStrategy: "PACK",
		DataParallel: app.DataParallel{DPSize: dp, Coupling: coupling},
	}
}

// wanted asks for all units of a group; expect is the epoch before.
func wanted(a *app.Application, expect uint64, nodes ...string) *msg.AssignGroup {
	m := &msg.AssignGroup{App: a, Nodes: nodes}
	m.Grant = state.GrantGroup{App: a.Name, Pool: a.Pool, AppRevision: 1}
	for _, u := range a.Units() {
		m.Grant.Units = append(m.Grant.Units, state.UnitGrant{Unit: u.ID, ExpectEpoch: expect, Attempt: 1})
	}
	return m
}

// ask asks for a group and returns the answer.
func (r *rig) ask(m *msg.AssignGroup) msg.GroupAssigned {
	answer := make(chan msg.GroupAssigned, 1)
	r.AssignGroup(m, func(out msg.GroupAssigned) { answer <- out })
	return <-answer
}

// grant has the whole group granted; expect is the epoch before.
func (r *rig) grant(name string, dp int, lockstep bool, expect uint64) (state.Result, error) {
	coupling := app.Independent
	if lockstep {
		coupling = app.Lockstep
	}
	out := r.ask(wanted(application(name, dp, coupling), expect, "a", "b"))
	return out.Result, out.Err
}

func (r *rig) release(m msg.ReleaseRank) error {
	answer := make(chan error, 1)
	r.Release(m, func(err error) { answer <- err })
	return <-answer
}

func (r *rig) await(unit string, epoch uint64, rank int) <-chan msg.AwaitReply {
	out := make(chan msg.AwaitReply, 1)
	go func() {
		said, err := r.Await(r.t.Context(), unit, epoch, rank)
		said.Err = err
		out <- said
	}()
	synctest.Wait()
	return out
}

func nodesOf(ranks []state.RankGrant) (out []string) {
	for i := range ranks {
		out = append(out, ranks[i].Node)
	}
	return out
}

func TestAssignReadsTheGrantAndIsIdempotent(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("chat", 4, app.Independent)
		_, err := r.Assign(t.Context(), "chat", 0, "chat.0.1")
		require.ErrorIs(t, err, ErrNotGranted)
		res, err := r.grant("chat", 4, false, 0)
		require.NoError(t, err)
		assert.Len(t, res.Epochs, 4)
		for range 3 {
			for rank := range 4 {
				a, err := r.Assign(t.Context(), "chat", 0, msg.ReplicaID("chat", 0, rank))
				require.NoError(t, err)
				assert.Equal(t, msg.AssignReply{Rank: rank, Epoch: 1, DPSize: 4}, a)
			}
		}
		_, err = r.grant("chat", 4, false, 1)
		require.NoError(t, err)
		a, err := r.Assign(t.Context(), "chat", 0, "chat.0.3")
		require.NoError(t, err)
		assert.Equal(t, uint64(2), a.Epoch)
	})
}

func TestRankBeyondTheGroupIsRefused(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("chat", 4, app.Lockstep)
		_, err := r.grant("chat", 4, true, 0)
		require.NoError(t, err)
		_, err = r.Assign(t.Context(), "chat", 0, "chat.0.4")
		require.ErrorIs(t, err, ErrGroupFull)
		assert.Equal(t, problem.Conflict, problem.CodeOf(err))
		assert.EqualError(t, err,
			"assign rank: group is full: group chat/0 has 4 ranks, chat.0.4 would be one more")
	})
}

func TestAssignRefusesWhatIsNoReplicaOfTheGroup(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("a.b", 2, app.Independent)
		_, err := r.grant("a.b", 2, false, 0)
		require.NoError(t, err)
		_, err = r.Assign(t.Context(), "a.b", 0, "a.b.0.1")
		require.NoError(t, err, "a dot in the name")
		for _, id := range []string{
			"", "a.b.0.", "a.b.0.01", "a.b.0.-1", "a.b.0.+1", "a.b.1.1", "x.0.1",
			"1", "a.b.0.99999999999999999999",
		} {
			_, err := r.Assign(t.Context(), "a.b", 0, id)
			require.ErrorIs(t, err, ErrBadReplica, id)
		}
		_, err = r.Assign(t.Context(), "x", 0, "x.0.0")
		require.ErrorIs(t, err, state.ErrUnknownApp)
		_, err = r.Assign(t.Context(), "a.b", 1, "a.b.1.0")
		require.ErrorIs(t, err, ErrNotGranted)
	})
}

// A panic in Receive costs one question. Ranks, epochs and waiting callers stay.
func TestSurvivesItsOwnRestart(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("moe", 2, app.Lockstep)
		_, err := r.grant("moe", 2, true, 0)
		require.NoError(t, err)
		before, err := r.Assign(t.Context(), "moe", 0, "moe.0.1")
		require.NoError(t, err)
		waiting := r.await("moe/0", 1, 1)

		r.store.mu.Lock()
		r.store.panics = 1
		r.store.mu.Unlock()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = r.Await(ctx, "moe/0", 1, 0)
		require.ErrorIs(t, err, context.DeadlineExceeded, "its answer is lost, the deadline is not")

		r.store.mu.Lock()
		r.store.panics = 1
		r.store.mu.Unlock()
		m := wanted(application("moe", 2, app.Lockstep), 1, "a")
		out := r.ask(m)
		require.ErrorIs(t, out.Err, errNotPlaced, "the controller may not wait for ever")
		assert.Equal(t, m.Grant, out.Grant)

		after, err := r.Assign(t.Context(), "moe", 0, "moe.0.1")
		require.NoError(t, err)
		assert.Equal(t, before, after)
		r.Publish(msg.Publish{Unit: "moe/0", Epoch: 1, Rank: 0, Addr: "10.0.0.1", Port: 20020})
		assert.Equal(t, msg.AwaitReply{Addr: "10.0.0.1", Port: 20020}, <-waiting)
	})
}

func TestRendezvous(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("moe", 3, app.Lockstep)
		_, err := r.grant("moe", 3, true, 0)
		require.NoError(t, err)
		one, two := r.await("moe/0", 1, 1), r.await("moe/0", 1, 2)
		time.Sleep(119 * time.Second)
		r.Publish(msg.Publish{Unit: "moe/0", Epoch: 1, Rank: 0, Addr: "h", Port: 7})
		assert.Equal(t, msg.AwaitReply{Addr: "h", Port: 7}, <-one)
		assert.Equal(t, msg.AwaitReply{Addr: "h", Port: 7}, <-two)
		time.Sleep(time.Hour)
		assert.Equal(t, msg.AwaitReply{Addr: "h", Port: 7}, <-r.await("moe/0", 1, 2),
			"late, but it was published")
	})
}

// Ranks of any node meet. Rank 0's node repeats its address while the unit starts.
func TestRendezvousOverNodes(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("moe", 4, app.Lockstep)
		m := wanted(application("moe", 4, app.Lockstep), 0, "a", "b")
		m.App.PlacementGroupStrategy, m.App.MaxRanksPerNode = "SPREAD", 2
		out := r.ask(m)
		require.NoError(t, out.Err)
		assert.Equal(t, []string{"a", "a", "b", "b"}, nodesOf(out.Grant.Units[0].Ranks))
		two := r.await("moe/0", 1, 2)
		p := msg.Publish{Unit: "moe/0", Epoch: 1, Rank: 0, Addr: "10.0.0.1", Port: 20020}
		r.Publish(p)
		assert.Equal(t, msg.AwaitReply{Addr: "10.0.0.1", Port: 20020}, <-two)
		for range 100 {
			r.Publish(p)
			time.Sleep(2 * time.Second)
		}
		assert.Equal(t, msg.AwaitReply{Addr: "10.0.0.1", Port: 20020}, <-r.await("moe/0", 1, 3))
		require.NoError(t, r.Close())
		assert.Len(t, r.table.meetings, 1)
	})
}

// Waiting ranks ask the next leader, and rank 0's node repeats its address.
func TestNewLeaderLearnsTheRendezvous(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("moe", 2, app.Lockstep)
		_, err := r.grant("moe", 2, true, 0)
		require.NoError(t, err)
		waiting := r.await("moe/0", 1, 1)
		synctest.Wait()
		require.NoError(t, r.Close())
		reply := <-waiting
		require.ErrorIs(t, reply.Err, cluster.ErrNotLeader)

		next := New(r.cfg)
		system := inbox.NewSystem(slog.New(slog.DiscardHandler))
		require.NoError(t, next.Start(system))
		go func() {
			time.Sleep(2 * time.Second)
			next.Publish(msg.Publish{Unit: "moe/0", Epoch: 1, Rank: 0, Addr: "10.0.0.1", Port: 7})
		}()
		said, err := next.Await(t.Context(), "moe/0", 1, 1)
		require.NoError(t, err)
		assert.Equal(t, msg.AwaitReply{Addr: "10.0.0.1", Port: 7}, said)
		for _, settings := range []string{"block size 16", ""} { // a late repetition changes nothing
			next.Publish(msg.Publish{Unit: "moe/0", Epoch: 1, Addr: "10.0.0.1", Port: 7, Settings: settings})
		}
		said, err = next.Await(t.Context(), "moe/0", 1, 1)
		require.NoError(t, err)
		assert.Equal(t, "block size 16", said.Settings)
		require.NoError(t, next.Close())
		system.Shutdown()
		time.Sleep(time.Second)
	})
}

func TestRendezvousTimesOutAndNamesTheMissing(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("moe", 5, app.Lockstep)
		_, err := r.grant("moe", 5, true, 0)
		require.NoError(t, err)
		began := time.Now()
		one, three := r.await("moe/0", 1, 1), r.await("moe/0", 1, 3)
		for _, w := range []<-chan msg.AwaitReply{one, three} {
			err := (<-w).Err
			require.ErrorIs(t, err, ErrRendezvous)
			assert.Equal(t, problem.Timeout, problem.CodeOf(err))
			require.EqualError(t, err,
				"rendezvous timed out: moe/0, epoch 1: after 2m0s no report from ranks 0, 2, 4")
		}
		assert.Equal(t, DefaultRendezvous, time.Since(began), "fake time")
		require.ErrorIs(t, (<-r.await("moe/0", 1, 4)).Err, ErrRendezvous, "those who come later fail at once")

		_, err = r.grant("moe", 5, true, 1)
		require.NoError(t, err)
		waiting := r.await("moe/0", 2, 1)
		r.Publish(msg.Publish{Unit: "moe/0", Epoch: 1, Rank: 0, Addr: "old", Port: 1})
		r.Publish(msg.Publish{Unit: "moe/0", Epoch: 2, Rank: 0, Addr: "new", Port: 2})
		assert.Equal(t, msg.AwaitReply{Addr: "new", Port: 2}, <-waiting, "the next epoch meets anew")
	})
}

func TestMissingRanksInWords(t *testing.T) {
	assert.Equal(t, "rank 3", rankList([]int{3}))
	assert.Equal(t, "ranks 1, 12", rankList([]int{12, 1}))
	assert.Equal(t, "rank 0, which reported but published no address", rankList(nil))
}

func TestWaitersOfASupersededOrReleasedGrantAreLetGo(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("moe", 2, app.Lockstep)
		require.ErrorIs(t, (<-r.await("moe/0", 1, 1)).Err, ErrNotGranted)
		_, err := r.grant("moe", 2, true, 0)
		require.NoError(t, err)
		require.ErrorIs(t, (<-r.await("moe/0", 1, 7)).Err, ErrNotGranted, "no such rank")
		old := r.await("moe/0", 1, 1)
		_, err = r.grant("moe", 2, true, 1)
		require.NoError(t, err)
		require.ErrorIs(t, (<-old).Err, state.ErrStaleEpoch)
		require.ErrorIs(t, (<-r.await("moe/0", 1, 1)).Err, state.ErrStaleEpoch)
		released := r.await("moe/0", 2, 1)
		require.NoError(t, r.release(msg.ReleaseRank{Unit: "moe/0", Epoch: 2}))
		require.ErrorIs(t, (<-released).Err, state.ErrStaleEpoch)
		require.NoError(t, r.Close())
		assert.Empty(t, r.table.meetings)
	})
}

func TestOneWaiterPerRank(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("moe", 2, app.Lockstep)
		_, err := r.grant("moe", 2, true, 0)
		require.NoError(t, err)
		first := r.await("moe/0", 1, 1)
		second := r.await("moe/0", 1, 1)
		require.ErrorIs(t, (<-first).Err, ErrSuperseded)
		r.Publish(msg.Publish{Unit: "moe/0", Epoch: 1, Rank: 0, Addr: "h", Port: 1})
		require.NoError(t, (<-second).Err)
	})
}

func TestRelease(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("moe", 2, app.Lockstep)
		r.deploy("chat", 1, app.Independent)
		_, err := r.grant("moe", 2, true, 0)
		require.NoError(t, err)
		require.ErrorIs(t, r.release(msg.ReleaseRank{Unit: "moe/0", Epoch: 7}),
			state.ErrStaleEpoch)
		require.NoError(t, r.release(msg.ReleaseRank{Unit: "moe/0", Epoch: 1}))
		require.ErrorIs(t, r.release(msg.ReleaseRank{Unit: "moe/0", Epoch: 1}),
			state.ErrUnknownUnit)
		assert.Empty(t, r.store.State().Units)
	})
}

// 64 commands run at once, the others wait, and none runs inside Receive.
func TestCommandsAreBounded(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("chat", 1, app.Independent)
		_, err := r.grant("chat", 1, false, 0)
		require.NoError(t, err)
		r.store.mu.Lock()
		r.store.gate = make(chan struct{})
		r.store.mu.Unlock()
		var wg sync.WaitGroup
		errs := make(chan error, 100)
		for range 100 {
			wg.Go(func() {
				errs <- r.release(msg.ReleaseRank{Unit: "chat/0/0", Epoch: 1})
			})
		}
		synctest.Wait()
		_, err = r.Assign(t.Context(), "chat", 0, "chat.0.0")
		require.NoError(t, err, "the actor answers meanwhile")
		close(r.store.gate)
		wg.Wait()
		close(errs)
		good := 0
		for err := range errs {
			if err == nil {
				good++
			} else {
				require.ErrorIs(t, err, state.ErrUnknownUnit)
			}
		}
		assert.Equal(t, 1, good)
		assert.Equal(t, maxCommands, r.store.most)
	})
}

func TestCommandHasADeadline(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("chat", 1, app.Independent)
		r.store.mu.Lock()
		r.store.gate = make(chan struct{})
		r.store.mu.Unlock()
		began := time.Now()
		_, err := r.grant("chat", 1, false, 0)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, DefaultProposal, time.Since(began), "fake time")
	})
}

// Waiting callers get ErrStopped; messages after the stop are dropped.
func TestCloseLetsEveryoneGo(t *testing.T) {
	rigged(t, func(t *testing.T, r *rig) {
		r.deploy("moe", 2, app.Lockstep)
		_, err := r.grant("moe", 2, true, 0)
		require.NoError(t, err)
		waiting := r.await("moe/0", 1, 1)
		r.store.mu.Lock()
		r.store.gate = make(chan struct{})
		r.store.mu.Unlock()
		granting := make(chan error, 1)
		go func() {
			_, err := r.grant("moe", 2, true, 1)
			granting <- err
		}()
		synctest.Wait()
		require.NoError(t, r.Close())
		require.ErrorIs(t, (<-waiting).Err, ErrStopped)
		err = <-granting
		assert.True(t, errors.Is(err, ErrStopped) || errors.Is(err, context.Canceled), err)
		_, err = r.Assign(t.Context(), "moe", 0, "moe.0.1")
		require.ErrorIs(t, err, ErrStopped)
		require.ErrorIs(t, err, cluster.ErrNotLeader)
		assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
		r.Publish(msg.Publish{Unit: "moe/0", Epoch: 1})
	})
}

func TestTimersArePinned(t *testing.T) {
	assert.Equal(t, Timers{Rendezvous: 120 * time.Second, Proposal: 5 * time.Second}, Timers{}.withDefaults())
}

func FuzzPositionOfReplicaID(f *testing.F) {
	f.Add("chat", 0, "chat.0.3")
	f.Add("a.b", 1, "a.b.1.0")
	f.Fuzz(func(t *testing.T, name string, group int, id string) {
		slot, err := parseReplicaID(name, group, id)
		if err == nil {
			assert.Equal(t, id, msg.ReplicaID(name, group, slot), "one spelling per replica")
			assert.GreaterOrEqual(t, slot, 0)
		}
	})
}
