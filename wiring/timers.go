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
