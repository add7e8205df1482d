package telemetry

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dpserve/dpserve/state"
)

// phases is the closed list of unit states that get a series each.
func phases() [9]state.Phase {
	return [...]state.Phase{
		state.Pending, state.Starting, state.Ready, state.Fenced, state.Killing,
		state.Backoff, state.Draining, state.Failed, state.Gone,
	}
}

// UnitPhase shows the state of a unit (one series per state, 1 or 0) and its epoch.
func (m *Metrics) UnitPhase(app, unit string, phase state.Phase, epoch uint64) {
	for _, p := range phases() {
		m.vecs.unitState.WithLabelValues(app, unit, string(p)).Set(oneIf(p == phase))
	}
	m.vecs.unitEpoch.WithLabelValues(app, unit).Set(float64(epoch))
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// UnitRestart counts a start of a unit after its first.
func (m *Metrics) UnitRestart(app, unit string) { m.vecs.restarts.WithLabelValues(app, unit).Inc() }

// UnitForget deletes the series of a released unit.
func (m *Metrics) UnitForget(app, unit string) {
	m.vecs.forget(prometheus.Labels{labelApp: app, labelUnit: unit})
}

// AppRanks shows how many ranks of an application are ready, and how many its present revision wants.
func (m *Metrics) AppRanks(app string, ready, desired int) {
	m.vecs.readyRanks.WithLabelValues(app).Set(float64(ready))
	m.vecs.desiredRanks.WithLabelValues(app).Set(float64(desired))
}

// AppRanksForget deletes the series of AppRanks: the application is gone, or this node does not lead any
// more.
func (m *Metrics) AppRanksForget(app string) {
	m.vecs.readyRanks.DeleteLabelValues(app)
	m.vecs.desiredRanks.DeleteLabelValues(app)
}

// rankKey names a rank over all applications.
type rankKey struct {
	app         string
	group, rank int
}

// RankInflight shows how many requests a rank has in hand.
func (m *Metrics) RankInflight(app string, group, rank, n int) {
	g, _ := m.ranks.get(rankKey{app, group, rank}, func() prometheus.Gauge { // never closed: always found
		return m.vecs.rankInflight.WithLabelValues(app, strconv.Itoa(group), strconv.Itoa(rank))
	})
	g.Set(float64(n))
}

// RankTripped shows whether a rank's answers have failed in a row.
func (m *Metrics) RankTripped(app string, group, rank int, tripped bool) {
	n := 0.0
	if tripped {
		n = 1
	}
	m.vecs.rankTripped.WithLabelValues(app, strconv.Itoa(group), strconv.Itoa(rank)).Set(n)
}

// RankForget deletes the series of a released rank, its picks included.
func (m *Metrics) RankForget(app string, group, rank int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ranks.drop(func(k rankKey) bool { return k == rankKey{app, group, rank} })
	for key, a := range m.apps {
		if key.app == app {
			a.picks.drop(func(k pickKey) bool { return k.group == group && k.rank == rank })
		}
	}
	m.vecs.forget(prometheus.Labels{labelApp: app, labelGroup: strconv.Itoa(group), labelRank: strconv.Itoa(rank)})
}
