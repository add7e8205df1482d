package controller

import (
	"fmt"
	"testing"

	"github.com/dpserve/dpserve/app"
)

// BenchmarkRenewal measures one renewal on the leader of 64 nodes with 1024 ranks.
func BenchmarkRenewal(b *testing.B) {
	var hosts []*host
	for i := range 64 {
		hosts = append(hosts, newHost(fmt.Sprintf("n%02d", i), 16))
	}
	c := newFleet(b, hosts...)
	c.deploy(sim("chat", 1024, app.Independent))
	c.renew(c.ids()...)
	if c.status("chat") != "RUNNING" {
		b.Fatal(c.status("chat"))
	}
	b.ReportAllocs()
	for b.Loop() {
		c.core.Step(c.now, NodeSeen{hosts[7].report(c.now)})
	}
}
