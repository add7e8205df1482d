package main

import (
	"context"
	_ "embed" // the application of `up` without a file
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/server"
)

// quickstart is the application of `up` without a file. It equals examples/quickstart/app.yaml; a test
// compares them.
//
//go:embed quickstart.yaml
var quickstart []byte

// upGraceS is the drain time, in seconds, under up for apps that do not set graceful_shutdown_timeout_s.
const upGraceS = 10

type upFlags struct {
	node   *nodeFlags
	attach []string
	engine string
	keep   string // --data-dir
	ports  bool   // --port-range or --slots is given
	logs   bool   // --log-level is given
	output *format
}

func newUp(e *env) *cobra.Command {
	f := &upFlags{node: &nodeFlags{config: server.DefaultConfig()}}
	f.node.config.LogLevel = "warn"
	f.node.config.Ephemeral = true
	cmd := &cobra.Command{
		Use:   "up [FILE] [flags]",
		Short: "start a node, deploy a file and serve it, all in the foreground",
		Long: `up starts a node in a folder of its own that is removed at the end, deploys FILE and shows
each rank's progress until all are ready. Then it prints the URL, a curl line and the ranks. On a terminal the
table of ranks stays up to date; everywhere a line says when a rank dies and when it is ready again. Without
FILE it runs four simulated ranks; with --attach it puts one endpoint in front of engines that already run.
Ports 8000 and 8265 are replaced by free ones if they are taken. Ctrl-C drains for 10 s, a second one stops
at once. "dpserve help status" explains the columns.`,
		Example: `  dpserve up                                   # four simulated ranks
  dpserve up app.yaml --engine sim             # any file, without its GPUs
  dpserve up --attach http://127.0.0.1:8100,http://127.0.0.1:8101`,
		Args: requireArgs(0, "FILE"),
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&f.attach, "attach", nil, "`URL`s of engines that already run, instead of FILE")
	flags.StringVar(&f.engine, "engine", "", "sim: run the file on the simulated engine")
	flags.StringVar(&f.keep, "data-dir", "", "`folder` to keep; default: a temporary one")
	f.node.addCommon(cmd)
	f.output = addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if flags.Changed("attach") && len(f.attach) == 0 {
			return usageError("up", "--attach wants URL[,URL...]")
		}
		file, err := readUpFile(cmd.Context(), e, f, args)
		if err != nil {
			return err
		}
		f.ports = flags.Changed("port-range") || flags.Changed("slots")
		f.logs = flags.Changed("log-level")
		return runUp(cmd.Context(), e, f, file)
	}
	return cmd
}

// readUpFile returns the application file to deploy: FILE, one for the engines of --attach, or the embedded
// application.
func readUpFile(ctx context.Context, e *env, f *upFlags, args []string) (*appFile, error) {
	if err := checkEngine(f.engine); err != nil {
		return nil, err
	}
	file, err := readUpSource(ctx, e, f, args)
	if err != nil {
		return nil, err
	}
	if f.engine == engineSim {
		simulateFile(e, file)
	}
	return file, checkKinds(file.apps)
}

// readUpSource reads the file with the defaults of up.
func readUpSource(ctx context.Context, e *env, f *upFlags, args []string) (*appFile, error) {
	name, text := "quickstart.yaml", quickstart
	var err error
	switch {
	case len(args) > 0 && len(f.attach) > 0:
		return nil, usageError("up", "FILE and --attach exclude each other")
	case len(args) > 0:
		name = args[0]
		if text, err = readFile(e, name); err != nil {
			return nil, err
		}
	case len(f.attach) > 0:
		name = "--attach"
		if text, err = attachFile(ctx, f.attach); err != nil {
			return nil, err
		}
		w := e.io.Out
		if *f.output != formatTable && *f.output != formatWide {
			w = e.io.Err // stdout must hold one document
		}
		if _, err := w.Write(append([]byte("# the app.yaml this stands for\n"), text...)); err != nil {
			return nil, err
		}
	}
	base := app.Default()
	base.GracefulShutdownTimeout = upGraceS
	file, err := parseApps(e, base, name, text)
	if err != nil {
		return nil, err
	}
	file.changed = true // the text has other defaults
	return file, nil
}

// runUp runs the node until a signal and removes everything it made.
func runUp(ctx context.Context, e *env, f *upFlags, file *appFile) (err error) {
	c, err := f.node.buildConfig()
	if err != nil {
		return err
	}
	remove, err := makeDataDir(f, &c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	if !f.ports {
		defer reservePortSlice(ctx, &c)()
	}
	scr := e.screen()
	c.LogWriter = upLog{scr}
	if f.logs {
		c.LogWriter = scr // the user wants the log as it is
	}
	s, err := startNode(ctx, e, c)
	if err != nil {
		return err
	}
	defer func() { scr.clear(); err = errors.Join(err, s.Close()) }()
	reportReplacedPorts(s, c, scr)
	if err := deployToSelf(ctx, e, s, file, scr); err != nil {
		return stopUnserved(e, s, scr, err)
	}
	if err := printWelcome(ctx, e, f, s, c.NodeID); err != nil {
		return stopUnserved(e, s, scr, err)
	}
	if err := watchRanks(ctx, e, s, scr, *f.output == formatWide); err != nil {
		return stopUnserved(e, s, scr, err)
	}
	select {
	case <-s.done:
		return s.unexpectedEnd()
	default:
		return s.stop(e.sig, scr)
	}
}

// makeDataDir makes a temporary folder, unless --data-dir names one to keep.
func makeDataDir(f *upFlags, c *server.Config) (remove func() error, err error) {
	c.DataDir = f.keep
	if f.keep != "" {
		return func() error { return nil }, nil
	}
	c.DataDir, err = os.MkdirTemp("", "dpserve-up-")
	if err != nil {
		return nil, problem.New(problem.Internal, "cannot make a temporary folder: %w", err).
			WithHint("set TMPDIR, or name a folder with --data-dir")
	}
	return func() error { return os.RemoveAll(c.DataDir) }, nil
}

// reportReplacedPorts prints which default ports were taken.
func reportReplacedPorts(s *serving, c server.Config, scr *screen) {
	for _, p := range []struct{ what, wanted, got string }{
		{"endpoint", c.HTTPBind, s.HTTPAddr()}, {"admin API", c.AdminBind, s.AdminAddr()}, {
			"metrics port", c.MetricsBind, s.MetricsAddr(),
		},
	} {
		_, wanted, _ := net.SplitHostPort(p.wanted)
		_, got, _ := net.SplitHostPort(p.got)
		if wanted != got && wanted != "0" {
			scr.printMessage("%s is taken, the %s listens on %s", p.wanted, p.what, p.got)
		}
	}
	if s.AdminAddr() != c.AdminBind {
		scr.printMessage("in other terminals: export DPSERVE_ADDR=%s", s.AdminAddr())
	}
}

// deployToSelf deploys over the node's own admin API and waits until every application runs.
func deployToSelf(ctx context.Context, e *env, s *serving, file *appFile, scr *screen) error {
	cluster, err := e.newAdmin(s.AdminAddr())
	if err != nil {
		return err
	}
	defer cluster.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-s.done:
			cancel(s.unexpectedEnd())
		case <-ctx.Done():
		}
	}()
	result, err := cluster.Deploy(ctx, file.request())
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		return err
	}
	return newMonitor(e, cluster, scr).awaitRunning(ctx, result.Apps)
}

// stopUnserved stops a node that never served. An interrupt keeps its exit code.
func stopUnserved(e *env, s *serving, scr *screen, err error) error {
	scr.clear()
	s.cancel()
	select {
	case <-s.done:
	case <-e.sig.second:
		s.Kill()
		<-s.done
	}
	return err
}

// printWelcome prints the URL, a curl line that works as printed, and the ranks, unless the live table shows
// them.
func printWelcome(ctx context.Context, e *env, f *upFlags, s *serving, id string) error {
	if *f.output != formatTable && *f.output != formatWide {
		return printAddress(e, s, id, *f.output)
	}
	cluster, err := e.newAdmin(s.AdminAddr())
	if err != nil {
		return err
	}
	defer cluster.Close()
	apps, err := cluster.Apps(ctx)
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintf(e.io.Out, "endpoint http://%s/v1\nadmin http://%s\n%s\n", s.HTTPAddr(), s.AdminAddr(),
		formatMetricsLine(s.MetricsAddr()))
	if len(apps) > 0 {
		columns := math.MaxInt // a script reads lines
		if e.io.OutTTY {
			columns, _ = e.io.size()
		}
		_, _ = fmt.Fprintln(e.io.Out, formatCurlLine(s.HTTPAddr(), apps[0].Model, columns))
	}
	if len(apps) > 1 {
		others := make([]string, 0, len(apps)-1)
		for i := range apps[1:] {
			others = append(others, apps[i+1].Model)
		}
		_, _ = fmt.Fprintln(e.io.Out, "and others: "+strings.Join(others, ", "))
	}
	_, _ = fmt.Fprintln(e.io.Out)
	if e.io.OutTTY && e.io.ErrTTY {
		return nil
	}
	return newStatusView(e, *f.output == formatWide).ranks(rankRows(apps)).write(e.io.Out, e.io.paint)
}

// formatCurlLine returns a curl command for one streamed chat request, quoted for a POSIX shell. A terminal
// that is too narrow for one line gets three.
func formatCurlLine(addr, model string, columns int) string {
	body := "{\n  \"model\": " + quoteString(model) + ", \"stream\": true, \"max_tokens\": 64,\n  " +
		`"messages": [{"role": "user", "content": "Hello"}]}`
	lines := fmt.Sprintf("curl -N http://%s/v1/chat/completions -H 'content-type: application/json' -d '%s'",
		addr, strings.ReplaceAll(body, `'`, `'\''`))
	line := strings.NewReplacer("{\n  ", "{", "\n  ", " ").Replace(lines)
	if textWidth(line) > columns {
		return lines
	}
	return line
}

// rate is the slope of a counter over the last samples.
type rate struct {
	at    []time.Time
	count []uint64
}

// rateWindowSamples × watchEvery is the window: 2 s.
const rateWindowSamples = 9

func newRate() *rate { return &rate{} }

// add records a sample and returns counts per second over the window.
func (r *rate) add(now time.Time, n uint64) float64 {
	r.at, r.count = append(r.at, now), append(r.count, n)
	if len(r.at) > rateWindowSamples {
		r.at, r.count = r.at[1:], r.count[1:]
	}
	span := now.Sub(r.at[0]).Seconds()
	if span <= 0 || n < r.count[0] {
		return 0
	}
	return float64(n-r.count[0]) / span
}

// A node owns its port range, but several `up` processes on one machine start with the same default, so each
// takes one slice of it. Slices are taken from the top, because a node of `start` uses the range from the
// bottom. One slice holds the port blocks of all ranks of the default slots.
const (
	sliceTop   = 29_999
	sliceSize  = 1_250
	sliceCount = 8
)

// reservePortSlice gives an `up` process a part of the default port range that no other one has, until
// release is called. The last port of the slice is the lock: it is bound, and the system frees it however the
// process ends. If every slice is taken, the config stays unchanged, and the node's bind tests find free
// blocks.
func reservePortSlice(ctx context.Context, c *server.Config) (release func()) {
	var bind net.ListenConfig
	for i := range sliceCount {
		hi := sliceTop - i*sliceSize
		lo := hi - sliceSize + 1
		lock, err := bind.Listen(ctx, "tcp", loopback(hi))
		if err != nil {
			continue
		}
		first, err := bind.Listen(ctx, "tcp", loopback(lo)) // another process's engines may use the slice
		if err != nil {
			_ = lock.Close()
			continue
		}
		_ = first.Close()
		c.PortRange = strconv.Itoa(lo) + "-" + strconv.Itoa(hi-1)
		return func() { _ = lock.Close() }
	}
	return func() {}
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
