package rankassigner

import (
	"fmt"
	"log/slog"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// stateChanged carries a new snapshot of the store.
type stateChanged struct{ state *state.State }

// receiver is the actor. It handles one message at a time and never blocks.
type receiver struct{ *Assigner }

// Receive implements inbox.Receiver.
func (a receiver) Receive(m any) {
	switch m := m.(type) {
	case *msg.Assign:
		m.Reply <- assign(a.cfg.Store.State(), m)
	case *msg.Publish:
		if err := a.table.publish(a.cfg.Store.State(), m); err != nil {
			a.cfg.Log.Warn("publish refused", slog.String("room", actorName), slog.String("unit", m.Unit),
				slog.Uint64("epoch", m.Epoch), slog.Any("err", err))
		}
	case *msg.Await:
		a.table.await(a.cfg.Store.State(), m)
	case expired:
		a.table.expire(m)
	case stateChanged:
		a.table.prune(m.state)
	case *proposal:
		a.proposals.begin(m)
	case *proposalDone:
		a.proposals.end(m)
	default:
		a.cfg.Log.Warn("unknown message dropped", slog.String("room", actorName),
			slog.String("type", fmt.Sprintf("%T", m)))
	}
}
