//go:build !dpserve_next

package wiring

import (
	"context"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// What next_version.go adds to the build that stands for the next version in the test of upgrades. Here there is nothing.

func (n *Node) next(context.Context) {}

func (n *Node) describeNext(*state.Node) {}

func nextReport(r *msg.NodeReport) *msg.NodeReport { return r }
