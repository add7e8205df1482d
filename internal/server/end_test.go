package server

import (
	"context"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
)

// HF44: A certificate, or a removal, is written to a disk that hangs.
func TestCloseEndsOverADiskThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, kill := context.WithCancel(t.Context())
		n := &Node{
			cfg: Config{DataDir: "/data"}, probes: &http.Transport{},
			life: lifetime{ctx: ctx, kill: kill},
		}
		written := make(chan struct{})
		n.life.writers.Go(func() { <-written })
		began := time.Now()
		err := n.closeAll()
		assert.Equal(t, diskfile.Grace, time.Since(began))
		require.ErrorIs(t, err, diskfile.ErrHangs)
		require.ErrorContains(t, err, "data dir /data: its disk does not answer")
		assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
		close(written)
		require.NoError(t, n.closeAll())
	})
}
