//go:build !dpserve_next

package server

import (
	"context"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
)

// These functions do nothing in this build. next_version.go replaces them in the build that stands for the
// next version in the test of upgrades.

func probeNextVersion(context.Context, *Node) {}

func addNextVersionFields(*Node, *state.Node) {}

func withNextVersionEvents(r *msg.NodeReport) *msg.NodeReport { return r }
