package engine_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
)

// TestTransferLease: the lease is what the file says, else what dpserve writes for the engine.
func TestTransferLease(t *testing.T) {
	extra := func(v any) app.Args {
		return app.Args{{Name: "kv_transfer_config", Value: map[string]any{
			"kv_connector_extra_config": map[string]any{"kv_lease_duration": v},
		}}}
	}
	nixl := &app.Disaggregation{Transfer: app.TransferNIXL}
	for _, c := range []struct {
		kind app.Kind
		args app.Args
		want time.Duration
	}{
		{app.KindSim, nil, 0},
		{app.KindVLLM, nil, 2 * time.Minute},
		{app.KindSim, extra(int64(5)), 5 * time.Second},
		{app.KindVLLM, extra(7.5), 7500 * time.Millisecond},
		{app.KindSim, app.Args{{
			Name: "kv_transfer_config.kv_connector_extra_config.kv_lease_duration", Value: int64(9),
		}}, 9 * time.Second},
		{app.KindSim, app.Args{{Name: "kv_transfer_config", Value: "{"}}, 0},
	} {
		a := &app.Application{
			Engine: app.Engine{Kind: c.kind, Args: c.args}, Disaggregation: nixl, Pool: app.PoolPrefill,
		}
		assert.Equal(t, c.want, engine.TransferLease(a))
	}
}
