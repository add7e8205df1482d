package main

import (
	"context"
	"io"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/api"
)

// admin is what the CLI asks of a cluster: the admin REST API and nothing else. Errors are *problem.Error.
type admin interface {
	Version(ctx context.Context) (api.BuildInfo, error)
	Apps(ctx context.Context) ([]msg.AppStatus, error)
	Plan(ctx context.Context, r api.DeployRequest) (msg.Plan, error)
	Deploy(ctx context.Context, r api.DeployRequest) (api.DeployResult, error)
	Delete(ctx context.Context, name string) error
	AddRank(ctx context.Context, app string, rank []byte) (api.RankChange, error)
	RemoveRank(ctx context.Context, app string, r api.RankRemoval) (api.RankChange, error)
	Logs(ctx context.Context, q api.LogQuery) (io.ReadCloser, error)
	Explain(ctx context.Context, app string, q *msg.RouteQuery) (*msg.Explanation, error)
	Router(ctx context.Context, app string) (msg.RouterInfo, error)
	ResetRouter(ctx context.Context, app string) (msg.ResetResult, error)
	Nodes(ctx context.Context) ([]msg.NodeStatus, error)
	Drain(ctx context.Context, node string, deadline *time.Duration) error
	Undrain(ctx context.Context, node string) error
	CheckLeave(ctx context.Context, node string) error
	RemoveNode(ctx context.Context, node string) error
	NewToken(ctx context.Context, req api.TokenRequest) (api.Token, error)
	RotateKey(ctx context.Context) error
	KeyRotation(ctx context.Context) (api.KeyRotation, error)
	Close() // ends idle connections
}

var _ admin = (*api.Client)(nil)

func newAdmin(addr string) (admin, error) { return api.NewClient(addr) }
