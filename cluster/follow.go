package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

const (
	// followHeartbeat is how often a follower hears that its copy is still the newest.
	followHeartbeat = time.Second
	// followGap is the least pause between two states sent to one follower: what changes in between goes in one.
	followGap = 20 * time.Millisecond
)

// update is what a follower gets: the state if it has changed, and who leads.
type update struct {
	Leader string          `json:"leader,omitempty"` // UID
	State  json.RawMessage `json:"state,omitempty"`  // state.State without its secrets
}

// Follow sends the state to a node that has no part in consensus: at once if it is newer than the index from, then whenever it or
// the leader has changed, coalesced. Without news there is a heartbeat (nil data) every second. While this node knows nobody who
// leads it sends no heartbeats: its copy may be old, and the follower should ask another control node. data is for
// Watcher; what send returns ends Follow, as do ctx and Close.
func (c *Cluster) Follow(ctx context.Context, from uint64, send func(data []byte, index uint64) error) error {
	told := ""
	for {
		changed, turn, st := c.Changed(), c.Leadership(), c.State()
		leader, _ := c.LeaderNode()
		data, err := news(st, from, leader, told)
		if err != nil {
			return err
		}
		if data != nil || leader != "" {
			if err := send(data, max(st.Index, from)); err != nil {
				return err
			}
		}
		from, told = max(from, st.Index), leader
		if err := c.untilNews(ctx, changed, turn, data != nil); err != nil {
			return err
		}
	}
}

// news is what there is to tell; nil: nothing.
func news(st *state.State, from uint64, leader, told string) ([]byte, error) {
	if st.Index <= from && leader == told {
		return nil, nil
	}
	u := update{Leader: leader}
	var err error
	if st.Index > from {
		if u.State, err = st.Public().Encode(); err != nil {
			return nil, fmt.Errorf("encode the state for a follower: %w", err)
		}
	}
	return json.Marshal(u)
}

// untilNews waits for a change or the next heartbeat, and for followGap after something was told.
func (c *Cluster) untilNews(ctx context.Context, changed, turn <-chan struct{}, told bool) error {
	beat, gap := time.NewTimer(followHeartbeat), time.NewTimer(followGap)
	defer beat.Stop()
	defer gap.Stop()
	select {
	case <-changed:
	case <-turn:
	case <-beat.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("follow: %w", context.Cause(ctx))
	case <-c.done:
		return c.ended()
	}
	if !told {
		return nil
	}
	select {
	case <-gap.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("follow: %w", context.Cause(ctx))
	}
}

// copied is a state as a follower has it. It keeps the bytes too: they hold the fields that this version does not know, and a newer
// version that is started on the data dir finds them there.
type copied struct {
	state *state.State
	data  []byte
	newer string // what was passed over; "" = nothing
}

func decodeCopy(data []byte) (*copied, error) {
	st, newer, err := state.DecodeCopy(data)
	if err != nil {
		return nil, err
	}
	return &copied{state: st, data: data, newer: newer}, nil
}

// decodeUpdate reads what Follow sent; st is nil if only the leader has changed.
func decodeUpdate(data []byte) (st *copied, leader string, err error) {
	var u update
	if err := json.Unmarshal(data, &u); err != nil {
		return nil, "", problem.New(problem.Internal, "decode the state of a control node: %w", err).WithHint("run the same version of dpserve on every node")
	}
	if len(u.State) > 0 {
		st, err = decodeCopy(u.State)
	}
	return st, u.Leader, err
}
