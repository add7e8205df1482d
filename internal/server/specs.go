package server

import (
	"time"

	"github.com/dpserve/dpserve/actors/dpserver"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/internal/steptime"
)

// longestGrace returns the longest drain time of all applications. Each unit still ends with the time of its
// own application.
func longestGrace(st *state.State) time.Duration {
	var longest time.Duration
	for _, p := range st.Pools() {
		longest = max(longest, app.Seconds(p.GracefulShutdownTimeout))
	}
	return longest
}

// replicaFactory returns what makes the replicas of this node's ranks, each by its application's spec.
func replicaFactory(n *Node, t dpserver.Timers) *dpserver.Factory {
	return &dpserver.Factory{
		System: n.system, Hub: n.hub, Assigner: n.leader, NewEngine: dpserver.NewClient(viaProbes(n)),
		PrefillTime: prefillTime, Timers: t, Log: n.log,
		Secret: func() []byte { return n.store.State().Secret },
		App: func(pool string) *app.Application {
			_, a := n.store.State().Pool(pool)
			return a
		},
		Address: n.cfg.Advertise,
		Lease:   func() bool { return n.node.Admits() },
		Replays: kvevents.NewReplays(), DialEvents: n.cfg.dialEvents(), ListenEvents: n.cfg.listenEvents(),
	}
}

// prefillTime is the reference machine's time for a prompt without other load. It stretches the stall
// timeout, so only its order of magnitude counts.
func prefillTime(tokens int) time.Duration {
	ms := steptime.Reference().Step(tokens, 0, 0, steptime.Pairs(tokens, 0))
	return time.Duration(ms * float64(time.Millisecond))
}
