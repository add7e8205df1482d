package engine_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/state"
)

// The bootstrap server of a rank that dpserve has started is on the rank's node, at a port of its unit's
// block.
func TestBootstrapServerOfLaunchedRanks(t *testing.T) {
	st := &state.State{
		Units: map[string]*state.Unit{
			"pd.prefill/0": {
				App: "pd", Pool: "prefill",
				Ranks:  []state.RankGrant{{Rank: 0, Node: "a"}, {Rank: 1, Node: "b"}},
				Blocks: []state.Block{{Node: "a", Base: 20000}, {Node: "b", Base: 21000}},
			},
			"pd.prefill/1/1": {
				App: "pd", Pool: "prefill", Group: 1, Ranks: []state.RankGrant{{Rank: 1, Node: "c"}},
				Blocks: []state.Block{{Node: "c", Base: 22000}},
			},
		},
		Nodes: map[string]*state.Node{"a": {Advertise: "10.0.0.1"}, "b": {Advertise: "10.0.0.2"}, "c": {}},
	}
	for _, c := range []struct {
		transfer    string
		coupling    app.Coupling
		group, rank int
		want        string
	}{
		{app.TransferSGLang, app.Lockstep, 0, 1, "http://10.0.0.1:20008"},
		{app.TransferMooncake, app.Lockstep, 0, 1, "http://10.0.0.2:21009"},
		{app.TransferMooncake, app.Independent, 1, 1, "http://127.0.0.1:22004"},
		{app.TransferSGLang, app.Independent, 1, 1, "http://127.0.0.1:22004"},
		{app.TransferSGLang, app.Independent, 1, 0, ""},
	} {
		a := &app.Application{Name: "pd", Pool: app.PoolPrefill}
		a.Disaggregation = &app.Disaggregation{Transfer: c.transfer}
		a.DataParallel.DPSize, a.DataParallel.Coupling = 2, c.coupling
		got, _, err := engine.BootstrapServer(st, a, c.group, c.rank)
		assert.Equal(t, c.want, got)
		assert.Equal(t, c.want == "", errors.Is(err, engine.ErrRankGone), "%v", err)
	}
}
