package main

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
)

// happened returns a change of demo/0/0 at a second.
func happened(second int, from, to string) client.Event {
	return client.Event{
		Time: time.Date(2026, 11, 21, 12, 0, second, 0, time.UTC), Kind: "unit", App: "demo",
		Unit: "demo/0/0", Epoch: 3, From: from, Phase: to,
	}
}

func TestEventsListsWhatHappened(t *testing.T) {
	lost := happened(9, "alive", "lost")
	lost.Unit, lost.App, lost.Epoch, lost.Node = "", "", 0, "gpu-1"
	lost.Reason, lost.Action = "silent for 12s", "starts its ranks on other nodes"
	run := func(args ...string) *cli {
		c := newCLI(t)
		c.now = func() time.Time { return lost.Time }
		c.cluster.events = [][]client.Event{{lost, happened(1, "", "ready"), happened(7, "ready", "fenced")}}
		require.Zero(t, c.run(append([]string{"events"}, args...)), c.stderr())
		return c
	}
	assert.Equal(t, `TIME                  SUBJECT   EPOCH  CHANGE           ACTION                           CAUSE
2026-11-21T12:00:01Z  demo/0/0  3      ready
2026-11-21T12:00:07Z  demo/0/0  3      ready -> fenced
2026-11-21T12:00:09Z  gpu-1            alive -> lost    starts its ranks on other nodes  silent for 12s
`, run().stdout())
	assert.Equal(t, "demo/0/0\ngpu-1\n", run("--since", "3s", "-o", "name").stdout())
	doc := decode[struct{ Events []client.Event }](t, run("demo", "-o", "json").stdout())
	assert.Len(t, doc.Events, 3)
	none := newCLI(t)
	none.cluster.events = [][]client.Event{nil}
	require.Zero(t, none.run([]string{"events"}))
	assert.Equal(t, "dpserve: no change is kept\n", none.stderr())
}

// `events -f` goes on at the next leader: it prints no change twice, and those that it has missed.
func TestFollowedEventsGoOnAtTheNextLeader(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		former, missed := happened(2, "", "fenced"), happened(3, "fenced", "backoff")
		former.Former, former.Time = true, former.Time.Add(time.Millisecond)
		missed.Reason, missed.Action = "exit 9", "starts it again after a wait"
		c := newCLI(t)
		c.cluster.events = [][]client.Event{
			{happened(1, "", "ready"), happened(2, "ready", "fenced")},
			{happened(1, "", "ready"), happened(2, "ready", "fenced")},
			{former, missed},
		}
		c.cluster.failures = []error{nil, nil, noLeader(), refused(), nil, errors.New("a fault")}
		assert.Equal(t, 1, c.run([]string{"events", "demo", "-f"}))
		assert.Equal(t, `2026-11-21T12:00:01Z demo/0/0 ready epoch 3
2026-11-21T12:00:02Z demo/0/0 ready -> fenced epoch 3
2026-11-21T12:00:03Z demo/0/0 fenced -> backoff epoch 3: exit 9; dpserve starts it again after a wait
`, c.stdout())
		assert.Contains(t, c.stderr(), "dpserve: the event stream ended; asking again for up to 5s\n")
		assert.Contains(t, c.stderr(), "a fault")
	})
}
