package main

import (
	"context"
	"io"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// admin is what the CLI asks of a cluster: the admin REST API and nothing else. Errors are *problem.Error.
type admin interface {
	Apps(ctx context.Context) ([]msg.AppStatus, error)
	Deploy(ctx context.Context, r deployRequest) (deployResult, error)
	Delete(ctx context.Context, name string) error
	Logs(ctx context.Context, q logQuery) (io.ReadCloser, error)
}

// deployRequest is an app.yaml on its way to the cluster.
type deployRequest struct {
	file  string // for messages
	text  []byte
	prune bool // delete apps that are not listed
}

// deployResult is what the cluster did with it.
type deployResult struct {
	revisions map[string]uint64 // per app of the file
}

// logQuery picks log lines. group and rank are -1 for all.
type logQuery struct {
	app         string
	group, rank int
	since       time.Duration // 0 = from the beginning of what is kept
	tail        int           // 0 = all that is kept
	follow      bool
}
