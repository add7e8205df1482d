package controller

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
)

func TestLaunchHash(t *testing.T) {
	base := sim("chat", 2, app.Independent)
	hash := func(change func(a *app.Application)) string {
		a := *base
		change(&a)
		u := a.Units()[0]
		h, err := launchHash(&a, &u)
		require.NoError(t, err)
		return h
	}
	same := hash(func(*app.Application) {})
	for name, f := range map[string]func(a *app.Application){
		"policy": func(a *app.Application) { a.Routing.Policy = "random" },
		"route":  func(a *app.Application) { a.RoutePrefix = "/x" },
		"ranks":  func(a *app.Application) { a.DataParallel.DPSize = 9 },
		"queue":  func(a *app.Application) { a.MaxQueuedRequests = 9 },
		"grace":  func(a *app.Application) { a.GracefulShutdownTimeout = 9 },
	} {
		assert.Equal(t, same, hash(f), name)
	}
	for name, f := range map[string]func(a *app.Application){
		"model":    func(a *app.Application) { a.Model.Source = "x" },
		"args":     func(a *app.Application) { a.Engine.Args = app.Args{{Name: "seed", Value: 1}} },
		"coupling": func(a *app.Application) { a.DataParallel.Coupling = app.Lockstep },
		"ongoing":  func(a *app.Application) { a.MaxOngoingRequests = 3 },
		"devices":  func(a *app.Application) { a.Resources.GPUs = 1 },
	} {
		assert.NotEqual(t, same, hash(f), name)
	}
}

// A policy that begins or ceases to need KV events changes the engines' flags and the replicas' subscription,
// and so the hash. No other part of routing does.
func TestLaunchHashFollowsWhoWantsEvents(t *testing.T) {
	for _, kind := range []app.Kind{app.KindSim, app.KindAttach} {
		t.Run(string(kind), func(t *testing.T) {
			hash := func(policy, events string, change func(a *app.Application)) string {
				a := *sim("chat", 2, app.Independent)
				a.Engine.Kind, a.Engine.KVEvents, a.Routing.Policy = kind, events, policy
				if kind == app.KindAttach {
					a.Engine.Ranks = []app.AttachRank{
						{URL: "http://127.0.0.1:1"},
						{URL: "http://127.0.0.1:2"},
					}
				}
				change(&a)
				u := a.Units()[0]
				h, err := launchHash(&a, &u)
				require.NoError(t, err)
				return h
			}
			asIs := func(*app.Application) {}
			without, with := hash("power-of-two", app.KVEventsAuto, asIs), hash("scoring", app.KVEventsAuto,
				asIs)
			assert.NotEqual(t, without, with, "a policy that reads the index")
			assert.Equal(t, with, hash("kv", app.KVEventsAuto, asIs), "another one")
			assert.Equal(t, without, hash("scoring", app.KVEventsOff, asIs), "forbidden")
			assert.Equal(t, without, hash("power-of-two", app.KVEventsOff, asIs),
				"forbidden, and nobody wanted them")
			assert.Equal(t, without, hash("prefix-aware", app.KVEventsAuto, asIs),
				"a policy that looks at texts")
			assert.Equal(t, with, hash("scoring", app.KVEventsAuto, func(a *app.Application) {
				busy := 0.5
				a.Routing.Identity, a.Routing.BusyThreshold = "tokens", &busy
			}))
			assert.Equal(t, without, hash("kv", app.KVEventsAuto, func(a *app.Application) {
				a.Routing.Params = map[string]any{"no_kv_events": true}
			}), "approximate")
		})
	}
}
