package main

import (
	"context"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The first signal asks to finish, a duplicate of it counts once, the second stops at once.
func TestSignals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		i := newInterrupts()
		in, done := make(chan os.Signal, 4), make(chan struct{})
		defer close(done)
		go i.count(in, done)
		ctx, cancel := i.context(context.Background())
		defer cancel()

		in <- os.Interrupt
		in <- os.Interrupt // the copy that the process group gets
		synctest.Wait()
		require.ErrorIs(t, context.Cause(ctx), errInterrupted)
		assert.False(t, closed(i.second))

		time.Sleep(2 * duplicateWindow)
		in <- os.Interrupt
		synctest.Wait()
		assert.True(t, closed(i.second))
	})
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
