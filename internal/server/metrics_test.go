package server

import (
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
)

// A scrape does not wait for a disk that hangs, and the next ones start no call beside the one that it holds.
func TestADiskThatHangsIsAskedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int32
		answer := make(chan struct{})
		d := diskSpace{ask: func(string) (free, size uint64, err error) {
			calls.Add(1)
			<-answer
			return 1, 2, nil
		}}
		for range 3 {
			free, size := d.read("/data")
			assert.Zero(t, free+size)
			assert.EqualValues(t, 1, calls.Load())
		}
		close(answer)
		synctest.Wait()
		free, size := d.read("/data")
		assert.Equal(t, []uint64{1, 2}, []uint64{free, size})
	})
}
