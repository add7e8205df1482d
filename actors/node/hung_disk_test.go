package node

import (
	"context"
	"io"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// withHungDisk runs f with a node that serves demo/0/0. Its disk hangs while it takes the order to start
// demo/0/1, whose answer comes over started.
func withHungDisk(t *testing.T, f func(t *testing.T, b *bubble, end func(), started <-chan error)) {
	t.Helper()
	dir := t.TempDir()
	var hangs atomic.Bool
	var answers chan struct{}
	inBubble(t, func(c *Config) {
		c.DataDir, answers = dir, make(chan struct{})
		c.Replace = func(path string, data []byte) error {
			if hangs.Load() {
				<-answers
			}
			return diskfile.Replace(path, data)
		}
	}, func(t *testing.T, b *bubble) {
		b.serving("demo/0/0", 1)
		hangs.Store(true)
		end := sync.OnceFunc(func() { hangs.Store(false); close(answers) })
		defer end()
		started := make(chan error, 1)
		go func() { started <- b.start("demo/0/1", 1) }()
		synctest.Wait()
		f(t, b, end, started)
		end()
		synctest.Wait()
	})
}

// assertHangs checks the error of an end over a disk that hangs.
func (b *bubble) assertHangs(err error) {
	b.t.Helper()
	require.ErrorIs(b.t, err, diskfile.ErrHangs)
	assert.Equal(b.t, problem.Unavailable, problem.CodeOf(err))
	require.ErrorContains(b.t, err, "data dir "+b.node.cfg.DataDir+": its disk does not answer")
	b.node.closeParts = func() error { return nil } // checked
}

// HF44: The engine ends as ever. The start that waits for the disk begins nothing when the disk answers.
func TestCloseEndsOverADiskThatHangsWhileAnEpochIsWritten(t *testing.T) {
	withHungDisk(t, func(t *testing.T, b *bubble, end func(), started <-chan error) {
		began := time.Now()
		err := b.node.Close(t.Context(), 0)
		assert.Equal(t, diskfile.Grace, time.Since(began))
		assert.Contains(t, b.leader.kinds("demo/0/0"), "1:gone")

		require.EqualError(t, b.node.Close(t.Context(), 0), err.Error())
		b.assertHangs(err)
		assert.Equal(t, diskfile.Grace, time.Since(began), "the second time it does not wait again")
		end()
		require.Error(t, <-started)
		synctest.Wait()
		assert.Equal(t, 1, b.launched())
		assert.Empty(t, b.phase("demo/0/1"))
	})
}

// HF44: The next process goes on with the engine.
func TestDetachEndsOverADiskThatHangs(t *testing.T) {
	withHungDisk(t, func(t *testing.T, b *bubble, _ func(), _ <-chan error) {
		began := time.Now()
		b.node.Detach(t.Context(), time.Minute, time.Second)
		assert.LessOrEqual(t, time.Since(began), diskfile.Grace+time.Second)
		assert.True(t, b.procs[0].detached.Load())
		b.assertHangs(b.node.Close(t.Context(), 0))
	})
}

// HF44: Only starts wait for the disk.
func TestAKnownUnitIsStoppedWhileTheDiskHangs(t *testing.T) {
	withHungDisk(t, func(t *testing.T, b *bubble, end func(), started <-chan error) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.NoError(t, b.node.StopRank(ctx, &msg.StopRank{Unit: "demo/0/0", Epoch: 1, Reason: "deleted"}))
		time.Sleep(time.Minute)
		assert.Contains(t, b.leader.kinds("demo/0/0"), "1:gone")
		assert.Empty(t, b.leader.kinds("demo/0/1"), "its epoch is not on disk")

		stopped := make(chan error, 1)
		go func() { stopped <- b.node.StopRank(t.Context(), &msg.StopRank{Unit: "demo/0/1", Epoch: 1}) }()
		time.Sleep(time.Second)
		assert.Empty(t, stopped, "it comes after the start")
		end()
		require.NoError(t, <-started)
		require.NoError(t, <-stopped)
		time.Sleep(time.Minute)
		isReady := func(kind string) bool { return kind == "1:ready" }
		seen := slices.DeleteFunc(b.leader.kinds("demo/0/1"), isReady)
		assert.Equal(t, []string{"1:started", "1:killing", "1:gone"}, seen, "it may be ready in between")
	})
}

// hungLauncher writes a file before each engine, as the launchers of a node do.
type hungLauncher struct {
	*bubble
	answers chan struct{}
}

func (l hungLauncher) Start(ctx context.Context, o LaunchOrder, stdout, stderr io.Writer) (Process, error) {
	<-l.answers
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return l.bubble.Start(ctx, o, stdout, stderr)
}

// HF44: The unit is not reported gone: nobody knows what the launch will do.
func TestCloseEndsOverADiskThatHangsWhileAnEngineIsLaunched(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		answers := make(chan struct{})
		b.node.launcher = hungLauncher{b, answers}
		require.NoError(t, b.start("demo/0/0", 1))
		time.Sleep(time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		began := time.Now()
		time.AfterFunc(time.Second, cancel) // the second signal
		err := b.node.Close(ctx, time.Hour)
		require.ErrorIs(t, err, diskfile.ErrHangs)
		assert.Equal(t, time.Second+2*DefaultKillGrace+diskfile.Grace, time.Since(began))
		assert.Equal(t, state.Starting, b.phase("demo/0/0"))
		require.EqualError(t, b.node.Close(ctx, 0), err.Error())
		close(answers)
		synctest.Wait()
		assert.Zero(t, b.launched())
		b.node.stuck = nil // checked
	})
}

// HF44: What hangs is the removal of a folder.
func TestShimsCloseOverADiskThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &shims{dir: "/d", done: make(chan struct{}), log: slog.New(slog.DiscardHandler)}
		removed := make(chan struct{})
		l.releasing.Go(func() { <-removed })
		began := time.Now()
		l.close()
		assert.Equal(t, closeWait, time.Since(began))
		assert.True(t, closed(l.done))
		close(removed)
		l.close()
	})
}
