package main

import (
	"context"
	"io"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/api"
)

// admin is what the CLI asks of a cluster: the admin REST API and nothing else. Errors are *problem.Error.
type admin interface {
	Apps(ctx context.Context) ([]msg.AppStatus, error)
	Deploy(ctx context.Context, r api.DeployRequest) (api.DeployResult, error)
	Delete(ctx context.Context, name string) error
	Logs(ctx context.Context, q api.LogQuery) (io.ReadCloser, error)
	Close() // ends idle connections
}

var _ admin = (*api.Client)(nil)

func newAdmin(addr string) (admin, error) { return api.NewClient(addr) }
