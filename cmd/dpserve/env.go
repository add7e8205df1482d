package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/server"
)

// defaultAddr is the admin API's address when DPSERVE_ADDR is not set.
const defaultAddr = server.DefaultAdminBind

// env holds everything that a command may use: streams, signals, environment, and the constructors of nodes
// and clients. Tests replace them.
type env struct {
	io     *ioStreams
	sig    *interrupts
	getenv func(string) string
	now    func() time.Time

	newNode  func(server.Config) (node, error)
	newAdmin func(addr string) (admin, error)

	noColor bool // --no-color
}

func newEnv(streams *ioStreams, sig *interrupts) *env {
	return &env{io: streams, sig: sig, getenv: os.Getenv, now: time.Now, newNode: newNode, newAdmin: newAdmin}
}

// run executes a command line, reports its error and returns the exit code.
func (e *env) run(args []string) int {
	ctx, cancel := e.sig.context(context.Background())
	defer cancel()
	root := newRoot(e)
	root.SetArgs(args)
	root.SetIn(e.io.In)
	root.SetOut(e.io.Out)
	root.SetErr(e.io.Err)
	err := root.ExecuteContext(ctx)
	if err != nil && errors.Is(context.Cause(ctx), errInterrupted) && !isSilent(err) {
		err = errInterrupted // the interrupt caused the error
	}
	report(e.io.Err, err)
	return exitCode(err)
}

// admin returns a client for the cluster that DPSERVE_ADDR selects. It does not connect yet.
func (e *env) admin() (admin, error) {
	return e.newAdmin(cmp.Or(e.getenv("DPSERVE_ADDR"), defaultAddr))
}

// withAdmin calls f with a client and closes it afterwards.
func (e *env) withAdmin(f func(client admin) error) error {
	client, err := e.admin()
	if err != nil {
		return err
	}
	defer client.Close()
	return f(client)
}

// applyColor makes --no-color act like NO_COLOR.
func (e *env) applyColor(*cobra.Command, []string) {
	if e.noColor {
		e.io.Color = false
	}
}

// admin is the part of the admin REST API that the CLI uses. Errors are *problem.Error.
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
