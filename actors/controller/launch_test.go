package controller

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/app"
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
