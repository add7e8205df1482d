package ingress

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestBudgetAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := newBudget(10 * time.Second)
		var requests, retries []time.Duration
		now := time.Duration(0)
		within := func(list []time.Duration, window time.Duration) (n int) {
			for _, at := range list {
				if now-at < window {
					n++
				}
			}
			return n
		}
		for range rapid.IntRange(1, 400).Draw(t, "steps") {
			now += time.Duration(rapid.IntRange(0, 400).Draw(t, "ms")) * time.Millisecond
			if rapid.IntRange(0, 3).Draw(t, "kind") > 0 {
				b.request(now)
				requests = append(requests, now)
				continue
			}
			if b.draw(now) {
				retries = append(retries, now)
			}
			require.LessOrEqual(t, within(retries, 10*time.Second),
				max(within(requests, 11*time.Second)/10, 20))
		}
	})
}

func TestBudgetRefills(t *testing.T) {
	b := newBudget(10 * time.Second)
	for range 20 {
		require.True(t, b.draw(time.Second))
	}
	assert.False(t, b.draw(5*time.Second))
	assert.True(t, b.draw(13*time.Second))
	for range 1000 {
		b.request(14 * time.Second)
	}
	for range 99 {
		assert.True(t, b.draw(15*time.Second))
	}
	assert.False(t, b.draw(15*time.Second))
}
