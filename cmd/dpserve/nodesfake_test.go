package main

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/api"
)

// fakeNodes is the part of the fake cluster that nodes are. Each call of Nodes takes the next picture of script; the last stays.
type fakeNodes struct {
	script   [][]msg.NodeStatus
	plan     msg.Plan
	drained  []string
	deadline *time.Duration
	undone   []string
	gone     []string
	mayLeave []error // answers to CheckLeave, one after the other; then nil
	tokens   []api.TokenRequest
	turning  [][]string // nodes that have not taken the key, look by look; the last stays

	onRotation func() // at the first look
}

func (f *fakeCluster) Version(context.Context) (api.BuildInfo, error) {
	return api.BuildInfo{Version: "v1", Node: "b"}, f.down
}

func (f *fakeCluster) Plan(_ context.Context, r api.DeployRequest) (msg.Plan, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.planned = append(f.planned, r)
	return f.nodes.plan, f.down
}

func (f *fakeCluster) Nodes(context.Context) ([]msg.NodeStatus, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.down != nil || len(f.nodes.script) == 0 {
		return nil, f.down
	}
	now := f.nodes.script[0]
	if len(f.nodes.script) > 1 {
		f.nodes.script = f.nodes.script[1:]
	}
	return now, nil
}

func (f *fakeCluster) Drain(_ context.Context, node string, deadline *time.Duration) error {
	f.nodes.drained, f.nodes.deadline = append(f.nodes.drained, node), deadline
	return f.down
}

func (f *fakeCluster) Undrain(_ context.Context, node string) error {
	f.nodes.undone = append(f.nodes.undone, node)
	return f.down
}

func (f *fakeCluster) CheckLeave(context.Context, string) error {
	if len(f.nodes.mayLeave) == 0 {
		return f.down
	}
	err := f.nodes.mayLeave[0]
	f.nodes.mayLeave = f.nodes.mayLeave[1:]
	return err
}

func (f *fakeCluster) RemoveNode(_ context.Context, node string) error {
	f.nodes.gone = append(f.nodes.gone, node)
	return f.down
}

func (f *fakeCluster) NewToken(_ context.Context, req api.TokenRequest) (api.Token, error) {
	f.nodes.tokens = append(f.nodes.tokens, req)
	return api.Token{Token: "dpj1.x", Address: "10.0.0.1:7947", Uses: req.Uses, Expires: time.Unix(0, 0)}, f.down
}

func (f *fakeCluster) RotateKey(context.Context) error { return f.down }

func (f *fakeCluster) KeyRotation(context.Context) (api.KeyRotation, error) {
	if on := f.nodes.onRotation; on != nil {
		f.nodes.onRotation = nil
		on()
	}
	now := f.nodes.turning[0]
	if len(f.nodes.turning) > 1 {
		f.nodes.turning = f.nodes.turning[1:]
	}
	return api.KeyRotation{Done: len(now) == 0, Waiting: now}, nil
}

func (n *fakeNode) FirstToken() (address, token string) { return n.joinAt, n.joinWith }
func (n *fakeNode) Left() bool                          { return n.left }
