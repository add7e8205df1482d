package node_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/actors/dpserver"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/shim"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/parallel"
	"github.com/dpserve/dpserve/test/ports"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case engineWord:
			os.Exit(fakeEngine(os.Args[2:]))
		case simWord:
			os.Exit(sim.Main(context.Background(), os.Args[2:], os.Stdout, os.Stderr))
		case childWord:
			os.Exit(fakeChild())
		case nodeWord:
			os.Exit(fakeNode(os.Args[2:]))
		case shim.Command:
			os.Exit(shim.Main(os.Args[2]))
		}
	}
	parallel.AtLeast(8) // most of them wait for processes
	goleak.VerifyTestMain(m)
}

// patience bounds every wait of these tests, because test machines are shared.
const patience = 30 * time.Second

// rig is one node with real DPServers. The test is the controller and the RankAssigner.
type rig struct {
	t      testing.TB
	node   *node.Node
	hub    *msg.Hub
	events chan msg.UnitEvent
	dir    string
	ports  *portAllocator
	taken  uint64 // number of the last event; of the renewals alone

	mu        sync.Mutex
	published []msg.Publish
	accepting map[string]bool // unit/rank, from the stream
	causes    []string
}

// Renew implements msg.Leader.
func (r *rig) Renew(_ context.Context, m *msg.NodeReport) (msg.Lease, error) {
	for _, e := range m.Events {
		if e.Number > r.taken {
			r.taken = e.Number
			r.events <- e
		}
	}
	return msg.Lease{TTL: state.LeaseTTL, Acked: r.taken}, nil
}

// State implements msg.Store: the cluster has released nothing.
func (*rig) State() *state.State { return state.New() }

// Changed implements msg.Store.
func (*rig) Changed() <-chan struct{} { return nil }

// Assign implements msg.Assigner: the last part of a replica id is its position, which is the rank.
func (r *rig) Assign(_ context.Context, _ string, _ int, replicaID string) (msg.AssignReply, error) {
	rank, err := strconv.Atoi(replicaID[strings.LastIndexByte(replicaID, '.')+1:])
	return msg.AssignReply{Rank: rank, Epoch: r.ports.epoch}, err
}

func (r *rig) Publish(p msg.Publish) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.published = append(r.published, p)
}

func (r *rig) allPublished() []msg.Publish {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.published)
}

func (r *rig) Await(context.Context, string, uint64, int) (msg.AwaitReply, error) {
	return msg.AwaitReply{Addr: engine.Loopback, Port: 1}, nil
}

// Deliver implements msg.Sink.
func (r *rig) Deliver(rec *msg.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := rec.Unit + "/" + strconv.Itoa(rec.Rank.Rank())
	switch rec.Kind {
	case msg.RecSnapshot, msg.RecState:
		r.accepting[key] = rec.Accepting
		r.causes = append(r.causes, rec.Cause)
	case msg.RecGone:
		delete(r.accepting, key)
	default:
	}
}

func (r *rig) accepts() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, a := range r.accepting {
		if a {
			n++
		}
	}
	return n
}

// portAllocator provides blocks of free ports and the epoch under test.
type portAllocator struct{ epoch uint64 }

// block returns a block that no other test uses until t ends.
func (p *portAllocator) block(t testing.TB) state.Block {
	const size = 32
	return state.Block{Node: "n", Base: ports.Take(t, size), Size: size}
}

// timers are a tenth of the defaults.
func timers() node.Timers {
	return node.Timers{KillGrace: 500 * time.Millisecond, VerifyNamed: time.Second, Probe: 5 * time.Second}
}

func newRig(t testing.TB, change ...func(c *node.Config)) *rig {
	r := &rig{
		t: t, hub: msg.NewHub(), events: make(chan msg.UnitEvent, 1000), dir: t.TempDir(),
		ports: &portAllocator{epoch: 1}, accepting: map[string]bool{},
	}
	rt := engine.NewTransport()
	sys := inbox.NewSystem(slog.New(slog.DiscardHandler))
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	f := &dpserver.Factory{System: sys, Hub: r.hub, Assigner: r, NewEngine: dpserver.NewClient(rt), Log: log}
	cfg := node.Config{
		ID: "n", DataDir: r.dir, System: sys, Assigner: r, Leader: r, Store: r,
		Self: func() state.Node { return state.Node{ID: "n"} }, Timers: timers(), Log: log,
		Rand:       rand.Uint64,
		NewReplica: func(s msg.ReplicaSpec) (node.Replica, error) { return f.New(s) },
	}
	for _, c := range change {
		c(&cfg)
	}
	cancel := r.hub.Subscribe(r)
	var err error
	r.node, err = node.New(cfg)
	require.NoError(t, err)
	r.dir = cfg.DataDir
	t.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), patience)
		defer stop()
		require.NoError(t, r.node.Close(ctx, 0))
		assert.Zero(t, r.accepts())
		cancel()
		sys.Shutdown()
		rt.CloseIdleConnections()
	})
	return r
}

// demo is an app whose engine is the test binary.
func demo(coupling app.Coupling, dpSize int, mode string) *app.Application {
	a := &app.Application{
		Name: "demo", Model: app.Model{ID: "demo"}, NumGroups: 1, HealthCheckPeriodS: 0.05,
		HealthCheckTimeoutS: 5, GracefulShutdownTimeout: 10,
		Engine: app.Engine{
			Kind: app.KindSim, Command: []string{os.Args[0], engineWord}, StartupTimeoutS: 20,
			Env: map[string]string{"GORACE": "atexit_sleep_ms=0"},
		},
		DataParallel: app.DataParallel{DPSize: dpSize, Coupling: coupling},
	}
	if mode != "" {
		a.Engine.Args = app.Args{{Name: "mode", Value: mode}}
	}
	return a
}

// order is the StartRank of one unit: the whole group if lockstep, else rank 0.
func (r *rig) order(a *app.Application) *msg.StartRank {
	u := a.Units()[0]
	m := &msg.StartRank{App: a, Unit: u.ID, Epoch: r.ports.epoch}
	for i, rank := range u.Ranks {
		m.Ranks = append(m.Ranks, state.RankGrant{Rank: rank, Node: "n", Slot: i})
	}
	m.AllRanks = m.Ranks
	if a.Engine.Kind != app.KindAttach {
		m.Block = r.ports.block(r.t)
	}
	return m
}

func (r *rig) start(a *app.Application) *msg.StartRank {
	r.t.Helper()
	m := r.order(a)
	require.NoError(r.t, r.node.StartRank(context.Background(), m))
	return m
}

func (r *rig) stop(m *msg.StartRank, grace time.Duration) {
	r.t.Helper()
	require.NoError(r.t, r.node.StopRank(context.Background(),
		&msg.StopRank{Unit: m.Unit, Epoch: m.Epoch, Grace: grace, Reason: "deleted"}))
}

// expect reads events until one of the given kind, and checks that only allowed kinds came before.
func (r *rig) expect(kind msg.UnitEventKind, before ...msg.UnitEventKind) msg.UnitEvent {
	r.t.Helper()
	for {
		select {
		case e := <-r.events:
			if e.Kind == kind {
				return e
			}
			require.Contains(r.t, before, e.Kind, "before %s came %+v", kind, e)
		case <-time.After(patience):
			require.FailNow(r.t, "no event "+string(kind))
		}
	}
}

func (r *rig) ready(m *msg.StartRank) {
	r.t.Helper()
	e := r.expect(msg.UnitReady, msg.UnitStarted)
	require.Equal(r.t, [...]any{m.Unit, m.Epoch, "n"}, [...]any{e.Unit, e.Epoch, e.Node})
	require.Equal(r.t, len(m.Ranks), r.accepts())
}

func (r *rig) eventually(what string, ok func() bool) {
	r.t.Helper()
	for end := time.Now().Add(patience); !ok(); {
		require.True(r.t, time.Now().Before(end), what)
		time.Sleep(5 * time.Millisecond)
	}
}

func (r *rig) statuses(m *msg.StartRank) []client.RankStatus { return r.node.RankStatuses()[m.Unit] }

func dead(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return true
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil || strings.Contains(string(b), ") Z")
}

// group lists live processes whose parent or group is pid.
func group(pid int) []int {
	var out []int
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		b, err := os.ReadFile(d + "/stat")
		if err != nil {
			continue
		}
		f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
		if id, _ := strconv.Atoi(filepath.Base(d)); f[2] == strconv.Itoa(pid) && f[0] != "Z" {
			out = append(out, id)
		}
	}
	return out
}

// portFree reports whether nothing listens on a port. It does not bind it: another program of the machine may
// just use it for a connection of its own.
func portFree(t testing.TB, port int) bool {
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", "127.0.0.1:"+strconv.Itoa(port))
	if err == nil {
		require.NoError(t, conn.Close())
	}
	return err != nil
}

// inShims lets the engines outlive the node.
func inShims(c *node.Config) {
	c.Shims = &node.ShimConfig{Cluster: "c", Node: "n", OrphanTimeout: time.Minute}
}

// noShim checks that no shim is left on disk.
func (r *rig) noShim() {
	r.t.Helper()
	r.eventually("the shims' folders are removed", func() bool {
		left, _ := os.ReadDir(filepath.Join(r.dir, "engines"))
		return len(left) == 0
	})
}

func TestAUnitsWholeLife(t *testing.T) {
	t.Parallel()
	for _, coupling := range []app.Coupling{app.Independent, app.Lockstep} {
		t.Run(string(coupling), func(t *testing.T) {
			r := newRig(t)
			m := r.start(demo(coupling, 3, ""))
			r.ready(m)
			st := r.statuses(m)
			require.Len(t, st, len(m.Ranks))
			for i, s := range st {
				assert.Equal(t, "ready", s.Phase)
				assert.Positive(t, s.PID)
				assert.Len(t, s.Incarnation, 16)
				assert.Equal(t, "http://127.0.0.1:"+strconv.Itoa(m.Block.Base+i), s.URL)
				assert.Equal(t, 256, s.MaxOngoing)
			}
			if coupling == app.Lockstep {
				assert.Equal(t, []msg.Publish{{
					Unit: m.Unit, Epoch: 1, Rank: 0, Addr: "127.0.0.1",
					Port: m.Block.Base + 15,
				}}, r.allPublished())
			}

			r.stop(m, time.Minute)
			e := r.expect(msg.UnitGone, msg.UnitDraining, msg.UnitKilling)
			assert.True(t, e.Asked)
			assert.True(t, e.WasReady)
			assert.Equal(t, "deleted", e.Reason)
			for _, s := range st {
				assert.True(t, dead(s.PID))
			}
			assert.True(t, portFree(t, m.Block.Base))
			assert.Empty(t, r.node.RankStatuses())
			assert.Empty(t, r.statuses(m))
			r.noShim()
		})
	}
}

func TestAFailedStartNamesItsRankAndItsLastLines(t *testing.T) {
	cases := map[string]struct {
		coupling app.Coupling
		mode     string
		rank     int
		reason   string
		exit     string // of the engine, if it ends by itself
	}{
		"exit code":      {app.Independent, "exit7", 0, "engine exited with code 7 after", "code 7"},
		"exit code 0":    {app.Independent, "exit0", 0, "engine exited with code 0 after", "code 0"},
		"one of a group": {app.Lockstep, "rank1dies", 1, "engine exited with code 0 after", "code 0"},
		"settings differ": {
			app.Lockstep, "mismatch", 1,
			"ranks of one group disagree on their settings: rank 0 has model demo, max_model_len 2048 and " +
				"block size 0, rank 1 has model demo, max_model_len 2049 and block size 0",
			"",
		},
		"it does not answer": {
			app.Independent, "noprobe", 0,
			"the engine is up and does not compute: /v1/completions answered 500: EngineCore died",
			"",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, inShims)
			m := r.start(demo(c.coupling, 2, c.mode))
			e := r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
			assert.Contains(t, e.Reason, c.reason)
			assert.Equal(t, c.rank, e.Rank)
			assert.False(t, e.WasReady)
			assert.False(t, e.Asked)
			assert.Equal(t, c.exit, e.Exit)
			if c.exit != "" {
				require.Len(t, e.LogTail, 20)
				assert.Contains(t, e.LogTail[18:], "no room for the model")
				assert.Contains(t, e.LogTail, "line 12") // the line on stdout may come anywhere
			}
			assert.True(t, portFree(t, m.Block.Base))
			assert.Zero(t, r.accepts(), "none was ever routable")
		})
	}
}

func TestAStartThatHangsEndsAtItsDeadline(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(c *node.Config) { c.Timers.StartupTimeout = 3 * time.Second })
	m := r.start(demo(app.Independent, 1, "hang"))
	e := r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
	assert.Contains(t, e.Reason,
		"not ready within the startup timeout of 3s (engine.startup_timeout_s); rank 0: waiting for "+
			"http://127.0.0.1:"+strconv.Itoa(m.Block.Base)+"/health: ")
	assert.Equal(t, []string{"engine rank 0 on port " + strconv.Itoa(m.Block.Base)}, e.LogTail)
}

func TestAStartThatCannotBegin(t *testing.T) {
	r := newRig(t)
	missing := demo(app.Independent, 1, "")
	missing.Engine.Command = []string{"/no/such/program"}
	r.start(missing)
	e := r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
	assert.Contains(t, e.Reason,
		"engine.command: stat /no/such/program: no such file or directory")

	r.ports.epoch++
	m := r.order(demo(app.Independent, 1, ""))
	ln, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(m.Block.Base))
	require.NoError(t, err)
	defer ln.Close()
	require.NoError(t, r.node.StartRank(t.Context(), m))
	e = r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
	assert.Contains(t, e.Reason, fmt.Sprintf("port %d of the unit's block is taken", m.Block.Base))

	r.ports.epoch++
	next := demo(app.Independent, 1, "")
	next.Engine.Kind, next.Engine.Command = app.KindVLLM, []string{"no-such-vllm", "serve"}
	r.start(next)
	e = r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
	assert.Contains(t, e.Reason, "there is no program no-such-vllm on this node; install it")
}

func TestAnExitTakesTheWholeLockstepUnitOutAtOnce(t *testing.T) {
	for _, coupling := range []app.Coupling{app.Lockstep, app.Independent} {
		for name, kill := range map[string]func(pid int, url string){
			"SIGKILL": func(pid int, _ string) { _ = syscall.Kill(pid, syscall.SIGKILL) },
			"exit 0": func(_ int, url string) {
				resp, err := http.Get(url + "/exit?code=0")
				if err == nil {
					_ = resp.Body.Close()
				}
			},
		} {
			t.Run(string(coupling)+" "+name, func(t *testing.T) {
				r := newRig(t)
				a := demo(coupling, 3, "")
				a.HealthCheckPeriodS = 60 // a probe could see the end before the exit is reaped
				m := r.start(a)
				r.ready(m)
				last := r.statuses(m)[len(m.Ranks)-1]
				began := time.Now()
				kill(last.PID, last.URL)
				r.eventually("out of routing", func() bool { return r.accepts() == 0 })
				t.Logf("out of routing after %s", time.Since(began))
				e := r.expect(msg.UnitFenced)
				assert.Equal(t, last.Rank, e.Rank)
				assert.True(t, e.WasReady)
				e = r.expect(msg.UnitGone, msg.UnitKilling)
				assert.False(t, e.Asked)
				assert.True(t, e.WasReady)
				if name == "exit 0" {
					assert.Contains(t, e.Reason, "engine exited with code 0")
				} else {
					assert.Contains(t, e.Reason, "engine was ended by signal killed")
				}
			})
		}
	}
}

// RG9: engines that ignore SIGTERM are killed with all their processes, and their ports are free.
func TestRG9AnEngineThatIgnoresSIGTERMIsKilledWithItsGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	m := r.start(demo(app.Lockstep, 2, "stubborn,orphan"))
	r.ready(m)
	var pids []int
	for _, s := range r.statuses(m) {
		pids = append(pids, group(s.PID)...)
	}
	require.Len(t, pids, 4)
	r.stop(m, 0)
	r.expect(msg.UnitGone, msg.UnitKilling)
	for _, pid := range pids {
		assert.True(t, dead(pid), "%d", pid)
	}
	assert.True(t, portFree(t, m.Block.Base))
	assert.True(t, portFree(t, m.Block.Base+1))
}

// RG9: a child that outlives its engine and holds the ports is killed before the unit counts as gone; the
// next start takes the same ports.
func TestRG9AnOrphanThatHoldsThePortsIsKilledBeforeGone(t *testing.T) {
	for _, mode := range []string{"orphan", "escaped"} {
		t.Run(mode, func(t *testing.T) {
			r := newRig(t)
			m := r.start(demo(app.Independent, 1, mode))
			r.ready(m)
			front := r.statuses(m)[0].PID
			require.NoError(t, syscall.Kill(front, syscall.SIGKILL))
			r.expect(msg.UnitGone, msg.UnitFenced, msg.UnitKilling)
			assert.Empty(t, group(front))
			assert.True(t, portFree(t, m.Block.Base))

			r.ports.epoch++ // the next start uses the same ports at once
			again := r.order(m.App)
			again.Block = m.Block
			require.NoError(t, r.node.StartRank(t.Context(), again))
			r.ready(again)
		})
	}
}

func TestAPortThatStaysTakenIsNamedAndWaitedFor(t *testing.T) {
	var mu sync.Mutex
	taken := false
	r := newRig(t, func(c *node.Config) {
		c.Timers.VerifyNamed = 50 * time.Millisecond
		c.BindTest = func(int) error {
			mu.Lock()
			defer mu.Unlock()
			if taken {
				return syscall.EADDRINUSE
			}
			return nil
		}
	})
	set := func(v bool) {
		mu.Lock()
		defer mu.Unlock()
		taken = v
	}
	m := r.start(demo(app.Independent, 1, ""))
	r.ready(m)
	set(true)
	r.stop(m, 0)
	r.expect(msg.UnitKilling)
	e := r.expect(msg.UnitKilling)
	assert.Equal(t, fmt.Sprintf("deleted; still held after 50ms: port %d (address already in use)",
		m.Block.Base), e.Reason)
	set(false)
	r.expect(msg.UnitGone)
}

func TestEpochsNeverFall(t *testing.T) {
	dir := t.TempDir()
	inDir := func(c *node.Config) { c.DataDir = dir }
	t.Run("before", func(t *testing.T) {
		r := newRig(t, inDir)
		r.ports.epoch = 5
		m := r.start(demo(app.Independent, 1, ""))
		r.ready(m)
		require.NoError(t, r.node.StartRank(t.Context(), m)) // idempotent: repeats the last event
		assert.Equal(t, msg.UnitReady, r.expect(msg.UnitReady).Kind)

		stale := *m
		stale.Epoch = 4
		require.ErrorIs(t, r.node.StartRank(t.Context(), &stale), node.ErrStaleEpoch)
		require.ErrorIs(t, r.node.StopRank(t.Context(), &msg.StopRank{Unit: m.Unit, Epoch: 4}),
			node.ErrStaleEpoch)
		assert.Equal(t, 1, r.accepts())

		pid := r.statuses(m)[0].PID
		r.ports.epoch = 6 // a newer grant ends the old engine before it starts its own
		next := r.start(m.App)
		e := r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
		assert.Equal(t, uint64(5), e.Epoch)
		assert.True(t, dead(pid))
		r.ready(next)
	})
	t.Run("after a restart of the node", func(t *testing.T) {
		r := newRig(t, inDir)
		r.ports.epoch = 5
		err := r.node.StartRank(t.Context(), r.order(demo(app.Independent, 1, "")))
		require.ErrorIs(t, err, node.ErrStaleEpoch)
		require.EqualError(t, err, "unit demo/0/0: stale epoch: epoch 5 was asked for, 6 has been seen")
	})
	t.Run("what an earlier process started", func(t *testing.T) {
		r := newRig(t, inDir)
		r.ports.epoch = 6
		m := r.order(demo(app.Independent, 1, ""))
		err := r.node.StartRank(t.Context(), m)
		require.ErrorIs(t, err, node.ErrStaleEpoch)
		require.EqualError(t, err,
			"unit demo/0/0: stale epoch: epoch 6 was started by an earlier process of this node")
		r.stop(m, 0)
		assert.Equal(t, uint64(6), r.expect(msg.UnitGone).Epoch)
		r.ports.epoch = 7
		m.Epoch = 7
		require.NoError(t, r.node.StartRank(t.Context(), m))
		r.ready(m)
		r.stop(m, 0)
		r.expect(msg.UnitGone, msg.UnitKilling)
		require.NoError(t, r.node.StartRank(t.Context(), m)) // known and gone: repeats Gone
		r.expect(msg.UnitGone)
	})
	t.Run("a torn file stops the node", func(t *testing.T) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "epochs.json"), []byte("{"), 0o600))
		_, err := node.New(node.Config{DataDir: dir, Log: slog.New(slog.DiscardHandler), Rand: rand.Uint64})
		require.ErrorContains(t, err, "epochs.json: unexpected end of JSON input")
	})
}

func TestAStopOfAUnitThatIsNotHereIsGone(t *testing.T) {
	r := newRig(t)
	require.NoError(t, r.node.StopRank(t.Context(), &msg.StopRank{Unit: "x/0", Epoch: 3, Reason: "deleted"}))
	e := r.expect(msg.UnitGone)
	assert.True(t, e.Asked)
	assert.Equal(t, uint64(3), e.Epoch)
	// a newer order has overtaken it
	err := r.node.StartRank(t.Context(), &msg.StartRank{
		App: demo(app.Lockstep, 1, ""), Unit: "x/0",
		Epoch: 3,
	})
	require.EqualError(t, err, "unit x/0: stale epoch: epoch 3 has ended on this node")
}

func TestAStopWhileStarting(t *testing.T) {
	r := newRig(t)
	m := r.start(demo(app.Independent, 1, "hang"))
	r.eventually("engine runs", func() bool { s := r.statuses(m); return len(s) == 1 && s[0].PID > 0 })
	pid := r.statuses(m)[0].PID
	r.stop(m, time.Hour)
	e := r.expect(msg.UnitGone, msg.UnitStarted, msg.UnitKilling)
	assert.True(t, e.Asked)
	assert.Equal(t, "deleted", e.Reason)
	assert.True(t, dead(pid))
}

func TestADrainWaitsForRequestsAndIsCutAtItsDeadline(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	m := r.start(demo(app.Independent, 1, ""))
	var box msg.Mailbox
	cancel := r.hub.Subscribe(sink(func(rec *msg.Record) {
		if rec.Kind == msg.RecSnapshot && rec.Accepting {
			box = rec.Snapshot.Mailbox
		}
	}))
	defer cancel()
	r.ready(m)
	reply := make(chan msg.AdmitReply, 1)
	require.NoError(t, box.TrySend(&msg.Admit{Epoch: 1, ReqID: 1, Reply: reply}))
	ticket := (<-reply).Ticket
	require.NotZero(t, ticket.ID)
	r.stop(m, time.Hour)
	r.expect(msg.UnitDraining)
	assert.Equal(t, "draining", r.statuses(m)[0].Phase)
	select {
	case e := <-r.events:
		t.Fatalf("did not wait for the request: %+v", e)
	case <-time.After(50 * time.Millisecond):
	}
	r.stop(m, 0)                                              // an earlier deadline
	r.expect(msg.UnitGone, msg.UnitDraining, msg.UnitKilling) // each order is answered
	r.mu.Lock()
	defer r.mu.Unlock()
	assert.Contains(t, r.causes, "drained")
}

type sink func(r *msg.Record)

func (s sink) Deliver(r *msg.Record) { s(r) }

func TestNothingIsLeftAfterClose(t *testing.T) {
	r := newRig(t)
	a := r.start(demo(app.Lockstep, 2, "stubborn,orphan"))
	r.ready(a)
	var pids []int
	for _, s := range r.statuses(a) {
		pids = append(pids, group(s.PID)...)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // already done
	require.NoError(t, r.node.Close(ctx, time.Hour))
	require.NoError(t, r.node.Close(ctx, time.Hour))
	for _, pid := range pids {
		assert.True(t, dead(pid))
	}
	require.Error(t, r.node.StartRank(t.Context(), r.order(a.App)))
}
