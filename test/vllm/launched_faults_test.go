package vllm

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// testFrontKilled: the process that answers HTTP dies, and its core lives on with the ports of its events.
func testFrontKilled(t *testing.T, a *launched) {
	a.killed(t, "front process of rank 0 killed", 0, func(l *life) int { return l.front })
}

// testCoreKilled: the process that computes dies. The front answers with errors for a moment and exits with
// code 0.
func testCoreKilled(t *testing.T, a *launched) {
	a.killed(t, "core of rank 1 killed", 1, func(l *life) int {
		core := slices.IndexFunc(l.processes, func(pid int) bool {
			return strings.Contains(title(pid), "EngineCore")
		})
		require.NotEqual(t, -1, core, "the engine's core process among %s", describe(l.processes))
		return l.processes[core]
	})
}

// killed kills a process of a rank under load. Other ranks serve meanwhile, the rank comes back with its
// number and the next epoch, and nothing is left of its engine.
func (a *launched) killed(t *testing.T, what string, n int, victim func(*life) int) {
	t.Helper()
	old, other := a.alive(0, n), a.alive(0, 1-n)
	c := a.clients()
	a.some(c, 2*clientsAtOnce)
	pid := victim(&old)
	began := time.Now()
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	now := a.back(old)
	t.Logf("%s: back after %s in epoch %d, as process %d after %d", what, since(began), now.epoch, now.front,
		old.front)
	a.gone(old, &now)
	a.some(c, 2*clientsAtOnce)
	c.end(t, what, clientsAtOnce) // those that the engine was writing
	assert.Equal(t, other.incarnation, a.alive(0, 1-n).incarnation, "the other rank is the same process")
	a.dp.Quiet()
}

// testRollingUpdate: a new value of a flag restarts every rank, one after the other, and clients do not
// notice.
func testRollingUpdate(t *testing.T, a *launched) {
	old := []life{a.alive(0, 0), a.alive(0, 1)}
	c := a.clients()
	a.some(c, clientsAtOnce)
	const was, now = "max_num_seqs: 64", "max_num_seqs: 48"
	file := exampleApp(t)
	require.Equal(t, 1, strings.Count(file, was), "%s says how many requests a rank computes", exampleFile)
	began := time.Now()
	a.dp.Deploy(strings.Replace(file, was, now, 1))
	least := len(old)
	a.wait("every rank is another process", func() error {
		st, err := a.status()
		if err != nil {
			return err
		}
		least = min(least, st.Ready)
		for i := range old {
			k := rankOf(&st, 0, i)
			if k.Incarnation == old[i].incarnation || k.Incarnation == "" {
				return fmt.Errorf("rank 0/%d is still %s", i, k.Incarnation)
			}
		}
		return a.allReady(len(old))
	})
	t.Logf("rolling update: %s for %d ranks, at least %d ready", since(began), len(old), least)
	assert.Positive(t, least, "one rank serves while the other one starts")
	for i := range old {
		fresh := a.alive(0, i)
		assert.Contains(t, title(fresh.front), "--max-num-seqs\x0048")
		a.gone(old[i], &fresh)
	}
	a.some(c, clientsAtOnce)
	c.end(t, "rolling update", 0)
	a.dp.Quiet()
}

// longTokens is an answer of some seconds.
const longTokens = 1500

// testDrain: SIGTERM lets streams end, then engines, and leaves no process.
func testDrain(t *testing.T, a *launched) {
	ranks := []life{a.alive(0, 0), a.alive(0, 1)}
	const streams = 8
	got := make([]streamed, streams)
	name := a.model()
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	var all sync.WaitGroup
	for i := range got {
		all.Go(func() {
			ids := randomIDs(rand.New(rand.NewPCG(uint64(i), 6)), 40)
			got[i] = stream(ctx, a.dp.HTTP, "/v1/completions", map[string]any{
				"model": name, "prompt": ids, "stream": true, "max_tokens": longTokens, "ignore_eos": true,
			})
		})
	}
	a.wait("the streams run", func() error {
		n := 0
		ranks := a.ranks()
		for i := range ranks {
			n += ranks[i].InFlight
		}
		if n < streams {
			return fmt.Errorf("%d streams run", n)
		}
		return nil
	})
	began := time.Now()
	a.dp.Signal(syscall.SIGTERM)
	all.Wait()
	drained := since(began)
	whole := 0
	for i := range got {
		if assert.True(t, got[i].whole(), "stream %d: %+v", i, got[i].err) {
			whole++
		}
	}
	select {
	case <-a.dp.Exited():
	case <-time.After(endTime):
		t.Fatalf("dpserve does not end; output:\n%s", a.dp.Output())
	}
	t.Logf("SIGTERM: %d of %d streams whole after %s, dpserve gone after %s", whole, streams, drained,
		since(began))
	assert.Zero(t, a.dp.ExitCode())
	assert.Empty(t, describe(a.left()), "processes left")
	for i := range ranks {
		a.gone(ranks[i], nil)
	}
}

// restartCommand is the command that lets dpserve execute its binary anew and keep its engines.
const restartCommand = "restart"

// testRestartOfDpserve: dpserve is restarted under load, and no engine: the same processes have the same
// incarnations and still have their caches.
func testRestartOfDpserve(t *testing.T, a *launched) {
	if help, err := a.command("help"); err != nil || !strings.Contains(help, "\n  "+restartCommand+" ") {
		t.Skipf("dpserve has no command %s: %v", restartCommand, err)
	}
	old := []life{a.alive(0, 0), a.alive(0, 1)}
	ids := randomIDs(rand.New(rand.NewPCG(8, 8)), cachedPrompt)
	_, err := complete(t.Context(), a.dp.HTTP, ids, 4, "")
	require.NoError(t, err)
	c := a.clients()
	a.some(c, 2*clientsAtOnce)
	began := time.Now()
	out, err := a.command(restartCommand)
	require.NoError(t, err, out)
	a.wait("every rank is ready again", func() error { return a.allReady(len(old)) })
	t.Logf("dpserve restart: the ranks are ready again after %s", since(began))
	a.some(c, 2*clientsAtOnce)
	c.cancel() // one node: requests at its endpoint fail while it executes its binary
	c.work.Wait()
	t.Logf("under it: %d streams whole, %d refused, %d cut; the only node is also the only endpoint", c.whole,
		c.refused, c.cut)
	for i := range old {
		now := a.alive(0, i)
		assert.Equal(t, old[i].front, now.front, "the engine's process")
		assert.Equal(t, old[i].epoch, now.epoch)
		assert.Equal(t, old[i].incarnation, now.incarnation)
	}
	again, err := complete(t.Context(), a.dp.HTTP, ids, 4, "")
	require.NoError(t, err)
	t.Logf("the prompt from before it: %d tokens cached, predicted %d", again.Cached, again.Predicted)
	assert.Positive(t, again.Cached, "the engines have kept their caches, and the router knows it")
	a.dp.Quiet()
}

// command runs a command of dpserve against the node.
func (a *launched) command(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, harness.Binary(a.t), args...)
	cmd.Env = append(os.Environ(), "DPSERVE_ADDR="+a.dp.Admin)
	out, err := cmd.CombinedOutput()
	return string(out), err
}
