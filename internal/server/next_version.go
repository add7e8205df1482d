//go:build dpserve_next

package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
)

// This file is for the test of upgrades (TestMB6 in test/system). Together with state/next_version.go it
// makes a build that stands for the next version of dpserve. No other build contains it.

// probeNextVersion logs the states of a control node until ctx ends, so that the test can compare them. On
// the leader it proposes the new kind of command once the application NextTrigger is deployed.
func probeNextVersion(ctx context.Context, n *Node) {
	for ctx.Err() == nil {
		changed := n.store.Changed()
		logNextState(ctx, n)
		select {
		case <-changed:
		case <-time.After(time.Second): // for a leader elected meanwhile
		case <-ctx.Done():
		}
	}
}

func logNextState(ctx context.Context, n *Node) {
	st := n.store.State()
	if data, err := st.Encode(); err == nil {
		sum := sha256.Sum256(data)
		n.log.Info("next: state", slog.Uint64("index", st.Index),
			slog.String("sum", hex.EncodeToString(sum[:])), slog.String("marked", st.Marked))
	}
	if st.Apps[state.NextTrigger] == nil || st.Marked != "" || !n.store.Leader() {
		return
	}
	var c state.Command
	c.Mark = &state.Mark{Text: "by " + n.cfg.NodeID}
	if _, err := n.consensus.ProposeHere(ctx, c); err != nil {
		n.log.Info("next: mark refused", slog.Any("err", err))
	}
}

// addNextVersionFields sets the fields of a node's record that the next version adds.
func addNextVersionFields(n *Node, rec *state.Node) {
	if n.opened.State().Apps[state.NextTrigger] != nil {
		rec.Colour = "blue"
	}
}

// restAfter is when a ready unit of the next version reports a kind of event that this version does not know.
const restAfter = time.Second

// withNextVersionEvents changes the newest event of units that have been ready for restAfter.
func withNextVersionEvents(r *msg.NodeReport) *msg.NodeReport {
	out := *r
	out.Units = slices.Clone(r.Units)
	for i := range out.Units {
		if u := &out.Units[i]; u.Kind == msg.UnitReady && time.Since(u.At) > restAfter {
			u.Kind = "rests"
		}
	}
	return &out
}
