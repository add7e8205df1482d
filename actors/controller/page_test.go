package controller

import (
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
)

// quietChanges are changes of an application with independent ranks that restart no rank, by the key that
// docs/rollout.md names.
var quietChanges = map[string]func(*app.Application){
	"route_prefix":                func(a *app.Application) { a.RoutePrefix = "/other" },
	"routing":                     func(a *app.Application) { a.Routing.Policy = "round-robin" },
	"timeouts":                    func(a *app.Application) { a.Timeouts.QueueS = 7 },
	"retries":                     func(a *app.Application) { a.Retries.Attempts = 7 },
	"max_queued_requests":         func(a *app.Application) { a.MaxQueuedRequests = 7 },
	"max_queued_tokens":           func(a *app.Application) { a.MaxQueuedTokens = 7 },
	"graceful_shutdown_timeout_s": func(a *app.Application) { a.GracefulShutdownTimeout = 7 },
	"model.aliases":               func(a *app.Application) { a.Model.Aliases = []string{"other"} },
	"num_replicas":                func(a *app.Application) { a.NumReplicas = 8 },
	"num_groups":                  func(a *app.Application) { a.NumGroups = 2 },
	"data_parallel.dp_size":       func(a *app.Application) { a.DataParallel.DPSize = 8 },
	"disaggregation.decide":       func(a *app.Application) { a.Disaggregation.Decide = app.DecideAlways },
	"disaggregation.fallback":     func(a *app.Application) { a.Disaggregation.Fallback = app.FallbackFail },
	"disaggregation.colocate":     func(a *app.Application) { a.Disaggregation.Colocate = app.ColocateNo },
}

// loudChanges are some of all others.
var loudChanges = map[string]func(*app.Application){
	"model.source":          func(a *app.Application) { a.Model.Source = "other" },
	"max_ongoing_requests":  func(a *app.Application) { a.MaxOngoingRequests = 7 },
	"engine.env":            func(a *app.Application) { a.Engine.Env = map[string]string{"A": "b"} },
	"max_ranks_per_node":    func(a *app.Application) { a.MaxRanksPerNode = 7 },
	"health_check_period_s": func(a *app.Application) { a.HealthCheckPeriodS = 7 },
	"data_parallel.coupling": func(a *app.Application) {
		a.DataParallel.Coupling = app.Lockstep
	},
	"disaggregation.transfer": func(a *app.Application) { a.Disaggregation.Transfer = app.TransferNIXL },
}

// TestThePageSaysWhatRestarts: the rows of docs/rollout.md that restart nothing name the keys that the launch
// hash leaves out, and no other.
func TestThePageSaysWhatRestarts(t *testing.T) {
	text, err := os.ReadFile("../../docs/rollout.md")
	require.NoError(t, err)
	var listed []string
	rows := regexp.MustCompile(`(?m)^\| (.*) \| nothing`).FindAllStringSubmatch(string(text), -1)
	for _, row := range rows {
		for _, key := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[1], -1) {
			listed = append(listed, key[1])
		}
	}
	hash := func(change func(*app.Application)) string {
		a := pools(4, 4)[1]
		a.Routing.Policy = "least-loaded"
		change(a)
		h, err := launchHash(a, &a.Units()[0])
		require.NoError(t, err)
		return h
	}
	before := hash(func(*app.Application) {})
	var quiet []string
	for key, change := range quietChanges {
		quiet = append(quiet, key)
		assert.Equal(t, before, hash(change), "a change of %s restarts ranks", key)
	}
	assert.ElementsMatch(t, quiet, listed, "the keys of this test, and those of docs/rollout.md")
	for key, change := range loudChanges {
		assert.NotEqual(t, before, hash(change), "a change of %s restarts nothing", key)
	}
	events := hash(func(a *app.Application) { a.Routing.Policy = "kv" })
	assert.NotEqual(t, before, events, "a policy that reads KV events restarts the engines")
	assert.Contains(t, string(text), "KV events")
}
