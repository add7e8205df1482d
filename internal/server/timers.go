package server

import (
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/controller"
	"github.com/dpserve/dpserve/actors/dpserver"
	"github.com/dpserve/dpserve/actors/ingress"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/noderpc"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// timers holds the timers of every package. A zero field means the package's default.
type timers struct {
	node       node.Timers
	replica    dpserver.Timers
	assigner   rankassigner.Timers
	controller controller.Timers
	ingress    ingress.Timers
	stream     noderpc.StreamTimers
	gossip     membership.Timers
}

// durations points to the fields that one name of --timers sets.
type durations = []*time.Duration

// timersByName maps the names of --timers to fields. Each package owns its defaults.
var timersByName = map[string]func(t *timers) durations{
	"start_deadline": func(t *timers) durations { return durations{&t.node.StartupTimeout} },
	"canary":         func(t *timers) durations { return durations{&t.node.Canary, &t.replica.Canary} },
	"kill_grace":     func(t *timers) durations { return durations{&t.node.KillGrace} },
	"verify_named":   func(t *timers) durations { return durations{&t.node.VerifyNamed} },
	"rendezvous": func(t *timers) durations {
		return durations{
			&t.node.Rendezvous,
			&t.assigner.Rendezvous,
		}
	},
	"ticket_unused": func(t *timers) durations { return durations{&t.replica.TicketLapse} },
	"scrape":        func(t *timers) durations { return durations{&t.replica.Scrape} },
	"kv_silence":    func(t *timers) durations { return durations{&t.replica.Silence} },
	"trip_backoff":  func(t *timers) durations { return durations{&t.replica.TripBackoff} },
	"start_retry":   func(t *timers) durations { return durations{&t.controller.Unit.StartRetry} },
	"restart_min":   func(t *timers) durations { return durations{&t.controller.Unit.RestartMin} },
	"restart_max":   func(t *timers) durations { return durations{&t.controller.Unit.RestartMax} },
	"restart_reset": func(t *timers) durations { return durations{&t.controller.Unit.RestartReset} },
	"resend":        func(t *timers) durations { return durations{&t.controller.Unit.Resend} },
	"read_header":   func(t *timers) durations { return durations{&t.ingress.ReadHeader} },
	"body_stall":    func(t *timers) durations { return durations{&t.ingress.BodyStall} },
	"reservation":   func(t *timers) durations { return durations{&t.ingress.Reservation} },
	"lease_ttl": func(t *timers) durations {
		return durations{
			&t.node.LeaseTTL,
			&t.controller.LeaseTTL,
		}
	},
	"lease_renew":      func(t *timers) durations { return durations{&t.node.LeaseRenew} },
	"lease_regrant":    func(t *timers) durations { return durations{&t.controller.Regrant} },
	"stream_heartbeat": func(t *timers) durations { return durations{&t.stream.Heartbeat} },
	"stream_suspect":   func(t *timers) durations { return durations{&t.stream.Suspect} },
	"stream_out":       func(t *timers) durations { return durations{&t.stream.Out} },
	"gossip_probe":     func(t *timers) durations { return durations{&t.gossip.Probe} },
	"gossip_timeout":   func(t *timers) durations { return durations{&t.gossip.ProbeTimeout} },
	"seed_rejoin":      func(t *timers) durations { return durations{&t.gossip.Rejoin} },
	"slow_reader":      func(t *timers) durations { return durations{&t.ingress.SlowReader} },
}

func timerNames() []string { return slices.Sorted(maps.Keys(timersByName)) }

func (c *Config) timers() *timers {
	t := &timers{}
	for name, d := range c.Timers {
		for _, field := range timersByName[name](t) {
			*field = d
		}
	}
	return t
}

// timers are those of --timers, with the cluster's lease_ttl.
func (n *Node) timers() *timers {
	t := n.cfg.timers()
	if ttl := clusterLeaseTTL(n.opened.State()); ttl > 0 {
		t.node.LeaseTTL, t.controller.LeaseTTL = ttl, ttl
	}
	return t
}

// leaseTTL is the lease duration of a cluster that this node founds.
func (c *Config) leaseTTL() time.Duration {
	if d := c.Timers["lease_ttl"]; d > 0 {
		return d
	}
	return state.LeaseTTL
}

// clusterLeaseTTL is the lease duration of a cluster; 0 = the state does not say.
func clusterLeaseTTL(s *state.State) time.Duration {
	return time.Duration(s.LeaseTTL) * time.Millisecond
}

// checkLeaseTTL refuses a lease_ttl other than the cluster's. A leader with shorter leases would grant ranks
// that nodes still hold by a lease of the leader before it.
func (n *Node) checkLeaseTTL() error {
	own, ttl := n.cfg.Timers["lease_ttl"], clusterLeaseTTL(n.store.State())
	if n.peering == nil || own == 0 || ttl == 0 || own == ttl {
		return nil
	}
	return problem.New(problem.Conflict,
		"--timers lease_ttl=%s: the leases of this cluster last %s since it began", own, ttl).
		WithHint("leave lease_ttl out; for other leases begin a new cluster")
}
