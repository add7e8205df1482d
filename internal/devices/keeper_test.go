package devices

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/test/parallel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// machine is two GPUs that a test changes.
type machine struct {
	mu    sync.Mutex
	used  [2]int
	gone  [2]bool
	apps  string
	err   error
	calls int
	hang  bool
}

func (m *machine) set(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
}

func (m *machine) run(ctx context.Context, name string, args ...string) ([]byte, error) {
	m.mu.Lock()
	hang := m.hang
	m.calls++
	m.mu.Unlock()
	if hang {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case name != nvidiaSMI:
		return nil, exec.ErrNotFound
	case m.err != nil:
		return nil, m.err
	case args[0] == "topo":
		return nil, errExit
	case args[0] != "--query-gpu=index,uuid,name,memory.total,memory.used,driver_version":
		return []byte(m.apps), nil
	}
	out := ""
	for i, used := range m.used {
		if !m.gone[i] {
			out += fmt.Sprintf("%d, GPU-%d, H, 81920, %d, 550\n", i, i, used)
		}
	}
	return []byte(out), nil
}

// open opens a Keeper of the machine inside a bubble.
func open(t *testing.T, m *machine, cfg KeeperConfig) *Keeper {
	t.Helper()
	cfg.Run, cfg.Log = m.run, slog.New(slog.DiscardHandler)
	return Open(t.Context(), cfg)
}

func TestOffered(t *testing.T) {
	text := func(s string) *string { return &s }
	for name, c := range map[string]struct {
		cfg  KeeperConfig
		want []int
	}{
		"auto":                   {KeeperConfig{}, []int{0, 1}},
		"a list":                 {KeeperConfig{Offer: []int{1}}, []int{1}},
		"also what is not there": {KeeperConfig{Offer: []int{0, 5}}, []int{0, 5}},
		"visible by number":      {KeeperConfig{Visible: text("1")}, []int{1}},
		"visible by UUID":        {KeeperConfig{Visible: text("GPU-0,7")}, []int{0}},
		"none is visible":        {KeeperConfig{Visible: text("")}, nil},
		"a list wins":            {KeeperConfig{Offer: []int{0}, Visible: text("")}, []int{0}},
	} {
		k := open(t, &machine{}, c.cfg)
		assert.Equal(t, c.want, k.Offered(), name)
	}
	k := open(t, &machine{}, KeeperConfig{Offer: []int{0, 5, 6}})
	assert.Equal(t, "--gpus names devices that are not found: [5 6] (leave these out)", k.Trouble())
}

func TestADeviceThatVanishes(t *testing.T) {
	for _, offer := range [][]int{nil, {0, 1}} {
		synctest.Test(t, func(t *testing.T) {
			m := &machine{}
			k := open(t, m, KeeperConfig{Offer: offer})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go k.Run(ctx)
			assert.Empty(t, k.Trouble())
			m.set(func() { m.gone[1] = true })
			time.Sleep(DefaultReread + time.Second)
			assert.Equal(t, []int{0}, k.Offered())
			assert.Equal(t, "device 1 (H, GPU-1) is not listed any more and gets no ranks (look for Xid "+
				"errors in `dmesg`; a reset or a reboot may bring it back)", k.Trouble())
			require.EqualError(t, k.Check(ctx, "a", []int{0, 1}),
				"device 1 (GPU-1) is not there any more: look at `dmesg` for Xid errors")
			require.NoError(t, k.Check(ctx, "a", []int{0}))
			m.set(func() { m.gone[1] = false })
			time.Sleep(DefaultReread + time.Second)
			assert.Equal(t, []int{0, 1}, k.Offered())
			assert.Empty(t, k.Trouble())
		})
	}
}

// TestAFailureKeepsTheLastReading: what cannot be read has not changed, and no start fails because of it.
func TestAFailureKeepsTheLastReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{}
		k := open(t, m, KeeperConfig{})
		m.set(func() { m.err = errors.New("exit status 9") })
		require.NoError(t, k.Check(t.Context(), "a", []int{0}))
		assert.Equal(t, []int{0, 1}, k.Offered())
		assert.Contains(t, k.Trouble(), "the devices cannot be read: nvidia-smi: exit status 9")
		assert.Empty(t, k.Held(t.Context(), "a", []int{0}))
		m.set(func() { m.err = nil; m.used[0] = 60000 })
		assert.Empty(t, k.Held(t.Context(), "a", []int{0}), "it is not tried again at once")
		time.Sleep(DefaultReread)
		assert.NotEmpty(t, k.Held(t.Context(), "a", []int{0}))
	})
}

// TestAProgramThatHangs: it holds up the node's start and one start of an engine, for the bound of a reading.
func TestAProgramThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{hang: true}
		began := time.Now()
		k := open(t, m, KeeperConfig{Offer: []int{0}})
		assert.Equal(t, DefaultProbe, time.Since(began))
		assert.Equal(t, []int{0}, k.Offered())
		assert.Contains(t, k.Trouble(), "nvidia-smi: no answer within 10s")

		m.set(func() { m.hang = false })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go k.Run(ctx)
		time.Sleep(DefaultReread + time.Second)
		assert.Empty(t, k.Trouble(), "it is read again")
		m.set(func() { m.hang = true })
		began = time.Now()
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() { assert.NoError(t, k.Check(ctx, "a", []int{0})) })
		}
		all.Wait()
		assert.LessOrEqual(t, time.Since(began), DefaultProbe)
	})
}

// TestManyStartsShareAReading: each reading begins after the question that it answers.
func TestManyStartsShareAReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{}
		slow := func(ctx context.Context, name string, args ...string) ([]byte, error) {
			time.Sleep(time.Second)
			return m.run(ctx, name, args...)
		}
		k := Open(t.Context(), KeeperConfig{Run: slow, Log: slog.New(slog.DiscardHandler)})
		m.calls = 0
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() { assert.NoError(t, k.Check(t.Context(), "a", []int{0})) })
		}
		all.Wait()
		assert.LessOrEqual(t, m.calls, 2*2, "two readings of two commands")
	})
}

func TestMemoryThatIsStillHeld(t *testing.T) {
	m := &machine{used: [2]int{400, 400}}
	k := open(t, m, KeeperConfig{})
	ask := func(used int, apps string) string {
		m.set(func() { m.used[0], m.apps = used, apps })
		return k.Held(t.Context(), "a", []int{0, 1})
	}
	assert.Empty(t, ask(400, ""))
	assert.Empty(t, ask(912, ""), "the driver keeps some")
	assert.Equal(t, "device 0: 0.9 of 80.0 GiB are in use (0.4 before the start)", ask(913, ""))
	assert.Equal(t,
		"device 0: 58.6 of 80.0 GiB are in use by process 999999999 with 56.6 GiB (0.4 before the start)",
		ask(60000, "GPU-0, 999999999, 58000\n"))
	assert.Contains(t, ask(60000, fmt.Sprintf("GPU-0, %d, 58000\n", os.Getpid())),
		fmt.Sprintf("process %d (", os.Getpid()))
	require.NoError(t, k.Check(t.Context(), "a", []int{0}), "somebody else uses it: the engine will see")
	assert.Empty(t, ask(60100, ""), "an engine that comes and goes then leaves what was there before")
	assert.Empty(t, k.Held(t.Context(), "a", []int{7}), "a device that was only declared")
}

// TestAnAdoptedEngineCountsAsNothingBefore: what listed processes hold at the first reading may be an engine
// of this node's earlier process.
func TestAnAdoptedEngineCountsAsNothingBefore(t *testing.T) {
	m := &machine{used: [2]int{60400, 0}, apps: "GPU-0, 12, 60000\n"}
	k := open(t, m, KeeperConfig{Granted: func() []Grant { return []Grant{{Unit: "a", Devices: []int{0}}} }})
	assert.Empty(t, k.Trouble())
	assert.NotEmpty(t, k.Held(t.Context(), "a", []int{0}))
	m.set(func() { m.used[0], m.apps = 500, "" })
	assert.Empty(t, k.Held(t.Context(), "a", []int{0}))
}

func TestMemoryTakenByOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{used: [2]int{41000, 300}, apps: "GPU-0, 999999999, 40000\n"}
		var busy atomic.Bool
		k := open(t, m, KeeperConfig{Granted: func() []Grant {
			if !busy.Load() {
				return nil
			}
			return []Grant{{Unit: "a", Devices: []int{0}}}
		}})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go k.Run(ctx)
		want := "device 0: 40.0 of 80.0 GiB are in use by process 999999999 with 39.1 GiB, and no rank of " +
			"this node has it (end what uses it, or leave the device out of --gpus)"
		assert.Equal(t, want, k.Trouble())
		busy.Store(true)
		assert.Empty(t, k.Trouble(), "a rank of this node has it")
		time.Sleep(DefaultReread + time.Second)
		busy.Store(false)
		assert.Empty(t, k.Trouble(), "at the last reading a rank had it")
		time.Sleep(DefaultReread)
		assert.Equal(t, want, k.Trouble())
		assert.Equal(t, []int{0, 1}, k.Offered(), "it stays: who offers it decides")
	})
}

// script writes a program that the Runner of this machine finds first.
func script(t *testing.T, name, text string) {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, parallel.WriteProgram(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text)))
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
}

func TestCommandsOfThisMachine(t *testing.T) {
	run := NewRunner()
	_, err := run(t.Context(), "no-such-program-of-dpserve")
	require.ErrorIs(t, err, exec.ErrNotFound)

	script(t, "probe-says", `echo "$1 $LC_ALL"; echo why >&2; exit 3`)
	out, err := run(t.Context(), "probe-says", "this")
	assert.Equal(t, "this C\n", string(out))
	require.EqualError(t, err, "exit status 3: why")

	script(t, "probe-floods", "exec yes flood")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err = run(ctx, "probe-floods")
	require.EqualError(t, err, "it prints more than 1048576 bytes")
	assert.Len(t, out, maxOutput)
	assert.True(t, bytes.HasPrefix(out, []byte("flood\n")))
}

// TestACommandThatHangsIsKilled: with what it started.
func TestACommandThatHangsIsKilled(t *testing.T) {
	pid := filepath.Join(t.TempDir(), "pid")
	script(t, "probe-hangs", "trap '' TERM; sleep 600 & echo $! > "+pid+"; wait; sleep 600")
	run := NewRunner()
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		for {
			if b, err := os.ReadFile(pid); err == nil && len(b) > 1 {
				break
			}
			time.Sleep(time.Millisecond)
		}
		cancel(errors.New("no answer"))
	}()
	_, err := run(ctx, "probe-hangs")
	require.EqualError(t, err, "no answer")
	script(t, "probe-answers", "echo yes")
	out, err := run(t.Context(), "probe-answers")
	require.NoError(t, err, "the next one may run")
	assert.Equal(t, "yes\n", string(out))
}
