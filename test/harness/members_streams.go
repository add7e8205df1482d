package harness

import (
	"context"
	"net/http"
	"testing"
	"time"
)

// StartStreams is StartLoad with clients that all stream, and give a stream up after patience.
func StartStreams(t testing.TB, app string, clients, tokens int, patience time.Duration,
	endpoints ...string,
) *Load {
	t.Helper()
	l := &Load{t: t, hung: patience, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: clients}}}
	l.ctx, l.stop = context.WithCancel(context.Background())
	for _, at := range endpoints {
		for range clients {
			l.wg.Go(func() { l.run(app, at, tokens, true) })
		}
	}
	t.Cleanup(func() { l.End() })
	return l
}

// RealTimers leaves every timer of the nodes as it is for users.
func RealTimers() MembersOption {
	// --timers needs one
	return func(c *Members) { c.timers = map[string]time.Duration{"lease_ttl": RealLease} }
}

// Gossip is the address of the node's gossip, of UDP and TCP.
func (m *Member) Gossip() string { return m.on(m.rig.gossip) }
