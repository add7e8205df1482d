package pause_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/pause"
)

// TestFor: a pause lasts its time, or until its context ends, whose cause it returns.
func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		began := time.Now()
		require.NoError(t, pause.For(ctx, time.Hour))
		assert.Equal(t, time.Hour, time.Since(began))

		lost := errors.New("the node is gone")
		time.AfterFunc(time.Second, func() { cancel(lost) })
		require.ErrorIs(t, pause.For(ctx, time.Hour), lost)
		assert.Equal(t, time.Hour+time.Second, time.Since(began))
	})
}
