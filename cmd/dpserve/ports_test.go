package main

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/wiring"
)

// TestSlicePorts: two ups at once never share a slice, and a slice comes back.
func TestSlicePorts(t *testing.T) {
	a, b, again := wiring.DefaultConfig(), wiring.DefaultConfig(), wiring.DefaultConfig()
	releaseA := slicePorts(context.Background(), &a)
	defer releaseA()
	releaseB := slicePorts(context.Background(), &b)
	require.NoError(t, a.Validate())
	require.NoError(t, b.Validate())
	if b.PortRange == wiring.DefaultPortRange {
		t.Skip("every slice is taken on this machine")
	}
	assert.NotEqual(t, a.PortRange, b.PortRange)
	releaseB()
	defer slicePorts(context.Background(), &again)()
	assert.NotEqual(t, a.PortRange, again.PortRange)
}
