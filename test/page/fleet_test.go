package page

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
)

const (
	fleetToken = "dpa1.of-a-fleet-of-tests"
	keptEvents = 1000
)

// fleet is an admin API over ranks that do not exist, of one application on nodes with devices.
type fleet struct {
	url  string
	apps []client.AppStatus

	mu     sync.Mutex
	events []client.Event
	number uint64
	next   chan struct{}
}

// newFleet serves an application with so many ranks.
func newFleet(t *testing.T, ranks int) *fleet {
	t.Helper()
	f := &fleet{next: make(chan struct{}), apps: []client.AppStatus{newApp(ranks)}}
	s := api.NewServer(api.Config{
		Backend: fleetBackend{f: f}, Nodes: fleetNodes{f: f}, Routers: fleetRouters{},
		Token: fleetToken, TokenFile: "admin.token",
		Version: client.BuildInfo{Version: "v0.1.0", Node: "gpu-1"},
	})
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, s.Attach(l))
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.NoError(t, <-served)
	})
	f.url = "http://" + l.Addr().String() + "/"
	return f
}

// newApp is an application of which the ninth rank has failed and the tenth starts.
func newApp(ranks int) client.AppStatus {
	a := client.AppStatus{
		Name: "demo", Status: client.StatusUnhealthy, Revision: 7, Model: "org/model", Kind: "vllm",
		Policy: "mex", DPSize: ranks, Groups: 1, Desired: ranks, Ready: ranks - 2, MaxQueued: 100,
		Message: "demo/0/9: <b>CUDA error</b>",
		Traffic: &client.Traffic{
			Requests: 1000, Prompt: 1 << 20, Cached: 1 << 19, Generated: 1 << 16,
			Goodput: client.Goodput{Met: 900, Missed: 100, TTFT: 2, TPOT: 0.05},
		},
	}
	for i := range ranks {
		phase := "ready"
		switch i {
		case 9:
			phase = "backoff"
		case 10:
			phase = "starting"
		}
		u := client.UnitStatus{
			Unit: fmt.Sprint("demo/0/", i), Phase: phase, Epoch: 3, Since: time.Now().Add(-time.Hour),
			Ranks: []client.RankStatus{{
				Rank: i, Node: fmt.Sprint("gpu-", 1+i/8), Devices: []int{i % 8}, Phase: phase, Epoch: 3,
				MaxOngoing: 256, InFlight: i % 40, TTFTp50Ms: 120.5, TTFTp95Ms: 480, ITLp50Ms: 12.25,
				HitRate: 0.8, PromptTokens: 1000, KV: &client.KVStatus{Usage: float64(i%100) / 100},
			}},
		}
		if i == 9 {
			u.Reason, u.Restarts = "CUDA error: <b>device-side assert</b>", 3
		}
		a.Units = append(a.Units, u)
	}
	return a
}

// happen adds a change of the ninth rank.
func (f *fleet) happen(reason string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.number++
	f.events = append(f.events, client.Event{
		Number: f.number, Time: time.Now(), Kind: "unit", App: "demo", Unit: "demo/0/9", From: "starting",
		Phase: "backoff", Epoch: f.number, Reason: reason,
	})
	f.events = f.events[max(0, len(f.events)-keptEvents):]
	close(f.next)
	f.next = make(chan struct{})
}

// fleetBackend and the two after it answer what the page asks; nothing else is asked.
type fleetBackend struct {
	api.Backend
	f *fleet
}

func (b fleetBackend) Apps(context.Context) ([]client.AppStatus, error) { return b.f.apps, nil }

func (b fleetBackend) Events(since uint64) ([]client.Event, <-chan struct{}) {
	b.f.mu.Lock()
	defer b.f.mu.Unlock()
	i := slices.IndexFunc(b.f.events, func(e client.Event) bool { return e.Number > since })
	if i < 0 {
		return nil, b.f.next
	}
	return slices.Clone(b.f.events[i:]), b.f.next
}

func (b fleetBackend) Logs(context.Context, client.LogQuery) (api.LogStream, error) {
	return &markup{}, nil
}

// markup is a log of one line.
type markup struct{ isOver bool }

func (m *markup) Next(ctx context.Context) ([]client.LogLine, error) {
	if m.isOver {
		<-ctx.Done()
		return nil, io.EOF
	}
	m.isOver = true
	return []client.LogLine{{
		Time: time.Now(), App: "demo", Text: `<script>alert(1)</script><img src=x onerror=alert(1)>`,
	}}, nil
}

func (*markup) Close() error { return nil }

// anyNodes has another name than its method Nodes, so that a struct can embed it.
type anyNodes interface{ api.Nodes }

type fleetNodes struct {
	anyNodes
	f *fleet
}

func (n fleetNodes) Nodes(context.Context) ([]client.NodeStatus, error) {
	var out []client.NodeStatus
	for i := range (n.f.apps[0].DPSize + 7) / 8 {
		out = append(out, client.NodeStatus{
			Node: fmt.Sprint("gpu-", 1+i), State: "alive", Roles: []string{"control", "worker", "ingress"},
			Address: fmt.Sprint("10.0.0.", 1+i), Zone: "a", Version: "v0.1.0", Leader: i == 0, Voter: i < 3,
			GPUs: 8, GPUsUsed: 8, Ranks: 8, LeaseLeftS: 9, Devices: []client.DeviceModel{{
				Kind: "nvidia", Name: "NVIDIA H100 80GB HBM3", Devices: []int{0, 1, 2, 3, 4, 5, 6, 7},
			}},
		})
	}
	return out, nil
}

type fleetRouters struct{ api.Routers }

func (fleetRouters) Router(_ context.Context, app string) (client.Info, error) {
	return client.Info{App: app, Policy: "mex", Imbalance: 1.25}, nil
}

func (fleetRouters) Decisions(context.Context, string, int) ([]client.Replay, error) {
	return []client.Replay{{RequestID: "<b>r1</b>", At: time.Now(), Pick: "0/1", Reason: "lowest_score"}}, nil
}

func (fleetRouters) Explain(_ context.Context, app string, _ *client.Query) (*client.Explanation, error) {
	score := 1.5
	return &client.Explanation{
		App: app, Policy: "mex", Decision: "route", Pick: "0/1", Reason: "lowest_score",
		Formula: "queue + prefill",
		Ranks: []client.RankExplanation{
			{
				Worker: "0/1", State: "ok", Eligible: true, Score: &score, Picked: true,
				Terms: []client.Term{{Name: "queue", Unit: "ms", Value: 1.5}, {Name: "zero"}},
			},
			{Worker: "0/9", State: "not-ready", Why: "it starts <b>again</b>"},
		},
	}, nil
}
