package controller

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestRingKeepsTheLastThousand(t *testing.T) {
	r := newRing()
	for range 3 * eventRing {
		r.add(Event{})
	}
	got := r.since(0)
	require.Len(t, got, eventRing)
	assert.Equal(t, uint64(2*eventRing+1), got[0].Seq)
	assert.Equal(t, uint64(3*eventRing), got[eventRing-1].Seq)
	assert.Len(t, r.since(3*eventRing-5), 5)
}
