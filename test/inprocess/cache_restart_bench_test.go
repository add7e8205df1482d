package inprocess

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/dpserver"
	"github.com/dpserve/dpserve/actors/ingress"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// What the ranks hold when an ingress comes back.
const (
	restartRanks  = 8
	restartBlocks = 125_000                      // per rank
	restartAll    = restartRanks * restartBlocks // goal: in the index of a new ingress within 2 s
	restartLimit  = 10 * time.Second             // until the benchmark fails
)

// healthyEngine answers and publishes no events.
type healthyEngine struct{}

func (healthyEngine) Health(context.Context) (engine.Health, error) { return engine.Alive, nil }

func (healthyEngine) Models(context.Context) ([]engine.Model, error) { return nil, nil }
func (healthyEngine) Probe(context.Context, string) error            { return nil }
func (healthyEngine) Counters(context.Context) (engine.Counters, error) {
	return engine.Counters{}, nil
}

// ignoreEvents ignores the events of ranks.
type ignoreEvents struct{}

func (ignoreEvents) ReplicaEvent(msg.ReplicaEvent) {}

// stateOf is a cluster state that never changes.
type stateOf struct{ st *state.State }

func (s stateOf) State() *state.State    { return s.st }
func (stateOf) Changed() <-chan struct{} { return nil }

// held is what a block set holds.
type held struct {
	blocks int
	sum    uint64
}

// blockCensus holds what each rank reports as cached, by "GROUP/RANK".
type blockCensus struct {
	mu    sync.Mutex
	ranks map[string]held
	whole int
}

// Deliver implements msg.Sink.
func (s *blockCensus) Deliver(r *msg.Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.Kind == msg.RecKVEnd {
		s.whole++
	}
	h := s.ranks[r.Rank.String()]
	for _, hash := range r.KV.Delta.Hashes {
		h.blocks, h.sum = h.blocks+1, h.sum+hash
	}
	s.ranks[r.Rank.String()] = h
}

// take asks every rank.
func (s *blockCensus) take(b *testing.B, feed msg.Feed) map[string]held {
	b.Helper()
	s.ranks = map[string]held{}
	defer feed.Subscribe(s)()
	whole := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.whole == restartRanks
	}
	require.Eventually(b, whole, restartLimit, time.Millisecond)
	return s.ranks
}

// restartNode is the ranks of an application without engines, and its state.
type restartNode struct {
	hub   *msg.Hub
	store stateOf
	ranks []*dpserver.Server
	probe []uint32 // a prompt that every rank holds
	sent  uint64   // requests
}

func newRestartNode(b *testing.B, log *slog.Logger) *restartNode {
	b.Helper()
	a := &app.Application{
		Name: "a", RoutePrefix: "/", Model: app.Model{ID: "a"}, Engine: app.Engine{Kind: app.KindSim},
		NumReplicas: restartRanks, NumGroups: 1,
		DataParallel: app.DataParallel{DPSize: restartRanks, Coupling: app.Independent},
		Routing:      app.Routing{Policy: "lpwl", Preset: "documented", Identity: app.IdentityText},
	}
	spec, err := json.Marshal([]*app.Application{a})
	require.NoError(b, err)
	st := &state.State{
		Apps: map[string]*state.App{}, Units: map[string]*state.Unit{},
		Epochs: map[string]uint64{},
	}
	st.Apps[a.Name] = &state.App{
		Name: a.Name, Revision: 1, Spec: spec, Names: a.Model.ServedNames(),
	}
	n := &restartNode{hub: msg.NewHub(), store: stateOf{st}}
	system := inbox.NewSystem(log)
	b.Cleanup(system.Shutdown)
	f := dpserver.Factory{
		System: system, Hub: n.hub,
		NewEngine: func(*msg.ReplicaSpec) dpserver.Engine { return healthyEngine{} }, Log: log,
	}
	for rank, u := range a.Units() {
		st.Units[u.ID] = &state.Unit{ID: u.ID, App: a.Name, Group: u.Group, Epoch: 1, Phase: state.Ready}
		st.Epochs[u.ID] = 1
		s, err := f.New(msg.ReplicaSpec{
			App: a, Unit: u.ID, Group: u.Group, Rank: rank, Epoch: 1, Node: "n",
			Watcher: ignoreEvents{}, Target: msg.Target{URL: "http://127.0.0.1:1", Owned: true},
		})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, s.Stop(context.Background())) })
		require.NoError(b, s.Ready(b.Context(), msg.Facts{Incarnation: uint64(rank) + 1, MaxOngoing: 8}))
		n.ranks = append(n.ranks, s)
	}
	return n
}

// fill sends every rank prompts of so many blocks until it holds restartBlocks. Eight prompts in a row share
// their first half.
func (n *restartNode) fill(b *testing.B, blocks int) {
	b.Helper()
	n.probe = []uint32{1: 1, blockTokens: 1} // a block, and the last token that is always computed
	h, next := kvindex.NewHasher(n.store.st.Secret), uint64(0)
	root := h.Root(kvindex.Salt{Unit: kvindex.Tokens, BlockSize: blockTokens, Model: "a"})
	for _, s := range n.ranks {
		prompt := h.Tokens(nil, root, n.probe[:blockTokens], blockTokens, nil)
		n.send(b, s, prompt)
		for left, i := restartBlocks-len(prompt), 0; left > 0; i++ {
			keep := blocks / 2
			if i%8 == 0 {
				keep = 0
			}
			for prompt = prompt[:keep]; len(prompt) < blocks && left > 0; left-- {
				next++
				prompt = append(prompt, mixed(next))
			}
			n.send(b, s, prompt)
		}
	}
}

// send is one request to a rank, from its admission to its end.
func (n *restartNode) send(b *testing.B, s *dpserver.Server, prompt []uint64) {
	b.Helper()
	n.sent++
	tokens, reply := blockTokens*len(prompt), make(chan msg.AdmitReply, 1)
	require.NoError(b, s.Mailbox().TrySend(&msg.Admit{
		ReqID: n.sent, Epoch: 1, Tokens: tokens, Blocks: prompt,
		Ingress: "before", Reply: reply,
	}))
	granted := <-reply
	require.Equal(b, msg.Granted, granted.Refusal)
	s.Mailbox().Send(&msg.Done{
		TicketID: granted.Ticket.ID, PromptTokens: tokens,
		FirstToken: time.Millisecond,
	})
}

// mixed is a number that looks like a hash, another one for every i.
func mixed(i uint64) uint64 {
	i = (i ^ i>>30) * 0xbf58476d1ce4e5b9
	i = (i ^ i>>27) * 0x94d049bb133111eb
	return i ^ i>>31
}

// shown is what look-ups of an ingress find in every rank's block set.
func shown(b *testing.B, in *ingress.Ingress) map[string]held {
	b.Helper()
	out := map[string]held{}
	truncated, err := in.DumpEvents(b.Context(), "a", func(run *client.Run) error {
		h := out[run.Worker]
		for _, block := range run.Blocks {
			hash, err := strconv.ParseUint(block, 16, 64)
			if err != nil {
				return err
			}
			h.blocks, h.sum = h.blocks+1, h.sum+hash
		}
		out[run.Worker] = h
		return nil
	})
	require.NoError(b, err)
	require.False(b, truncated)
	return out
}

// KV2: BenchmarkIngressRestart is an ingress that comes back: how long until it knows, of every rank, what
// the rank knows.
func BenchmarkIngressRestart(b *testing.B) {
	if testing.Short() {
		b.Skip("a million blocks")
	}
	for _, prompt := range []int{16, 128, 1024} {
		b.Run(fmt.Sprintf("prompt=%d", prompt), func(b *testing.B) {
			log := slog.New(slog.DiscardHandler)
			n := newRestartNode(b, log)
			n.fill(b, prompt)
			all := (&blockCensus{}).take(b, n.hub)
			for b.Loop() {
				in, err := ingress.New(ingress.Config{
					Node: "late", Store: n.store, Feed: n.hub,
					Metrics: telemetry.New(), Log: log, Seed: 7,
				})
				require.NoError(b, err)
				n.awaitShown(b, in)
				b.StopTimer()
				require.Equal(b, all, shown(b, in), "blocks, and the sum of their hashes")
				require.NoError(b, in.Close(b.Context()))
				b.StartTimer()
			}
			b.ReportMetric(restartAll, "blocks")
			b.ReportMetric(b.Elapsed().Seconds()/float64(b.N), "s/restart")
		})
	}
}

// awaitShown waits until look-ups find every rank's block set: it is shown once it is
// whole.
func (n *restartNode) awaitShown(b *testing.B, in *ingress.Ingress) {
	b.Helper()
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		x, err := in.ExplainRoute(b.Context(), "a", &client.Query{TokenIDs: n.probe})
		require.NoError(b, err)
		found := 0
		for i := range x.Ranks {
			if x.Ranks[i].HitTokens > 0 {
				found++
			}
		}
		if found == restartRanks {
			return
		}
		require.Less(b, time.Since(began), restartLimit, "%d of %d ranks are known", found, restartRanks)
	}
}
