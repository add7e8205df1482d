package node

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// undying is an engine in uninterruptible sleep, for example in a hanging driver: no signal ends it.
type undying struct{ exited chan struct{} }

func (*undying) PID() int                  { return 4711 }
func (p *undying) Exited() <-chan struct{} { return p.exited }
func (*undying) Exit() Exit                { return Exit{} }
func (*undying) Terminate()                {}
func (*undying) Kill()                     {}
func (*undying) Adopt(_, _ io.Writer)      {}
func (*undying) Release()                  {}
func (*undying) Memory() uint64            { return 0 }
func (*undying) Detach()                   {}

func (p *undying) Held() string {
	if closed(p.exited) {
		return ""
	}
	return "process 4711"
}

// undyingEngines launches an undying engine for each start.
type undyingEngines struct{ exited chan struct{} }

func (l *undyingEngines) Start(context.Context, LaunchOrder, io.Writer, io.Writer) (Process, error) {
	return &undying{l.exited}, nil
}

func (*undyingEngines) Found() []Found       { return nil }
func (*undyingEngines) Extend(time.Duration) {}

// withUndying runs f in a bubble whose node has one unit with such an engine. f closes the node.
func withUndying(t *testing.T, f func(t *testing.T, b *bubble, exit func())) {
	l := &undyingEngines{}
	inBubble(t, func(c *Config) {
		l.exited = make(chan struct{})
		c.Launcher = l
	}, func(t *testing.T, b *bubble) {
		b.serving("demo/0/0", 1)
		f(t, b, func() { close(l.exited) })
		b.node.left = nil // checked
	})
}

// HF41: Close ends after the time for killing and verifying, and its error names what is left.
func TestCloseEndsBesideAnEngineThatNoSignalEnds(t *testing.T) {
	withUndying(t, func(t *testing.T, b *bubble, _ func()) {
		began := time.Now()
		err := b.node.Close(t.Context(), 0)
		require.Error(t, err)
		assert.Equal(t, problem.Internal, problem.CodeOf(err))
		assert.Equal(t, "engines were killed and did not end: demo/0/0: process 4711", err.Error())
		assert.InDelta(t, DefaultKillGrace+DefaultVerifyNamed, time.Since(began), float64(time.Second))
		assert.NotContains(t, b.leader.kinds("demo/0/0"), "1:gone",
			"it is not gone: the leader must not grant it elsewhere yet")
		assert.Contains(t, b.leader.reason("demo/0/0"), "still held after 10s: process 4711")
	})
}

// HF41: Close's context ends.
func TestASecondSignalShortensTheWaitForAnEngineThatNoSignalEnds(t *testing.T) {
	withUndying(t, func(t *testing.T, b *bubble, _ func()) {
		ctx, cancel := context.WithCancel(t.Context())
		began := time.Now()
		time.AfterFunc(time.Second, cancel)
		require.Error(t, b.node.Close(ctx, time.Hour))
		assert.InDelta(t, time.Second+DefaultKillGrace, time.Since(began), float64(time.Second))
	})
}

// HF41: This holds while the node runs; a newer epoch waits for the old one.
func TestAnEngineThatNoSignalEndsIsNamedAndItsUnitIsNotGone(t *testing.T) {
	t.Parallel()
	withUndying(t, func(t *testing.T, b *bubble, exit func()) {
		require.NoError(t, b.node.StopRank(t.Context(),
			&msg.StopRank{Unit: "demo/0/0", Epoch: 1, Reason: "deleted"}))
		time.Sleep(time.Hour)
		assert.Equal(t, "deleted; still held after 10s: process 4711", b.leader.reason("demo/0/0"))
		assert.Equal(t, []string{"1:started", "1:ready", "1:killing", "1:killing"},
			b.leader.kinds("demo/0/0")[:4])
		assert.Equal(t, state.Killing, b.phase("demo/0/0"))
		require.NoError(t, b.start("demo/0/0", 2))
		time.Sleep(time.Hour)
		assert.NotContains(t, b.leader.kinds("demo/0/0"), "2:ready")
		exit()
		time.Sleep(time.Minute)
		assert.Contains(t, b.leader.kinds("demo/0/0"), "1:gone")
	})
}

// The older epoch is the one that is left.
func TestCloseNamesTheOlderEpochThatDoesNotEnd(t *testing.T) {
	withUndying(t, func(t *testing.T, b *bubble, _ func()) {
		require.NoError(t, b.start("demo/0/0", 2))
		time.Sleep(time.Minute)
		err := b.node.Close(t.Context(), 0)
		require.ErrorContains(t, err, "demo/0/0: process 4711")
	})
}

// The node reports that it stops and refuses starts while it drains.
func TestANodeThatStopsSaysSoAndStartsNothing(t *testing.T) {
	withUndying(t, func(t *testing.T, b *bubble, exit func()) {
		assert.False(t, b.leader.last().Stopping)
		ended := make(chan error, 1)
		go func() { ended <- b.node.Close(t.Context(), 0) }()
		time.Sleep(time.Second)
		assert.True(t, b.leader.last().Stopping)
		before := b.leader.renewals()
		require.ErrorIs(t, b.start("demo/0/1", 1), msg.ErrNodeStopping)
		require.NoError(t, b.node.StopRank(t.Context(), &msg.StopRank{Unit: "demo/0/0", Epoch: 1}),
			"an order to stop is taken")
		time.Sleep(50 * time.Millisecond)
		assert.Greater(t, b.leader.renewals(), before, "and answered")
		exit()
		require.NoError(t, <-ended)
		assert.Contains(t, b.leader.kinds("demo/0/0"), "1:gone")
	})
}

// The next process does not take such an end for a crash.
func TestANodeKnowsThatTheProcessBeforeItWasToldToEnd(t *testing.T) {
	dir := t.TempDir()
	runs := func() (after bool) {
		inBubble(t, func(c *Config) { c.DataDir = dir },
			func(_ *testing.T, b *bubble) { after = b.leader.last().AfterStop })
		return after
	}
	assert.False(t, runs(), "there was none")
	assert.True(t, runs())
	assert.True(t, runs())
	require.NoError(t, os.Remove(filepath.Join(dir, stopFile)), "the crash: nobody left the mark")
	assert.False(t, runs())
}
