package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

const (
	// upkeepInterval is for changes without a change of the state: a standby catches up, a node falls silent.
	upkeepInterval = time.Second
	// answerTimeout bounds the question whether a node answers.
	answerTimeout = time.Second
	// votersTimeout bounds one change of the voters.
	votersTimeout = 10 * time.Second
)

// DisconnectDelay is how long the connections of a removed node stay open, and how long consensus goes on
// sending to it: a node that asked to leave still gets the answer, and learns that it was removed.
const DisconnectDelay = time.Second

// Upkeep changes the voters while this node leads.
// state.NextVoterChange and state.CheckUnvote decide; Upkeep knows who lives and makes the changes. Safe for
// concurrent use.
type Upkeep struct {
	cfg UpkeepConfig
	c   *Cluster

	mu       sync.Mutex    // held over all steps of a removal: Run would give the vote back in between
	removing removedMember // under mu
}

// UpkeepConfig configures an Upkeep.
type UpkeepConfig struct {
	Cluster *Cluster
	// Renews reports the nodes, by name, that renew their leases with this leader.
	Renews func() map[string]bool
	// Ask returns nil if the named node answers at this moment.
	Ask func(ctx context.Context, node string) error
	Log *slog.Logger
}

// removedMember is the node that consensus removes next, and when this leader first saw that the node is no
// longer a member of the cluster.
type removedMember struct {
	uid   string
	since time.Time
}

// NewUpkeep returns an Upkeep for a node with role control.
func NewUpkeep(cfg UpkeepConfig) *Upkeep { return &Upkeep{cfg: cfg, c: cfg.Cluster} }

// Run makes one change after another, after every change of the state and each second, until ctx ends.
func (u *Upkeep) Run(ctx context.Context) {
	tick := time.NewTicker(upkeepInterval)
	defer tick.Stop()
	for {
		changed := u.c.Changed()
		for u.c.Leader() && ctx.Err() == nil && u.changeVoters(ctx) { //nolint:revive // until nothing changes
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// changeVoters makes the next change. It returns false if there is none, or if the change failed and is
// repeated with the next tick.
func (u *Upkeep) changeVoters(ctx context.Context) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	change := state.NextVoterChange(u.electors(u.cfg.Renews()), u.c.UID())
	node := ctx
	ctx, cancel := context.WithTimeout(node, votersTimeout)
	defer cancel()
	switch {
	case change.Kind == state.NoChange,
		change.Kind == state.Promote && !u.answers(ctx, change.UID),
		change.Kind == state.RemoveMember && !u.isRemovalDelivered(change.UID, time.Now()):
		return false
	}
	err := u.apply(ctx, change)
	if errors.Is(err, ErrNotLeader) || err != nil && (!u.c.Leader() || node.Err() != nil) {
		return false // the next leader makes the change
	}
	attrs := []any{
		slog.String("change", change.Kind.String()),
		slog.String("peer", u.c.NameOf(change.UID)),
	}
	if err != nil {
		u.cfg.Log.Warn("voters could not be changed, trying again", append(attrs, slog.Any("err", err))...)
		return false
	}
	u.cfg.Log.Info("consensus changed", attrs...)
	return true
}

func (u *Upkeep) apply(ctx context.Context, change state.Change) error {
	switch change.Kind {
	case state.NoChange:
	case state.AddStandby:
		return u.c.AddStandby(ctx, change.UID)
	case state.Promote:
		return u.c.Promote(ctx, change.UID)
	case state.Demote:
		return u.c.Demote(ctx, change.UID)
	case state.RemoveMember:
		return u.c.Remove(ctx, change.UID)
	case state.HandOver:
		return u.c.StepDown(ctx)
	}
	return nil
}

// isRemovalDelivered reports whether consensus has continued to send to a removed node for DisconnectDelay.
// The node learns of its removal, and ends, only by an entry that is committed there too. Raft stops sending
// at once when the node is taken out of its members.
func (u *Upkeep) isRemovalDelivered(uid string, now time.Time) bool {
	if u.removing.uid != uid {
		u.removing = removedMember{uid, now}
	}
	return now.Sub(u.removing.since) >= DisconnectDelay
}

// answers asks a node for a sign of life. Its lease may be seconds old, and a dead voter can cost a small
// cluster its majority.
func (u *Upkeep) answers(ctx context.Context, uid string) bool {
	name := nodeByUID(u.c.State(), uid).ID
	if name == "" {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	err := u.cfg.Ask(ctx, name)
	if err != nil {
		u.cfg.Log.Debug("a standby gets no vote yet", slog.String("standby", name), slog.Any("err", err))
	}
	return err == nil
}

// electors returns the control nodes and the other members of consensus. live holds the names of the nodes
// that answer; this node always does.
func (u *Upkeep) electors(live map[string]bool) []state.Elector {
	in := map[string]Member{}
	for _, m := range u.c.Members() {
		in[m.UID] = m
	}
	var out []state.Elector
	for _, rec := range u.c.State().Nodes {
		m, member := in[rec.UID]
		delete(in, rec.UID)
		control := slices.Contains(rec.Roles, state.RoleControl)
		if !control && !member {
			continue
		}
		out = append(out, state.Elector{
			UID: rec.UID, Node: rec.ID, Zone: rec.Zone, Control: control, Lost: rec.Lost, Member: member,
			Voter: m.Voter,
			Live: !rec.Lost && (live[rec.ID] || rec.UID == u.c.UID()) &&
				(!member || u.c.IsCloseBehind(rec.UID)),
		})
	}
	for uid, m := range in { // members that are no nodes of the cluster any more
		out = append(out, state.Elector{UID: uid, Member: true, Voter: m.Voter})
	}
	return out
}

// CheckLeave reports whether a node could be removed after a drain. It changes nothing. `leave` asks before
// it drains, so that no node is drained in vain.
func (u *Upkeep) CheckLeave(ctx context.Context, node string) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	st := u.c.State()
	if err := st.CheckLeave(node); err != nil {
		return err
	}
	_, err := u.unvote(ctx, st.Nodes[node])
	return err
}

// Remove takes a node's vote and then calls remove. The vote goes first: removing a live voter can leave the
// rest permanently without a quorum. No vote changes before the removal is known to be acceptable and the
// remaining voters have a living majority. If the node leads, it only hands the leadership over, and the
// caller must ask the new leader.
func (u *Upkeep) Remove(ctx context.Context, node string, remove func(context.Context, string) error) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	st := u.c.State()
	if err := st.CheckRemoval(node); err != nil {
		return err
	}
	changes, err := u.unvote(ctx, st.Nodes[node])
	if err != nil {
		return err
	}
	// after the last change the node is a standby until it learns of its removal
	for _, change := range changes {
		if err := u.apply(ctx, change); err != nil {
			return err
		}
		if change.Kind == state.HandOver {
			return problem.New(problem.Unavailable,
				"node %s leads and votes: another one takes that over first", node).
				WithHint("try again in some seconds")
		}
	}
	return remove(ctx, node)
}

// unvote is state.CheckUnvote with the voters that answer at this moment.
func (u *Upkeep) unvote(ctx context.Context, rec *state.Node) ([]state.Change, error) {
	if rec == nil {
		return nil, nil
	}
	if votes, _ := u.c.findMember(rec.UID); !votes {
		return nil, nil
	}
	return state.CheckUnvote(u.electors(u.answeringMembers(ctx)), u.c.UID(), rec.UID)
}

// answeringMembers returns the other members of consensus, by name, that answer at this moment. A lease is
// too old for this question: a node that died seconds ago still has one.
func (u *Upkeep) answeringMembers(ctx context.Context) map[string]bool {
	out := map[string]bool{}
	var mu sync.Mutex
	var asked sync.WaitGroup
	for _, m := range u.c.Members() {
		rec := nodeByUID(u.c.State(), m.UID)
		if rec.ID == "" || rec.Lost || m.UID == u.c.UID() {
			continue
		}
		asked.Go(func() {
			answers := u.answers(ctx, rec.UID)
			mu.Lock()
			defer mu.Unlock()
			out[rec.ID] = answers
		})
	}
	asked.Wait()
	return out
}

// NewGossipKey makes a key for the gossip of a cluster.
func NewGossipKey() []byte {
	key := make([]byte, state.GossipKeySize)
	_, _ = rand.Read(key) // never fails since Go 1.24
	return key
}

// DescribeVoters is a hint for the time without a leader: the voters among members, and those of them that
// are not heard of.
func DescribeVoters(members []Member, nameOf func(uid string) string, isHeard func(uid string) bool) string {
	var all, silent []string
	for _, m := range members {
		if !m.Voter {
			continue
		}
		name := nameOf(m.UID)
		all = append(all, name)
		if !isHeard(m.UID) {
			silent = append(silent, name)
		}
	}
	slices.Sort(all)
	slices.Sort(silent)
	switch {
	case len(all) == 0:
		return "a majority of the voters has to be there"
	case len(silent) == 0:
		return "votes: " + strings.Join(all, ", ")
	case len(silent) == 1:
		return "votes: " + strings.Join(all, ", ") + "; " + silent[0] + " is not heard"
	}
	return "votes: " + strings.Join(all, ", ") + "; " + strings.Join(silent, ", ") + " are not heard"
}
