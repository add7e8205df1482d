package wiring

import (
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/controller"
	"github.com/dpserve/dpserve/actors/dpserver"
	"github.com/dpserve/dpserve/actors/ingress"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/actors/remote"
	"github.com/dpserve/dpserve/cluster/membership"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// timers are those of every room; a zero field means the room's default.
type timers struct {
	node       node.Timers
	replica    dpserver.Timers
	assigner   rankassigner.Timers
	controller controller.Timers
	ingress    ingress.Timers
	stream     remote.StreamTimers
	gossip     membership.Timers
}

// byName are the names of --timers. Each room owns its defaults; here are only the names.
var byName = map[string]func(t *timers) []*time.Duration{
	"start_deadline":   func(t *timers) []*time.Duration { return []*time.Duration{&t.node.StartupTimeout} },
	"canary":           func(t *timers) []*time.Duration { return []*time.Duration{&t.node.Canary, &t.replica.Canary} },
	"kill_grace":       func(t *timers) []*time.Duration { return []*time.Duration{&t.node.KillGrace} },
	"verify_named":     func(t *timers) []*time.Duration { return []*time.Duration{&t.node.VerifyNamed} },
	"rendezvous":       func(t *timers) []*time.Duration { return []*time.Duration{&t.node.Rendezvous, &t.assigner.Rendezvous} },
	"ticket_unused":    func(t *timers) []*time.Duration { return []*time.Duration{&t.replica.TicketLapse} },
	"scrape":           func(t *timers) []*time.Duration { return []*time.Duration{&t.replica.Scrape} },
	"kv_silence":       func(t *timers) []*time.Duration { return []*time.Duration{&t.replica.Silence} },
	"trip_backoff":     func(t *timers) []*time.Duration { return []*time.Duration{&t.replica.TripBackoff} },
	"start_retry":      func(t *timers) []*time.Duration { return []*time.Duration{&t.controller.Unit.StartRetry} },
	"restart_min":      func(t *timers) []*time.Duration { return []*time.Duration{&t.controller.Unit.RestartMin} },
	"restart_max":      func(t *timers) []*time.Duration { return []*time.Duration{&t.controller.Unit.RestartMax} },
	"restart_reset":    func(t *timers) []*time.Duration { return []*time.Duration{&t.controller.Unit.RestartReset} },
	"resend":           func(t *timers) []*time.Duration { return []*time.Duration{&t.controller.Unit.Resend} },
	"read_header":      func(t *timers) []*time.Duration { return []*time.Duration{&t.ingress.ReadHeader} },
	"body_stall":       func(t *timers) []*time.Duration { return []*time.Duration{&t.ingress.BodyStall} },
	"reservation":      func(t *timers) []*time.Duration { return []*time.Duration{&t.ingress.Reservation} },
	"lease_ttl":        func(t *timers) []*time.Duration { return []*time.Duration{&t.node.LeaseTTL, &t.controller.LeaseTTL} },
	"lease_renew":      func(t *timers) []*time.Duration { return []*time.Duration{&t.node.LeaseRenew} },
	"lease_regrant":    func(t *timers) []*time.Duration { return []*time.Duration{&t.controller.Regrant} },
	"stream_heartbeat": func(t *timers) []*time.Duration { return []*time.Duration{&t.stream.Heartbeat} },
	"stream_suspect":   func(t *timers) []*time.Duration { return []*time.Duration{&t.stream.Suspect} },
	"stream_out":       func(t *timers) []*time.Duration { return []*time.Duration{&t.stream.Out} },
	"gossip_probe":     func(t *timers) []*time.Duration { return []*time.Duration{&t.gossip.Probe} },
	"gossip_timeout":   func(t *timers) []*time.Duration { return []*time.Duration{&t.gossip.ProbeTimeout} },
	"seed_rejoin":      func(t *timers) []*time.Duration { return []*time.Duration{&t.gossip.Rejoin} },
	"slow_reader":      func(t *timers) []*time.Duration { return []*time.Duration{&t.ingress.SlowReader} },
}

func timerNames() []string { return slices.Sorted(maps.Keys(byName)) }

func (c *Config) timers() *timers {
	t := &timers{}
	for name, d := range c.Timers {
		for _, field := range byName[name](t) {
			*field = d
		}
	}
	return t
}

// timers are those of --timers, with the leases of the cluster.
func (n *Node) timers() *timers {
	t := n.cfg.timers()
	if ttl := leaseTTLOf((late{n}).State()); ttl > 0 {
		t.node.LeaseTTL, t.controller.LeaseTTL = ttl, ttl
	}
	return t
}

// leaseTTL is how long leases last in a cluster that this node begins.
func (c *Config) leaseTTL() time.Duration {
	if d := c.Timers["lease_ttl"]; d > 0 {
		return d
	}
	return state.LeaseTTL
}

// leaseTTLOf is how long the leases of a cluster last; 0 = it does not say.
func leaseTTLOf(s *state.State) time.Duration { return time.Duration(s.LeaseTTL) * time.Millisecond }

// sameLease refuses another lease_ttl than the cluster's: a leader with shorter leases would give ranks away that nodes still hold by a lease
// of the leader before it.
func (n *Node) sameLease() error {
	own, ttl := n.cfg.Timers["lease_ttl"], leaseTTLOf(n.store.State())
	if n.mesh == nil || own == 0 || ttl == 0 || own == ttl {
		return nil
	}
	return problem.New(problem.Conflict, "--timers lease_ttl=%s: the leases of this cluster last %s since it began", own, ttl).
		WithHint("leave lease_ttl out; for other leases begin a new cluster")
}
