package telemetry

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// PoolSample is what the replicated state says of a pool at a scrape.
type PoolSample struct {
	App            string // of the pool: app.Application.PoolName
	Ready, Desired int    // ranks whose units are ready, and those that the present revision wants
	Units          []UnitSample
}

// UnitSample is a unit of the replicated state.
type UnitSample struct {
	Unit     string
	Epoch    uint64
	Restarts int
}

// poolCollector shows the samples of the last ShowPools. Every node of a cluster has them.
type poolCollector struct {
	pools                                atomic.Pointer[[]PoolSample]
	ready, desired, unitEpoch, unitStart *prometheus.Desc
}

func newPoolCollector() *poolCollector {
	return &poolCollector{
		ready: newAppDesc("app_ready_ranks",
			"Ranks whose units are ready, by the replicated state: the same at every node."),
		desired: newAppDesc("app_desired_ranks",
			"Ranks that the present revision wants: the same at every node."),
		unitEpoch: newAppDesc("unit_epoch",
			"Epoch of the unit: one more at every start. The same at every node.", labelUnit),
		unitStart: newAppDesc("unit_restarts_total",
			"Starts of the unit after the first of its revision. The same at every node.", labelUnit),
	}
}

// ShowPools replaces the samples of pools. Call it before each scrape.
func (m *Metrics) ShowPools(pools []PoolSample) { m.pools.pools.Store(&pools) }

// Describe implements prometheus.Collector.
func (c *poolCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.ready, c.desired, c.unitEpoch, c.unitStart} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *poolCollector) Collect(ch chan<- prometheus.Metric) {
	pools := c.pools.Load()
	if pools == nil {
		return
	}
	for _, p := range *pools {
		ch <- newGaugeSample(c.ready, float64(p.Ready), p.App)
		ch <- newGaugeSample(c.desired, float64(p.Desired), p.App)
		for _, u := range p.Units {
			ch <- newGaugeSample(c.unitEpoch, float64(u.Epoch), p.App, u.Unit)
			ch <- newCounterSample(c.unitStart, uint64(max(0, u.Restarts)), p.App, u.Unit)
		}
	}
}
