package main

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// Each change of a unit that users notice is one sentence.
func TestUnitHistory(t *testing.T) {
	h, now := &unitHistory{}, time.Unix(0, 0)
	unit := func(phase state.Phase, epoch uint64, reason string) []client.AppStatus {
		a := demo(client.StatusRunning, 1, phase)
		a.Units[0].Epoch, a.Units[0].Reason = epoch, reason
		return []client.AppStatus{a}
	}
	killed := "engine was ended by signal killed after 4s; more"
	attached := func(phase state.Phase) []client.AppStatus {
		apps := unit(phase, 7, "connection refused")
		apps[0].Kind = "attach"
		return apps
	}
	failing := func(phase state.Phase, attempt int) []client.AppStatus {
		apps := unit(phase, 9, "exit status 1")
		apps[0].Units[0].Attempt = attempt
		return apps
	}
	for _, step := range []struct {
		apps []client.AppStatus
		want string
	}{
		{unit(state.Ready, 1, ""), ""},
		{unit(state.Ready, 1, ""), ""},
		{unit(state.Killing, 1, killed), "demo/0/0 died (signal killed after 4s), starts again"},
		{unit(state.Backoff, 1, killed), ""},
		{unit(state.Starting, 2, ""), ""},
		{unit(state.Ready, 2, ""), "demo/0/0 is ready again, epoch 2, after 3.0 s"},
		{unit(state.Ready, 3, ""), "demo/0/0 died and is ready again, epoch 3"},
		{unit(state.Draining, 3, "node n1 is draining"), "demo/0/0 drains (node n1 is draining)"},
		{unit(state.Pending, 3, "place demo/0/0: 0 of 1 rank can be placed (PACK); need: 1"), ""},
		{unit(state.Ready, 4, ""), "demo/0/0 is ready again, epoch 4, after 2.0 s"},
		{unit(state.Pending, 4, "place x; y"), "demo/0/0 waits for room (place x)"},
		{unit(state.Ready, 5, ""), "demo/0/0 is ready again, epoch 5, after 1.0 s"},
		{unit(client.Unreachable, 5, "node n1 is silent"), "demo/0/0 is unreachable (node n1 is silent)"},
		{unit(state.Ready, 5, ""), "demo/0/0 is ready again, epoch 5, after 1.0 s"},
		{nil, "demo/0/0 is gone"},
		{attached(state.Starting), ""},
		{attached(state.Ready), "demo/0/0 is ready, epoch 7"},
		{attached(state.Fenced), "demo/0/0 does not answer (connection refused), is asked again"},
		{failing(state.Backoff, 1), ""},
		{failing(state.Starting, 2), "demo/0/0 did not start (exit status 1), is tried again"},
		{
			failing(state.Failed, 3),
			"demo/0/0 failed after 3 attempts (exit status 1); `dpserve logs demo/0/0` shows why",
		},
		{failing(state.Failed, 3), ""},
	} {
		now = now.Add(time.Second)
		assert.Equal(t, step.want, strings.Join(h.news(now, step.apps), "\n"))
	}
	group := demo(client.StatusRunning, 1, state.Ready)
	unit0 := &group.Units[0]
	unit0.Unit, unit0.Ranks = "demo/0", append(unit0.Ranks, unit0.Ranks...)
	h = &unitHistory{}
	assert.Empty(t, h.news(now, []client.AppStatus{group}))
	unit0.Phase = string(state.Killing)
	unit0.Reason = "rank 1: engine was ended by signal killed after 4s"
	assert.Equal(t, []string{"demo/0 died (rank 1: signal killed after 4s), its 2 ranks start again"},
		h.news(now, []client.AppStatus{group}))
}

func TestUpSummary(t *testing.T) {
	apps := []client.AppStatus{{Name: "a", Ready: 3, Desired: 4}, {Name: "b", Ready: 1, Desired: 1}}
	l := upLoad{requests: 640, inFlight: 2, tokensPerS: 99.6}
	for width, want := range map[int]string{
		100: "a, b  4/5 ready  640 requests  2 in flight  100 tokens/s  (Ctrl-C stops)",
		60:  "a, b  4/5 ready  640 requests  2 in flight  100 tokens/s",
		40:  "a, b  4/5 ready  640 requests",
		5:   "a, b  4/5 ready",
	} {
		assert.Equal(t, want, l.summary(apps, width))
	}
	apps = append(apps, client.AppStatus{Name: "c"}, client.AppStatus{Name: "d"})
	assert.True(t, strings.HasPrefix(l.summary(apps, 80), "4 applications  4/5 ready"))
}

// The log of up leaves out the record that up prints as a sentence, and no other.
func TestUpLog(t *testing.T) {
	scr, v := emulatedScreen(80, 10)
	log := upLog{scr, &atomic.Bool{}}
	_, _ = log.Write([]byte("level=WARN msg=\"unit is fenced\" unit=demo/0/0\n"))
	_, _ = log.Write([]byte("level=WARN msg=\"the disk is full\"\n"))
	assert.Equal(t, `level=WARN msg="the disk is full"`, v.everything())
}
