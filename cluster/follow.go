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
	// followHeartbeat is how often a follower gets the confirmation that its copy is the newest.
	followHeartbeat = time.Second
	// followGap is the least pause between two states sent to one follower. Changes in between are sent
	// together.
	followGap = 20 * time.Millisecond
)

// update is one message to a follower: the state if it has changed, and the leader.
type update struct {
	Leader string          `json:"leader,omitempty"` // UID
	State  json.RawMessage `json:"state,omitempty"`  // state.State without its secrets
}

// Follow sends the state to a node that takes no part in consensus: at once if it is newer than the index
// from, then whenever the state or the leader has changed. Close changes are sent together. Without changes
// it sends a heartbeat (nil data) every second. While this node knows no leader it sends no heartbeats: its
// copy may be old, and the follower should ask another control node. A Watcher reads data. Follow ends with
// an error of send, with ctx, and with Close.
func (c *Cluster) Follow(ctx context.Context, from uint64, send func(data []byte, index uint64) error) error {
	told := ""
	for {
		changed, turn, st := c.Changed(), c.Leadership(), c.State()
		leader, _ := c.LeaderNode()
		data, err := encodeUpdate(st, from, leader, told)
		if err != nil {
			return err
		}
		if data != nil || leader != "" {
			if err := send(data, max(st.Index, from)); err != nil {
				return err
			}
		}
		from, told = max(from, st.Index), leader
		if err := c.awaitChange(ctx, changed, turn, data != nil); err != nil {
			return err
		}
	}
}

// encodeUpdate returns the next message to a follower; nil if nothing has changed.
func encodeUpdate(st *state.State, from uint64, leader, told string) ([]byte, error) {
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

// awaitChange waits for a change or the next heartbeat. If the last message had data, it also waits for
// followGap.
func (c *Cluster) awaitChange(ctx context.Context, changed, turn <-chan struct{}, told bool) error {
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
		return c.endError()
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

// stateCopy is a follower's copy of the state. It keeps the bytes too, because they contain fields that this
// version does not know: a newer version that is started on the data dir finds them there.
type stateCopy struct {
	state *state.State
	data  []byte
	newer string // the first unknown field; "" = none
}

func decodeCopy(data []byte) (*stateCopy, error) {
	st, newer, err := state.DecodeCopy(data)
	if err != nil {
		return nil, err
	}
	return &stateCopy{state: st, data: data, newer: newer}, nil
}

// decodeUpdate reads a message of Follow; st is nil if only the leader has changed.
func decodeUpdate(data []byte) (st *stateCopy, leader string, err error) {
	var u update
	if err := json.Unmarshal(data, &u); err != nil {
		return nil, "", problem.New(problem.Internal, "decode the state of a control node: %w", err).
			WithHint("run the same version of dpserve on every node")
	}
	if len(u.State) > 0 {
		st, err = decodeCopy(u.State)
	}
	return st, u.Leader, err
}
