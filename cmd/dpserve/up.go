package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	_ "embed" // the application of `up` without a file
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/attach"
	"github.com/dpserve/dpserve/internal/engineflags"
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
	node     *nodeFlags
	bind     bind
	engines  attachFlags
	settings settings
	engine   string
	keep     string // --data-dir
	set      *pflag.FlagSet
	output   *format
}

// bind is where the endpoint listens.
type bind struct {
	host   string
	port   int
	public bool // --insecure-public
}

func newUpFlags() *upFlags {
	f := &upFlags{node: &nodeFlags{config: server.DefaultConfig()}}
	f.node.config.LogLevel = "warn"
	f.node.config.Ephemeral = true
	return f
}

func newUp(e *env) *cobra.Command {
	cmd, _ := upCommand(e)
	return cmd
}

// upCommand returns the command and what its flags say once they are parsed.
func upCommand(e *env) (*cobra.Command, *upFlags) {
	f := newUpFlags()
	cmd := &cobra.Command{
		Use:   "up [FILE] [flags]",
		Short: "start a node, deploy a file and serve it, all in the foreground",
		Long: `up starts a node in a folder of its own that is removed at the end, deploys FILE and shows
each rank's progress until all are ready. Then it prints the URL, a curl line and the ranks. On a terminal the
table of ranks stays up to date; everywhere a line says when a rank dies and when it is ready again. Without
FILE it runs four simulated ranks; with --attach it puts one endpoint in front of engines that already run,
or will within --attach-wait, and says if they are ranks of one lockstep group. The command lines of SGLang's
router are read too: --worker-urls, --pd-disaggregation, --prefill URL PORT, --cache-threshold, ...; so are
Dynamo's --router-mode and the flags beside it.
Ports 8000 and 8265 are replaced by free ones if they are taken. Ctrl-C drains for 10 s, a second one stops
at once. "dpserve help status" explains the columns.`,
		Example: `  dpserve up                                   # four simulated ranks
  dpserve up app.yaml --engine sim             # any file, without its GPUs
  dpserve up --attach 127.0.0.1:8100 127.0.0.1:8101 --policy cache-aware --param cache_threshold=0.3
  dpserve up --attach dns://vllm.default.svc:8000  # a rank for each address, now and later`,
		Args: func(cmd *cobra.Command, args []string) error { return f.checkArgs(cmd, args) },
	}
	f.set = cmd.Flags()
	f.engines.add(f.set)
	f.set.StringVar(&f.engine, "engine", "", "sim: run the file on the simulated engine")
	f.addCommon(cmd)
	f.settings.addRouterFlags(f.set, "up")
	cmd.SetFlagErrorFunc(f.flagError)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if f.engines.isAttach() {
			f.engines.attach = append(f.engines.attach, args...)
		}
		if err := f.setBind(cmd.Context(), e); err != nil {
			return err
		}
		file, err := readFor(e, f.engine,
			func() (*appFile, error) { return readUpFile(cmd.Context(), e, f, args) })
		if err != nil {
			return err
		}
		if err := checkPrograms(cmd.Context(), file.apps); err != nil {
			return err
		}
		return runUp(cmd.Context(), e, f, file)
	}
	return cmd, f
}

// addCommon adds the flags that up and serve share.
func (f *upFlags) addCommon(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.bind.host, "host", "127.0.0.1", "`address` of the OpenAI endpoint")
	flags.IntVar(&f.bind.port, "port", 8000,
		"port of the OpenAI endpoint; without this flag, a free one if 8000 is taken")
	flags.BoolVar(&f.bind.public, "insecure-public", false,
		"allow a --host that is not loopback, without API keys")
	flags.StringVar(&f.keep, "data-dir", "", "`folder` to keep; default: a temporary one")
	f.settings.add(flags)
	f.node.addCommon(cmd)
	f.output = addOutput(cmd)
}

// checkArgs allows FILE, or with --attach more URLs.
func (f *upFlags) checkArgs(cmd *cobra.Command, args []string) error {
	switch key, flag := f.settings.first(); {
	case f.set.Changed("attach") && len(f.engines.attach) == 0:
		return usageError("up", "--attach wants URL[,URL...]")
	case len(args) > 0 && f.engines.hasRoles():
		return usageError("up", "%q: write --prefill or --decode before each URL", args[0])
	case f.engines.isAttach():
		return nil
	case len(args) > 0 && flag != "":
		return problem.New(problem.InvalidArgument, "FILE and %s exclude each other", flag).
			WithHint("write %s into %s", key, args[0])
	}
	return requireArgs(0, "FILE")(cmd, args)
}

// flagError says which command has an unknown flag.
func (f *upFlags) flagError(cmd *cobra.Command, err error) error {
	missing, ok := errors.AsType[*pflag.NotExistError](err)
	if ok && engineflags.Find(engineflags.Sim, missing.GetSpecifiedName()) != engineflags.Unknown {
		return problem.New(problem.InvalidArgument, "%s", err.Error()).
			WithHint("it is a flag of an engine: `dpserve serve MODEL` starts engines, with their flags")
	}
	return flagError(cmd, err)
}

// readUpFile returns the application file to deploy, with the defaults of up: FILE, one for the engines of
// --attach, or the embedded application.
func readUpFile(ctx context.Context, e *env, f *upFlags, args []string) (*appFile, error) {
	name, text := "quickstart.yaml", quickstart
	var err error
	switch {
	case f.engines.isAttach():
		name = "--attach"
		var note string
		probe := func(urls []string, with app.Engine) ([]attach.Found, error) {
			return awaitURLs(ctx, f.engines.wait, urls, probeWith(with), func(format string, args ...any) {
				e.screen().printMessage(format, args...)
			})
		}
		text, note, err = attachFile(&f.engines, probe)
		if err != nil {
			return nil, err
		}
		if note != "" {
			printMessage(e.io.Err, "%s", note)
		}
	case len(args) > 0:
		name = args[0]
		if text, err = readFile(e, name); err != nil {
			return nil, err
		}
	}
	text = f.settings.appendTo(e, text)
	if f.engines.isAttach() {
		if err := f.showFile(e, text); err != nil {
			return nil, err
		}
	}
	base := app.Default()
	base.GracefulShutdownTimeout = upGraceS
	file, err := f.settings.parse(e, base, name, text)
	if err != nil {
		return nil, err
	}
	file.changed = true // the text has other defaults
	return file, nil
}

// setBind sets where the endpoint listens. A port that the user names must be free.
func (f *upFlags) setBind(ctx context.Context, e *env) error {
	c, b := &f.node.config, f.bind
	c.APIKeysFile = cmp.Or(c.APIKeysFile, e.getenv(apiKeysVariable))
	if b.port < 0 || b.port > 65535 {
		return problem.New(problem.InvalidArgument, "--port %d: the port must be 0 to 65535", b.port).
			WithHint("0 takes any free port")
	}
	ip := net.ParseIP(b.host)
	local := b.host == "localhost" || ip != nil && ip.IsLoopback()
	if !local && !b.public && c.APIKeysFile == "" {
		return problem.New(problem.InvalidArgument, "--host %s is reachable from outside, without keys",
			b.host).
			WithHint("leave --host out to serve this machine alone, ask clients for a key with --api-keys " +
				"FILE, or add --insecure-public if everyone who reaches this port may use it")
	}
	c.HTTPBind, c.InsecurePublic = net.JoinHostPort(b.host, strconv.Itoa(b.port)), b.public
	if !f.set.Changed("port") || b.port == 0 {
		return nil
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", c.HTTPBind)
	if err != nil {
		return problem.New(problem.Unavailable, "--port %d: %w", b.port, err).
			WithHint("stop what listens there, or leave --port out for a free one")
	}
	return l.Close()
}

// showFile prints the file that a command line stands for.
func (f *upFlags) showFile(e *env, text []byte) error {
	w := e.io.Out
	if !f.output.isTable() {
		w = e.io.Err // stdout must hold one document
	}
	_, err := w.Write(append([]byte("# the app.yaml this stands for\n"), text...))
	return err
}

// runUp runs the node until a signal and removes everything it made.
func runUp(ctx context.Context, e *env, f *upFlags, file *appFile) (err error) {
	c, err := f.node.buildConfig(e)
	if err != nil {
		return err
	}
	remove, err := makeDataDir(f, &c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	if !f.set.Changed("port-range") && !f.set.Changed("slots") {
		defer reservePortSlice(ctx, &c)()
	}
	scr := e.screen()
	died := &atomic.Bool{}
	c.LogWriter = upLog{scr, died}
	if f.set.Changed("log-level") {
		c.LogWriter = scr // the user wants the log as it is
	}
	s, err := startNode(ctx, e, c)
	if err != nil {
		return err
	}
	defer func() { scr.clear(); err = errors.Join(err, s.Close()) }()
	reportReplacedPorts(s, c, scr)
	cluster, err := e.newAdmin(ownNode(&c, s))
	if err == nil {
		defer cluster.Close()
		err = deployToSelf(ctx, e, s, cluster, file, scr)
	}
	if err == nil {
		err = printWelcome(ctx, e, f, s, cluster, &c)
	}
	if err != nil {
		return stopUnserved(e, s, scr, err)
	}
	watchRanks(ctx, e, s, cluster, scr, died, *f.output == formatWide)
	select {
	case <-s.done:
		return s.unexpectedEnd()
	default:
		return s.stop(e.sig, scr)
	}
}

// ownNode returns what newAdmin wants for the node of this process. Its certificate may hold only names by
// which others reach it, and no other process can answer at its port.
func ownNode(c *server.Config, s *serving) (string, client.Option) {
	token := client.WithToken(s.AdminToken())
	if c.TLSCert == "" {
		return s.AdminAddr(), token
	}
	transport := client.WithTransport(&http.Transport{
		TLSClientConfig:       &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
		ResponseHeaderTimeout: ownAnswerTimeout,
	})
	return "https://" + s.AdminAddr(), func(c *client.Client) { token(c); transport(c) }
}

// ownAnswerTimeout bounds an answer of the node of this process.
const ownAnswerTimeout = 35 * time.Second

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
		{"endpoint", c.HTTPBind, s.HTTPAddr()},
		{"admin API", c.AdminBind, s.AdminAddr()},
		{"metrics port", c.MetricsBind, s.MetricsAddr()},
	} {
		_, wanted, _ := net.SplitHostPort(p.wanted)
		_, got, _ := net.SplitHostPort(p.got)
		if wanted != got && wanted != "0" {
			scr.printMessage("%s is taken, the %s listens on %s", p.wanted, p.what, p.got)
		}
	}
	switch {
	case c.TLSCert != "":
		scr.printMessage("in other terminals: export DPSERVE_ADDR=https://%s", s.AdminAddr())
	case s.AdminAddr() != c.AdminBind:
		scr.printMessage("in other terminals: export DPSERVE_ADDR=%s", s.AdminAddr())
	}
}

// deployToSelf deploys over the node's own admin API and waits until every application runs.
func deployToSelf(ctx context.Context, e *env, s *serving, cluster admin, file *appFile, scr *screen,
) error {
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
func printWelcome(ctx context.Context, e *env, f *upFlags, s *serving, cluster admin, c *server.Config,
) error {
	if !f.output.isTable() {
		return printAddress(e, s, c, *f.output)
	}
	apps, err := cluster.Apps(ctx)
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintf(e.io.Out,
		"endpoint %[1]s://%[2]s/v1\nadmin %[1]s://%[3]s\npage %[1]s://%[3]s/\n%[4]s\n",
		schemeOf(c), s.HTTPAddr(), s.AdminAddr(), formatMetricsLine(s.MetricsAddr()))
	if len(apps) > 0 {
		columns := math.MaxInt // a script reads lines
		if e.io.OutTTY {
			columns, _ = e.io.Size()
		}
		_, _ = fmt.Fprintln(e.io.Out, formatCurlLine(c, s.HTTPAddr(), apps[0].Model, columns))
	}
	if len(apps) > 1 {
		var others []string
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

// curlTrust returns the option by which curl trusts the node's certificate if this machine does not.
func curlTrust(c *server.Config) string {
	pair, err := tls.LoadX509KeyPair(c.TLSCert, c.TLSKey)
	if c.TLSCert == "" || err != nil {
		return ""
	}
	intermediates := x509.NewCertPool()
	for _, der := range pair.Certificate[1:] {
		if other, err := x509.ParseCertificate(der); err == nil {
			intermediates.AddCert(other)
		}
	}
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{Intermediates: intermediates}); err == nil {
		return ""
	}
	return "--cacert '" + strings.ReplaceAll(c.TLSCert, `'`, `'\''`) + "' "
}

// formatCurlLine returns a curl command for one streamed chat request, quoted for a POSIX shell. A terminal
// that is too narrow for one line gets three. The key of an endpoint that wants one is a variable of the
// shell, because no key is printed.
func formatCurlLine(c *server.Config, addr, model string, columns int) string {
	body := "{\n  \"model\": " + quoteString(model) + ", \"stream\": true, \"max_tokens\": 64,\n  " +
		`"messages": [{"role": "user", "content": "Hello"}]}`
	key := ""
	if c.APIKeysFile != "" {
		key = `-H "Authorization: Bearer $KEY" `
	}
	lines := fmt.Sprintf("curl -N %s%s://%s/v1/chat/completions %s-H 'content-type: application/json' "+
		"-d '%s'", curlTrust(c), schemeOf(c), addr, key, strings.ReplaceAll(body, `'`, `'\''`))
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

// moduleTimeout is the longest search for a Python module.
const moduleTimeout = 10 * time.Second

// checkPrograms refuses applications whose engine is not installed here, before anything starts.
func checkPrograms(ctx context.Context, apps []*app.Application) error {
	checked := map[string]bool{}
	for _, a := range apps {
		command := engine.Command(a)
		key := strings.Join(command, " ")
		if a.Engine.Kind != app.KindVLLM && a.Engine.Kind != app.KindSGLang || checked[key] {
			continue // an engine that is built in or runs already
		}
		checked[key] = true
		path, err := exec.LookPath(command[0])
		switch module := pythonModule(command); {
		case errors.Is(err, exec.ErrNotFound):
			return missingProgram(a, fmt.Sprintf("no program %q in PATH", command[0]))
		case err != nil:
			return missingProgram(a, fmt.Sprintf("cannot run %s: %v", command[0], rootCause(err)))
		case module != "" && !hasModule(ctx, path, module):
			return missingProgram(a, fmt.Sprintf("%s has no module %q", path, module))
		}
	}
	return nil
}

// missingProgram says how to install an engine or to name it.
func missingProgram(a *app.Application, what string) error {
	return problem.New(problem.Unplaceable, "%s: engine %s is not installed: %s", a.Name, a.Engine.Kind,
		what).
		WithHint("install it (pip install %s) and put the bin folder of its environment into PATH\n"+
			"or name it: --command of serve, engine.command of a file\n"+
			"--engine sim runs the simulated engine instead", a.Engine.Kind)
}

// rootCause returns the innermost error, which does not repeat the path.
func rootCause(err error) error {
	for inner := errors.Unwrap(err); inner != nil; inner = errors.Unwrap(err) {
		err = inner
	}
	return err
}

// pythonModule returns the package that a command runs with `python -m`, "" for other commands.
func pythonModule(command []string) string {
	at := slices.Index(command, "-m")
	if !strings.HasPrefix(filepath.Base(command[0]), "python") || at < 0 || at+1 >= len(command) {
		return ""
	}
	module, _, _ := strings.Cut(command[at+1], ".")
	return module
}

// hasModule asks Python for a package, without loading it. If Python cannot tell, the engine's own start
// will.
func hasModule(ctx context.Context, python, module string) bool {
	ctx, cancel := context.WithTimeout(ctx, moduleTimeout)
	defer cancel()
	const ask = "import importlib.util as u, sys; sys.exit(3 if u.find_spec(sys.argv[1]) is None else 0)"
	err := exec.CommandContext(ctx, python, "-c", ask, module).Run()
	var exit *exec.ExitError
	return !errors.As(err, &exit) || exit.ExitCode() != 3
}
