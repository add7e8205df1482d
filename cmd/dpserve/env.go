package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"iter"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
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
	newAdmin func(addr string, options ...client.Option) (admin, error)
	execute  func() error // replaces this process by program
	program  string       // path that this process was started by

	addr           string  // --addr
	adminTokenFile string  // --admin-token-file
	noColor        bool    // --no-color
	rayReplicas    string  // --ray-num-replicas
	scr            *screen // of the command; made by screen
}

func newEnv(streams *ioStreams, sig *interrupts) *env {
	program := findProgram(os.Args[0])
	return &env{
		io: streams, sig: sig, getenv: os.Getenv, now: time.Now, newNode: newNode, newAdmin: newAdmin,
		program: program, execute: func() error { return executeAgain(program) },
	}
}

// run executes a command line, reports its error and returns the exit code.
func (e *env) run(args []string) int {
	ctx, cancel := e.sig.context(context.Background())
	defer cancel()
	defer e.closeScreen()
	root := newRoot(e)
	root.SetArgs(arrange(root, args))
	root.SetIn(e.io.In)
	root.SetOut(e.io.Out)
	root.SetErr(e.io.Err)
	if len(args) > 0 && (args[0] == cobra.ShellCompRequestCmd || args[0] == cobra.ShellCompNoDescRequestCmd) {
		cleanUsages(root)
	}
	cmd, err := root.ExecuteContextC(ctx)
	if err != nil && errors.Is(context.Cause(ctx), errInterrupted) && !isSilent(err) {
		err = errInterrupted // the interrupt caused the error
	}
	if wantsJSON(cmd, args) {
		reportJSON(e.io.Err, err)
	} else {
		report(e.io.Err, err)
	}
	return exitCode(err)
}

// withAdmin calls f with a client for the cluster that --addr or DPSERVE_ADDR selects, and closes the client
// afterwards.
func (e *env) withAdmin(f func(cluster admin) error) error {
	addr := cmp.Or(e.addr, e.getenv("DPSERVE_ADDR"), defaultAddr)
	token, err := e.adminToken(addr)
	if err != nil {
		return err
	}
	cluster, err := e.newAdmin(addr, client.WithToken(token))
	if err != nil {
		return err
	}
	defer cluster.Close()
	return f(cluster)
}

// asking makes the function of a command that asks the cluster.
func (e *env) asking(ask func(ctx context.Context, cluster admin, args []string) error,
) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		return e.withAdmin(func(cluster admin) error { return ask(cmd.Context(), cluster, args) })
	}
}

// screen returns the screen of the command. It follows the terminal's signals until the command ends.
func (e *env) screen() *screen {
	if e.scr == nil {
		e.scr = newScreen(e.io)
		if e.io.Terminal != nil {
			followTerminal(e.scr)
		}
	}
	return e.scr
}

// closeScreen ends the screen if the command has one.
func (e *env) closeScreen() {
	if e.scr != nil {
		close(e.scr.done)
		e.scr = nil
	}
}

// admin is the part of the admin REST API that the CLI uses. Errors are *client.Error.
type admin interface {
	Version(ctx context.Context) (client.BuildInfo, error)
	Apps(ctx context.Context) ([]client.AppStatus, error)
	Plan(ctx context.Context, r client.DeployRequest) (client.Plan, error)
	Deploy(ctx context.Context, r client.DeployRequest) (client.DeployResult, error)
	Delete(ctx context.Context, name string) error
	History(ctx context.Context, app string) ([]client.Revision, error)
	AppFile(ctx context.Context, app string, revision uint64) (client.AppFile, error)
	Rollback(ctx context.Context, app string, to uint64) (client.DeployResult, error)
	AddRank(ctx context.Context, app string, rank []byte) (client.RankChange, error)
	CallEngines(ctx context.Context, app, method, path string, ranks []string, body []byte,
	) (client.RankAnswers, error)
	RemoveRank(ctx context.Context, app string, r client.RankRemoval) (client.RankChange, error)
	Events(ctx context.Context, app string, since uint64) iter.Seq2[client.Event, error]
	PastEvents(ctx context.Context, app string) ([]client.Event, error)
	Logs(ctx context.Context, q client.LogQuery) (io.ReadCloser, error)
	Explain(ctx context.Context, app string, q *client.Query) (*client.Explanation, error)
	Router(ctx context.Context, app string) (client.Info, error)
	ResetRouter(ctx context.Context, app string) (client.ResetResult, error)
	Nodes(ctx context.Context) ([]client.NodeStatus, error)
	Drain(ctx context.Context, node string, deadline *time.Duration) error
	Undrain(ctx context.Context, node string) error
	CheckLeave(ctx context.Context, node string) error
	RemoveNode(ctx context.Context, node string) error
	Restart(ctx context.Context, force bool) (client.Process, error)
	Process(ctx context.Context) (client.Process, error)
	NewToken(ctx context.Context, req client.TokenRequest) (client.Token, error)
	Tokens(ctx context.Context) ([]client.JoinToken, error)
	RevokeToken(ctx context.Context, id string) error
	RevokeAllTokens(ctx context.Context) error
	RotateKey(ctx context.Context) (client.KeyRotation, error)
	Close() // ends idle connections
}

// adminClient is a client of the admin API. Requests about a Router go to the client of that Router.
type adminClient struct{ *client.Client }

func newAdmin(addr string, options ...client.Option) (admin, error) {
	c, err := client.New(addr, options...)
	return adminClient{c}, err
}

// Explain returns the Router's decision for q and its reasons.
func (c adminClient) Explain(ctx context.Context, app string, q *client.Query) (*client.Explanation, error) {
	return c.Client.Router(app).Explain(ctx, *q)
}

// Router returns a description of the Router of an application.
func (c adminClient) Router(ctx context.Context, app string) (client.Info, error) {
	return c.Client.Router(app).Info(ctx)
}

// ResetRouter drops the Router's state, which the Router then rebuilds from the ranks.
func (c adminClient) ResetRouter(ctx context.Context, app string) (client.ResetResult, error) {
	ranks, err := c.Client.Router(app).Reset(ctx)
	return client.ResetResult{App: app, Ranks: ranks}, err
}
