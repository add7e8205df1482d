package diskfile_test

import (
	"errors"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
)

// TestAwait: the calls' error is returned; after the limit the error names the data dir, and a call that
// hangs goes on alone.
func TestAwait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		path := filepath.Join(dir, "state.json")
		write := func() error { return diskfile.Replace(path, []byte("new")) }
		require.NoError(t, diskfile.Await(dir, time.Second, write))
		errFull := errors.New("the disk is full")
		require.Equal(t, errFull, diskfile.Await(dir, time.Second, func() error { return errFull }))

		answers := make(chan struct{})
		began := time.Now()
		err := diskfile.Await(dir, time.Minute, func() error { <-answers; return nil })
		assert.Equal(t, time.Minute, time.Since(began))
		require.ErrorIs(t, err, diskfile.ErrHangs)
		assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
		require.EqualError(t, err,
			"data dir "+dir+": its disk does not answer: a call has not returned for 1m0s")
		close(answers)
	})
}
