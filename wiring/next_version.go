//go:build dpserve_next

package wiring

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// This file is for the test of upgrades (TestMB6 in test/system): with state/next_version.go it makes a build that stands for the next
// version of dpserve. It is in no other build.

// next logs the state of a control node, so that the test can compare them, and lets the leader propose the new kind of command once
// the application NextTrigger is deployed.
func (n *Node) next(ctx context.Context) {
	st := n.store.State()
	if data, err := st.Encode(); err == nil {
		sum := sha256.Sum256(data)
		n.log.Info("next: state", slog.Uint64("index", st.Index), slog.String("sum", hex.EncodeToString(sum[:])), slog.String("marked", st.Marked))
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

// describeNext fills in what the next version says of a node.
func (n *Node) describeNext(rec *state.Node) {
	if (late{n}).State().Apps[state.NextTrigger] != nil {
		rec.Colour = "blue"
	}
}

// restAfter is when a ready unit of the next version reports a kind of event that this version does not know.
const restAfter = time.Second

// nextReport gives units that have been ready for a while another newest event.
func nextReport(r *msg.NodeReport) *msg.NodeReport {
	out := *r
	out.Units = slices.Clone(r.Units)
	for i := range out.Units {
		if u := &out.Units[i]; u.Kind == msg.UnitReady && time.Since(u.At) > restAfter {
			u.Kind = "rests"
		}
	}
	return &out
}
