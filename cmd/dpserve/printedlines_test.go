package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// A number that goes up and down is no change of a line: it is printed again after 10 s at the earliest.
func TestNumbersAreNoChangeOfALine(t *testing.T) {
	seen := printedLines{}
	for _, c := range []struct {
		second      int64
		state, text string
		isNew       bool
	}{
		{0, "ready epoch 1", "", true},
		{1, "ready epoch 1", "", false},
		{1, "ready epoch 2", "", true},
		{2, "draining epoch 2", "2 requests in flight", true},
		{3, "draining epoch 2", "1 request in flight", false},
		{4, "draining epoch 2", "0 requests in flight", false},
		{4, "unreachable epoch 2", "node gpu-1 is silent for 1s", true},
		{5, "unreachable epoch 2", "node gpu-1 is silent for 2s", false},
		{6, "unreachable epoch 2", "node gpu-2 is silent for 2s", true},
		{15, "unreachable epoch 2", "node gpu-2 is silent for 11.5s", false},
		{16, "unreachable epoch 2", "node gpu-2 is silent for 12.5s", true},
		{17, "unreachable epoch 2", "node gpu-2 is silent for 12.5s", false},
		{60, "unreachable epoch 2", "node gpu-2 is silent for 12.5s", false},
	} {
		got := seen.isNew(time.Unix(c.second, 0), "demo/0/0", c.state, c.text)
		assert.Equal(t, c.isNew, got, "%d s: %s %s", c.second, c.state, c.text)
	}
}
