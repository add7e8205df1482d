// Package rankassigner is the RankAssigner of a data-parallel group: it places and numbers the ranks of
// whole groups, has them granted and released through consensus, answers assign_rank, and holds the
// rendezvous of the ranks of a lockstep group. What it answers comes from the replicated state; it keeps
// nothing that a restart could lose.
//
// It keeps no table of ranks: a rank is assigned when the replicated state says so, so a restarted
// RankAssigner assigns nothing twice. AssignGroup places all units of a request (Place, pure, over the state
// and the grants under way) and grants them with one command, which a goroutine proposes: Receive never
// blocks. A grant counts as used from its placing to its answer. Units that start again keep their
// assignment, unless a node of theirs is not usable, or is avoided while others have capacity. The replica
// with slot s of a group is its rank s; asking again gives the same answer.
//
// The rendezvous of a unit opens when rank 0 publishes its address and answers every Await; after 120 s it
// fails and names the ranks that did not report; a new grant drops it. Every AssignGroup, Release and Await
// is answered, also if placing panics.
package rankassigner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

const (
	// DefaultRendezvous is how long the ranks of a lockstep unit wait for rank 0's address.
	DefaultRendezvous = 120 * time.Second
	// DefaultProposal bounds one raft command.
	DefaultProposal = 5 * time.Second

	actorName    = "rankassigner"
	mailboxBound = 1024            // unreceived requests; more than the ranks of a node send at once
	maxCommands  = 64              // concurrent commands; each unit has at most one
	closeGrace   = 5 * time.Second // time for the actor to stop
)

// Timers of the RankAssigner. Zero fields mean the defaults.
type Timers struct {
	Rendezvous time.Duration // from the first report of a (unit, epoch) to rank 0's Publish
	Proposal   time.Duration // bound of one raft command
}

func (t Timers) withDefaults() Timers {
	t.Rendezvous = cmp.Or(max(0, t.Rendezvous), DefaultRendezvous)
	t.Proposal = cmp.Or(max(0, t.Proposal), DefaultProposal)
	return t
}

// Config is the configuration of an Assigner. Store, Proposer and Log are required.
type Config struct {
	Store    msg.Store
	Proposer msg.Proposer
	Timers   Timers
	Log      *slog.Logger
}

// Assigner is the running RankAssigner. Call Start before any other method; all other methods are safe for
// concurrent use. Every call ends with its context, and with ErrStopped after Close.
type Assigner struct {
	cfg       Config
	box       *inbox.Inbox
	table     *table                              // used by the actor only; survives a panic in Receive
	underWay  map[*groupRequest]*state.GrantGroup // used by the actor only: grants without an answer
	slots     chan struct{}                       // one for each command under way
	ctx       context.Context                     //nolint:containedctx // ends the commands at Close
	stop      context.CancelFunc
	loops     sync.WaitGroup
	closeOnce sync.Once
	closeErr  error
}

var _ msg.Assigner = (*Assigner)(nil)

// New makes an Assigner.
func New(cfg Config) *Assigner {
	cfg.Timers = cfg.Timers.withDefaults()
	return &Assigner{
		cfg: cfg, underWay: map[*groupRequest]*state.GrantGroup{}, slots: make(chan struct{}, maxCommands),
	}
}

// Start spawns the actor in the node's actor system and follows the store.
func (a *Assigner) Start(system *actor.ActorSystem) error {
	ctx, stop := context.WithCancel(context.Background())
	a.table = newTable(a.cfg.Timers.Rendezvous, func(m any) { a.box.Send(m) })
	box, err := inbox.Spawn(system, actorName, mailboxBound, func() inbox.Receiver { return receiver{a} })
	if err != nil {
		stop()
		return err
	}
	a.box, a.ctx, a.stop = box, ctx, stop
	a.loops.Go(func() { a.followStore(ctx) })
	return nil
}

// Close stops the actor and its commands and waits for both, because the node stops or no longer leads.
// Waiting callers get ErrStopped.
func (a *Assigner) Close() error {
	a.closeOnce.Do(func() {
		if a.box == nil {
			return
		}
		a.stop()
		ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
		defer cancel()
		a.closeErr = a.box.Stop(ctx)
		a.loops.Wait()
		a.table.close()
	})
	return a.closeErr
}

// followStore posts every change of the store, so that waiters of a superseded epoch get an answer. It never
// polls.
func (a *Assigner) followStore(ctx context.Context) {
	for {
		changed := a.cfg.Store.Changed() // Changed comes before State, so that no change in between is missed
		a.box.Send(stateChanged{a.cfg.Store.State()})
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// Assign returns a replica's rank, the epoch of its unit and the size of the group: assign_rank(replica_id).
// It reads the answer from the grant, so it is idempotent by replica id, also over restarts. Errors:
// ErrNotGranted, ErrGroupFull, ErrBadReplica.
func (a *Assigner) Assign(_ context.Context, pool string, group int, replicaID string) (msg.AssignReply,
	error,
) {
	select {
	case <-a.box.Stopped():
		return msg.AssignReply{}, errStopped()
	default:
	}
	return assign(a.cfg.Store.State(), pool, group, replicaID)
}

// Publish announces rank 0's rendezvous address of a lockstep unit to the waiting ranks on all nodes. The
// table is in memory, so rank 0's node repeats the address while the unit starts and a new leader learns it.
// A repetition changes nothing.
func (a *Assigner) Publish(p msg.Publish) { a.box.Send(&p) }

// Await waits for rank 0's address, and tells the settings of its engine if they are published. Errors:
// ErrRendezvous after the deadline, with the ranks that did not report; ErrNotGranted and state.ErrStaleEpoch
// if the unit's grant is not the caller's.
func (a *Assigner) Await(ctx context.Context, unit string, epoch uint64, rank int) (msg.AwaitReply,
	error,
) {
	m := &msg.Await{Ctx: ctx, Unit: unit, Epoch: epoch, Rank: rank, Reply: make(chan msg.AwaitReply, 1)}
	if err := a.box.TrySend(m); errors.Is(err, inbox.ErrStopped) {
		return msg.AwaitReply{}, errStopped()
	} else if err != nil {
		return msg.AwaitReply{}, problem.New(problem.Overloaded, "ask the rank assigner: %w", err).
			WithHint("try again in a second")
	}
	select {
	case r := <-m.Reply:
		return r, r.Err
	case <-ctx.Done():
		return msg.AwaitReply{}, context.Cause(ctx)
	case <-a.box.Stopped(): // a stopped actor does not answer
		return msg.AwaitReply{}, errStopped()
	}
}

// AssignGroup places and numbers the units of a group, and puts the grant of those that found room through
// consensus as one command. It returns at once. answer is called once, unless the Assigner is closed; it must
// not block. A grant whose answer is an error may still commit; its expected epochs prevent a second one.
func (a *Assigner) AssignGroup(m *msg.AssignGroup, answer func(msg.GroupAssigned)) {
	a.box.Send(&groupRequest{m, answer})
}

// Release releases a unit's ranks, slots, devices and ports after its processes are gone: release_rank(rank).
// It answers as AssignGroup does.
func (a *Assigner) Release(m msg.ReleaseRank, answer func(error)) {
	a.box.Send(&releaseRequest{m, answer})
}

// groupRequest is an AssignGroup on its way to the actor.
type groupRequest struct {
	*msg.AssignGroup
	answer func(msg.GroupAssigned)
}

// groupDone reports that the grant of a request has its answer: the state shows it, or it has failed.
type groupDone struct{ request *groupRequest }

type releaseRequest struct {
	msg.ReleaseRank
	answer func(error)
}

// errNotPlaced answers a request in which placing panicked.
var errNotPlaced = problem.New(problem.Internal, "place a group: the rank assigner panicked; see its log")

// assignGroup places a group and proposes its grant. Seats of grants under way count as used.
func (a receiver) assignGroup(m *groupRequest) {
	placed := false
	defer func() {
		if !placed {
			m.answer(msg.GroupAssigned{Grant: m.Grant, Err: errNotPlaced})
		}
	}()
	underWay := slices.Collect(maps.Values(a.underWay))
	grant, noRoom := Place(a.cfg.Store.State(), m.AssignGroup, underWay)
	placed = true
	if len(grant.Units) == 0 {
		m.answer(msg.GroupAssigned{NoRoom: noRoom})
		return
	}
	a.underWay[m] = &grant
	a.run(func(ctx context.Context) {
		r, err := a.cfg.Proposer.Propose(ctx, state.Command{GrantGroup: &grant})
		a.box.Send(groupDone{m}) // before the answer, which may lead to the next request
		m.answer(msg.GroupAssigned{Grant: grant, NoRoom: noRoom, Result: r, Err: err})
	})
}

func (a receiver) release(m *releaseRequest) {
	a.run(func(ctx context.Context) {
		ref := &state.UnitRef{Unit: m.Unit, Epoch: m.Epoch, Reason: m.Reason}
		_, err := a.cfg.Proposer.Propose(ctx, state.Command{Release: ref})
		m.answer(err)
	})
}

// run waits for a slot and runs f with a deadline, outside of Receive.
func (a receiver) run(f func(ctx context.Context)) {
	a.loops.Go(func() {
		select {
		case a.slots <- struct{}{}:
			defer func() { <-a.slots }()
		case <-a.ctx.Done(): // f hears of it from its ctx
		}
		ctx, cancel := context.WithTimeout(a.ctx, a.cfg.Timers.Proposal)
		defer cancel()
		f(ctx)
	})
}

// stateChanged carries a new snapshot of the store.
type stateChanged struct{ state *state.State }

// receiver is the actor. It handles one message at a time and never blocks.
type receiver struct{ *Assigner }

// Receive implements inbox.Receiver.
func (a receiver) Receive(m any) {
	switch m := m.(type) {
	case *groupRequest:
		a.assignGroup(m)
	case groupDone:
		delete(a.underWay, m.request)
	case *releaseRequest:
		a.release(m)
	case *msg.Publish:
		if err := a.table.publish(a.cfg.Store.State(), m); err != nil {
			level := slog.LevelWarn
			if errors.Is(err, state.ErrStaleEpoch) { // its unit was started again meanwhile
				level = slog.LevelInfo
			}
			a.cfg.Log.Log(context.Background(), level, "publish refused", slog.String("component", actorName),
				slog.String("unit", m.Unit), slog.Uint64("epoch", m.Epoch), slog.Any("err", err))
		}
	case *msg.Await:
		a.table.await(a.cfg.Store.State(), m)
	case expired:
		a.table.expire(m)
	case stateChanged:
		a.table.prune(m.state)
	default:
		a.cfg.Log.Warn("unknown message dropped", slog.String("component", actorName),
			slog.String("type", fmt.Sprintf("%T", m)))
	}
}

// Reasons for a refusal. Each is wrapped in a *problem.Error.
var (
	ErrNotGranted = errors.New("not granted")
	ErrGroupFull  = errors.New("group is full")
	ErrBadReplica = errors.New("malformed replica id")
	ErrRendezvous = errors.New("rendezvous timed out")
	ErrSuperseded = errors.New("superseded by a later call of the same rank")
)

// ErrStopped says that the assigner was closed: its node no longer leads, and callers should ask the next
// leader. It wraps cluster.ErrNotLeader.
var ErrStopped = fmt.Errorf("rank assigner is stopped: %w", cluster.ErrNotLeader)

func errStopped() error {
	return problem.New(problem.Unavailable, "ask the rank assigner: %w", ErrStopped).
		WithHint("ask the leader; if this node is the only one, after its restart")
}

// parseReplicaID returns the slot of a replica id. The id must be spelled as msg.ReplicaID does: two
// spellings would make two replicas with one rank.
func parseReplicaID(app string, group int, replicaID string) (int, error) {
	slot, err := strconv.Atoi(replicaID[strings.LastIndexByte(replicaID, '.')+1:])
	if err != nil || slot < 0 || replicaID != msg.ReplicaID(app, group, slot) {
		return 0, problem.New(problem.InvalidArgument, "assign rank: %w %q", ErrBadReplica, replicaID).
			WithHint("it is APP.GROUP.SLOT, here %s", msg.ReplicaID(app, group, 0))
	}
	return slot, nil
}

// assign reads a replica's rank from the grants. It writes nothing, so a repeated question gets the same
// answer.
func assign(s *state.State, pool string, group int, replicaID string) (msg.AssignReply, error) {
	slot, err := parseReplicaID(pool, group, replicaID)
	if err != nil {
		return msg.AssignReply{}, err
	}
	ranks, err := groupRanks(s, pool, group)
	if err != nil {
		return msg.AssignReply{}, err
	}
	if !slices.Contains(ranks, slot) {
		return msg.AssignReply{}, problem.New(problem.Conflict,
			"assign rank: %w: group %s/%d has %d ranks, %s would be one more", ErrGroupFull, pool, group,
			len(ranks), replicaID).
			WithHint("raise data_parallel.dp_size or num_replicas and deploy again")
	}
	u := unitOfRank(s, pool, group, slot)
	if u == nil {
		return msg.AssignReply{}, problem.New(problem.Unavailable,
			"assign rank: rank %d of group %s/%d: %w", slot, pool, group, ErrNotGranted).
			WithHint("it is placed by the controller; ask again when it is")
	}
	return msg.AssignReply{Rank: slot, Epoch: u.Epoch, DPSize: len(ranks)}, nil
}

func groupRanks(s *state.State, pool string, group int) ([]int, error) {
	_, spec := s.Pool(pool)
	if spec == nil {
		return nil, problem.New(problem.NotFound, "assign rank: %w %q", state.ErrUnknownApp, pool)
	}
	if group < 0 || group >= spec.NumGroups {
		return nil, problem.New(problem.NotFound, "assign rank: application %q has no group %d: %w", pool,
			group, ErrNotGranted)
	}
	return spec.RankNumbers(group), nil
}

// unitOfRank is the granted unit that holds a rank. The state ensures that there is at most one.
func unitOfRank(s *state.State, pool string, group, rank int) *state.Unit {
	for _, u := range s.Units {
		if u.PoolName() == pool && u.Group == group && u.Holds() && u.HasRank(rank) {
			return u
		}
	}
	return nil
}
