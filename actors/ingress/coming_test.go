package ingress

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/state"
)

// RP34: the least time until one of the units of an application may be ready.
func TestReadyIn(t *testing.T) {
	now := time.Unix(1000, 0)
	in := func(phase state.Phase, ago time.Duration) comingUnit {
		return comingUnit{phase: phase, phaseAt: now.Add(-ago)}
	}
	for name, c := range map[string]struct {
		units []comingUnit
		last  time.Duration
		want  time.Duration
	}{
		"no unit":           {nil, time.Minute, 0},
		"no start is known": {[]comingUnit{in(state.Starting, time.Second)}, 0, 0},
		"never granted":     {[]comingUnit{in(unknownPhase, time.Hour)}, time.Minute, 0},
		"it has just begun": {[]comingUnit{in(state.Starting, 0)}, time.Minute, time.Minute},
		"it has begun": {
			[]comingUnit{in(state.Starting, 50*time.Second)}, time.Minute, 10 * time.Second,
		},
		"it takes longer already": {[]comingUnit{in(state.Starting, 70*time.Second)}, time.Minute, 0},
		"its engine still ends":   {[]comingUnit{in(state.Fenced, time.Hour)}, time.Minute, time.Minute},
		"the first one counts": {
			[]comingUnit{in(state.Fenced, 0), in(state.Starting, 50*time.Second), in(state.Starting, 0)},
			time.Minute, 10 * time.Second,
		},
		"one may be back at once": {
			[]comingUnit{in(state.Fenced, 0), in(unknownPhase, 0)}, time.Minute, 0,
		},
	} {
		k := comings{units: map[string]comingUnit{}, lastStart: c.last}
		for i, u := range c.units {
			k.units[string(rune('a'+i))] = u
		}
		assert.Equal(t, c.want, k.readyIn(now), name)
	}
}
