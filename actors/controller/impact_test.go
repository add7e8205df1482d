package controller

import (
	"encoding/json"
	"maps"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// cacheAware is an application whose policy reads KV events.
func cacheAware(coupling app.Coupling) *app.Application {
	a := sim("chat", 2, coupling)
	a.GracefulShutdownTimeout = 0
	a.MaxQueuedRequests = 100
	a.Routing = app.Routing{Policy: "mex", Preset: "tuned"}
	return a
}

// What a plan says happens to each application and unit is what the core then does.
func TestPlanSaysWhatTheCoreDoes(t *testing.T) {
	for name, c := range map[string]struct {
		coupling app.Coupling
		change   func(*app.Application)
		want     client.Effect
		reasons  []string
	}{
		"no change": {app.Independent, func(*app.Application) {}, client.EffectUnchanged, nil},
		"more ranks": {app.Independent, func(a *app.Application) {
			a.DataParallel.DPSize, a.NumReplicas = 3, 3
		}, client.EffectScale, nil},
		"fewer ranks": {app.Independent, func(a *app.Application) {
			a.DataParallel.DPSize, a.NumReplicas = 1, 1
		}, client.EffectScale, nil},
		"more groups": {app.Lockstep, func(a *app.Application) {
			a.NumGroups, a.NumReplicas = 2, 4
		}, client.EffectScale, nil},
		"a larger group": {app.Lockstep, func(a *app.Application) {
			a.DataParallel.DPSize, a.NumReplicas = 3, 3
		}, client.EffectRestart, []string{"data_parallel.dp_size"}},
		"a policy that reads KV events too": {app.Independent, func(a *app.Application) {
			a.Routing.Policy = "scoring"
		}, client.EffectUpdate, nil},
		"a policy that reads no KV events": {app.Independent, func(a *app.Application) {
			a.Routing.Policy = "round-robin"
		}, client.EffectRestart, []string{"KV events go off"}},
		"KV events off": {app.Lockstep, func(a *app.Application) {
			a.Engine.KVEvents = app.KVEventsOff
		}, client.EffectRestart, []string{"KV events go off"}},
		"queue": {app.Independent, func(a *app.Application) {
			a.MaxQueuedRequests = 7
		}, client.EffectUpdate, nil},
		"an argument": {app.Independent, func(a *app.Application) {
			a.Engine.Args = app.Args{{Name: "seed", Value: json.Number("7")}}
		}, client.EffectRestart, []string{"engine.args.seed"}},
		"an argument and one more rank": {app.Independent, func(a *app.Application) {
			a.Engine.Args = app.Args{{Name: "seed", Value: json.Number("7")}}
			a.DataParallel.DPSize, a.NumReplicas, a.MaxQueuedRequests = 3, 3, 7
		}, client.EffectRestart, []string{"engine.args.seed"}},
		"another coupling": {app.Independent, func(a *app.Application) {
			a.DataParallel.Coupling = app.Lockstep
		}, client.EffectRestart, []string{"data_parallel.coupling"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, newHost("a", 16))
			f.deploy(cacheAware(c.coupling))
			f.run(4 * time.Second)
			require.Equal(t, "RUNNING", f.status("chat"))
			next := cacheAware(c.coupling)
			c.change(next)

			p := f.plan(false, next)
			require.Len(t, p.Apps, 1)
			assert.Equal(t, c.want, p.Apps[0].Effect)
			assert.Equal(t, c.reasons, p.Apps[0].Reasons)
			assert.Equal(t, 2, p.Apps[0].RanksBefore)
			assert.Equal(t, next.NumReplicas, p.Apps[0].RanksAfter)
			assert.Equal(t, c.want != client.EffectUnchanged, p.Changes)

			before := maps.Clone(f.state.Epochs)
			f.deploy(next)
			f.run(30 * time.Second)
			require.Equal(t, "RUNNING", f.status("chat"))
			assertPlanned(t, f, &p.Apps[0], before)
		})
	}
}

// assertPlanned compares a plan with what was done since the epochs of before.
func assertPlanned(t *testing.T, f *fleet, p *client.AppPlan, before map[string]uint64) {
	t.Helper()
	restarts, ended := 0, 0
	for _, u := range p.Units {
		epoch := f.state.Epochs[u.Unit]
		switch u.Effect {
		case client.EffectUnchanged:
			assert.Equal(t, before[u.Unit], epoch, u.Unit)
		case client.EffectRestart:
			restarts++
			assert.Equal(t, before[u.Unit]+1, epoch, u.Unit)
			assert.Equal(t, p.Reasons, u.Reasons, u.Unit)
		case client.EffectCreate:
			assert.Equal(t, before[u.Unit]+1, epoch, u.Unit)
		case client.EffectDelete:
			ended++
			assert.Nil(t, f.state.Units[u.Unit], u.Unit)
		default:
			t.Errorf("%s: a unit has no effect %q", u.Unit, u.Effect)
		}
	}
	switch p.Effect {
	case client.EffectRestart:
		assert.Positive(t, restarts+ended)
	case client.EffectScale:
		assert.Zero(t, restarts)
	default:
		assert.Zero(t, restarts+ended)
	}
}

// A unit that a roll-out has not reached yet restarts whatever the file says.
func TestPlanDuringARollout(t *testing.T) {
	f := newFleet(t, newHost("a", 4))
	f.deploy(cacheAware(app.Independent))
	f.run(4 * time.Second)
	f.hosts["a"].slow = true
	next := cacheAware(app.Independent)
	next.Model.Source = "m2"
	f.deploy(next)
	f.renew("a")
	p := f.plan(false, next)
	assert.Equal(t, client.EffectUnchanged, p.Apps[0].Effect)
	waiting := 0
	for _, u := range p.Apps[0].Units {
		if u.Effect == client.EffectRestart {
			waiting++
			assert.Equal(t, []string{"it still runs an earlier revision"}, u.Reasons)
		}
	}
	assert.Equal(t, 1, waiting)
}

// What another version stored cannot be compared, and its units restart unless they would start the same.
func TestPlanOfASpecThatCannotBeRead(t *testing.T) {
	f := newFleet(t, newHost("a", 4))
	f.deploy(cacheAware(app.Independent))
	f.run(4 * time.Second)
	put := &state.PutApps{Apps: []state.AppSpec{{Name: "chat", Spec: []byte(`[{"name": 7}]`)}}}
	_, err := f.apply(state.Command{PutApps: put})
	require.NoError(t, err)
	p := f.plan(false, cacheAware(app.Independent))
	assert.Equal(t, client.EffectUpdate, p.Apps[0].Effect)
	next := cacheAware(app.Independent)
	next.Model.Source = "m2"
	p = f.plan(false, next)
	assert.Equal(t, client.EffectRestart, p.Apps[0].Effect)
	assert.Equal(t, []string{"another version of dpserve wrote what is stored"}, p.Apps[0].Reasons)
}
