package server

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// The times of an end, in the order in which they pass. Between the first and the second, streams have their
// application's graceful_shutdown_timeout_s (longestGrace) and engines then actors/node's kill_grace (5 s).
// After the second, requests to the admin API have 5 s (internal/api) and proposals 2 s (internal/cluster).
// The other nodes cut the connections of a removed node after cluster.DisconnectDelay.
const (
	// handOverTime bounds a change of leader that this node asks for.
	handOverTime = 3 * time.Second
	// restartWait is the time that open requests get before the process is replaced.
	restartWait = 5 * time.Second
	// afterDrain is the time that requests get after the engines' grace, to write their error events.
	afterDrain = 2 * time.Second
)

// Listen binds the ports of clients and operators. A taken port is problem.Unavailable; an Ephemeral node
// takes another one.
func (n *Node) Listen() error {
	if n.ingress != nil {
		if err := n.bind(n.cfg.HTTPBind, "--http-bind", n.listenHTTP); err != nil {
			return err
		}
	}
	if n.metricsServer != nil {
		if err := n.bind(n.cfg.MetricsBind, "--metrics-bind", n.listenServer(n.metricsServer)); err != nil {
			return err
		}
	}
	return n.bind(n.cfg.AdminBind, "--admin-bind", n.listenServer(n.admin))
}

func (n *Node) bind(addr, flag string, listen func(ctx context.Context, addr string) error) error {
	err := listen(n.life.ctx, addr)
	if n.cfg.Ephemeral && errors.Is(err, syscall.EADDRINUSE) {
		err = listen(n.life.ctx, "127.0.0.1:0")
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		return problem.New(problem.Unavailable, "%s %s is taken: %w", flag, addr, err).
			WithHint("stop what listens there, or choose another port with %s", flag)
	}
	if err != nil {
		return problem.New(problem.InvalidArgument, "%s %s: %w", flag, addr, err).
			WithHint("give %s an address of this machine and a port that this user may listen at", flag)
	}
	return nil
}

func (n *Node) listenHTTP(ctx context.Context, addr string) error {
	if n.cfg.Network == nil {
		a, err := n.ingress.Listen(ctx, addr)
		if err == nil {
			n.httpAddr = a.String()
		}
		return err
	}
	l, err := n.cfg.Network.Listen(addr)
	if err != nil {
		return err
	}
	n.httpAddr = l.Addr().String()
	return n.ingress.Attach(l)
}

// listenServer returns what binds a port of operators.
func (n *Node) listenServer(s *api.Server) func(ctx context.Context, addr string) error {
	return func(ctx context.Context, addr string) error {
		if n.cfg.Network == nil {
			return s.Listen(ctx, addr)
		}
		l, err := n.cfg.Network.Listen(addr)
		if err != nil {
			return err
		}
		return s.Attach(l)
	}
}

// Serve answers until ctx ends or the cluster removes the node. Then it drains and returns when every engine
// is gone. Kill ends the drain. After Restart it leaves the engines running and returns ErrRestart.
func (n *Node) Serve(ctx context.Context) error {
	failed := make(chan error, 3) // one slot for each server
	if n.ingress != nil {
		go func() { failed <- n.ingress.Serve() }()
	}
	if n.metricsServer != nil {
		go func() { failed <- n.metricsServer.Serve() }()
	}
	go func() { failed <- n.admin.Serve() }()
	var removed <-chan struct{} // never from the cluster that it is alone
	if n.peering != nil {
		removed = n.peering.Removed()
	}
	var err error
	select {
	case <-ctx.Done():
	case <-removed:
		if n.Refusal() != nil {
			n.node.CutAll()
		}
	case <-n.life.restart:
		return n.detach() //nolint:contextcheck // as a drain
	case err = <-failed:
	}
	return errors.Join(err, n.drain()) //nolint:contextcheck // a drain outlives the context that asks for it
}

// drain turns readiness off, lets each app's streams end within its grace, then ends the engines and the
// servers.
func (n *Node) drain() error {
	if n.ingress != nil {
		n.ingress.Drain()
	}
	n.handOverLeadership()
	var err error
	if n.peering == nil { // no other leader exists: the controller must not start the ended ranks again
		err = n.leading.StandDown()
	}
	err = errors.Join(err, n.node.Close(n.life.ctx, longestGrace(n.store.State())))
	ctx, cancel := context.WithTimeout(n.life.ctx, afterDrain)
	defer cancel()
	return errors.Join(err, n.closeIngress(ctx), n.closeMetrics(), n.admin.Close())
}

// closeIngress ends the ingress. That ctx has cut its streams is no error.
func (n *Node) closeIngress(ctx context.Context) error {
	if n.ingress == nil {
		return nil
	}
	err := n.ingress.Close(ctx)
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}

// ErrRestart is returned by Serve after Restart: the caller closes the node and executes its program again.
var ErrRestart = errors.New("the process is to be replaced")

// Restart has Serve end without the engines, for the next process of this node. It returns before that.
// Without force it is refused while no leader answers.
func (n *Node) Restart(ctx context.Context, force bool) error {
	if err := checkProgram(n.cfg.Executable); err != nil {
		return err
	}
	if !n.cfg.Shims {
		return problem.New(problem.Conflict, "the engines of this node end with its process").
			WithHint("`dpserve start` and `dpserve join` can be restarted, `dpserve up` cannot")
	}
	if !force {
		if err := awaitRestartable(ctx, n.node); err != nil {
			return err
		}
	}
	n.life.restartOnce.Do(func() { close(n.life.restart) })
	return nil
}

// checkProgram refuses a restart that could not execute the program; "" is this one.
func checkProgram(path string) (err error) {
	if path == "" {
		path, err = os.Executable()
	}
	if err == nil {
		_, err = exec.LookPath(path)
	}
	if err != nil {
		return problem.New(problem.Conflict, "this node cannot be restarted: %w", err).
			WithHint("put an executable dpserve there; the node goes on with the one that it has")
	}
	return nil
}

// detach closes the node for requests, waits for the open ones for a moment, and lets go of the engines.
func (n *Node) detach() error {
	n.log.Info("restarting: the engines go on, and the next process adopts them")
	if n.ingress != nil {
		n.ingress.Drain()
	}
	n.handOverLeadership()
	n.node.Detach(n.life.ctx, n.cfg.RestartGrace, restartWait)
	n.services.restart()
	ctx, cancel := context.WithTimeout(n.life.ctx, afterDrain)
	defer cancel()
	if err := n.closeIngress(ctx); err != nil {
		n.log.Warn("the ingress did not close", slog.Any("err", err))
	}
	if err := errors.Join(n.closeMetrics(), n.admin.Close()); err != nil {
		n.log.Warn("the admin API did not close", slog.Any("err", err))
	}
	return ErrRestart
}

// handOverLeadership lets another node lead before this one ends.
func (n *Node) handOverLeadership() {
	if n.consensus == nil || n.peering == nil {
		return
	}
	ctx, cancel := context.WithTimeout(n.life.ctx, handOverTime)
	defer cancel()
	if err := n.consensus.StepDown(ctx); err != nil && problem.CodeOf(err) != problem.Conflict {
		n.log.Warn("leadership was not handed over", slog.Any("err", err))
	}
}

// closeMetrics ends the server of --metrics-bind, if there is one.
func (n *Node) closeMetrics() error {
	if n.metricsServer == nil {
		return nil
	}
	return n.metricsServer.Close()
}

// Kill ends a drain: it kills the engines and cuts the streams.
func (n *Node) Kill() { n.life.kill() }

// Close ends everything that still runs and waits, within bounds for a disk that hangs. Idempotent.
func (n *Node) Close() error { return n.life.close() }

func (n *Node) closeAll() error {
	n.life.kill()
	n.life.loops.Wait()
	errs := []error{
		diskfile.Await(n.cfg.DataDir, diskfile.Grace, func() error { n.life.writers.Wait(); return nil }),
		n.leading.StandDown(),
	}
	if n.node != nil {
		errs = append(errs, n.node.Close(n.life.ctx, 0))
	}
	errs = append(errs, n.closeIngress(n.life.ctx), n.closeMetrics())
	if n.admin != nil {
		errs = append(errs, n.admin.Close())
	}
	if n.leader != nil {
		errs = append(errs, n.leader.Close())
	}
	if n.feed != nil {
		n.feed.Close() // before its connections close, or each stream would warn of a break
	}
	if n.conns != nil {
		errs = append(errs, n.conns.Close())
	}
	if n.store != nil {
		errs = append(errs, n.store.Close())
	}
	errs = append(errs, n.services.close())
	if n.peering != nil {
		errs = append(errs, n.peering.Close())
	}
	n.probes.CloseIdleConnections()
	if n.system != nil {
		n.system.Shutdown()
	}
	return errors.Join(errs...)
}

// HTTPAddr is the address for clients, after Listen.
func (n *Node) HTTPAddr() string { return n.httpAddr }

// endpoint is the URL for clients, after Listen; empty without role ingress. A bind of all addresses is
// reached at the node's own.
func (n *Node) endpoint() string {
	host, port, err := net.SplitHostPort(n.httpAddr)
	if err != nil {
		return ""
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = cmp.Or(n.cfg.Advertise, "127.0.0.1")
	}
	return "http://" + net.JoinHostPort(host, port)
}

// AdminAddr is the address of the admin API, after Listen.
func (n *Node) AdminAddr() string {
	if a := n.admin.Addr(); a != nil {
		return a.String()
	}
	return ""
}

// MetricsAddr is the address of --metrics-bind, after Listen; empty without that flag.
func (n *Node) MetricsAddr() string {
	if n.metricsServer == nil || n.metricsServer.Addr() == nil {
		return ""
	}
	return n.metricsServer.Addr().String()
}

// Feed returns the streams of all ranks that this node's ingress follows, for a second ingress beside it.
// Without role ingress it returns those of the node's own ranks.
func (n *Node) Feed() msg.Feed {
	if n.feed != nil {
		return n.feed
	}
	return n.hub
}

// FirstToken returns the address and the token with which other machines join, after the very first start of
// a cluster; else it is empty.
func (n *Node) FirstToken() (address, token string) {
	if n.firstToken == "" {
		return "", ""
	}
	return n.peering.Address(), n.firstToken
}

// Left reports whether the cluster has removed this node.
func (n *Node) Left() bool {
	if n.peering == nil {
		return false
	}
	select {
	case <-n.peering.Removed():
		return true
	default:
		return false
	}
}

// Refusal is what a control node said that refused this node as removed; nil: none has. Such a node was cut
// off while it was removed, so its ranks may run elsewhere by now.
func (n *Node) Refusal() error {
	if n.peering == nil {
		return nil
	}
	return n.peering.Refusal()
}

// Store is the cluster's state, for an ingress beside the node's own.
func (n *Node) Store() msg.Store { return n.store }

// Totals returns the requests ended, tokens generated and requests in flight at this node's ingress.
func (n *Node) Totals() (requests, tokens uint64, inflight int) {
	if n.ingress == nil {
		return 0, 0, 0
	}
	return n.ingress.Totals()
}

// sampleOf is a rank in the form of the metrics.
func sampleOf(app string, r *client.RankStatus) telemetry.RankSample {
	out := telemetry.RankSample{
		App: app, Group: r.Group, Rank: r.Rank, InFlight: r.InFlight, Tripped: r.Tripped,
	}
	if kv := r.KV; kv != nil {
		out.KV = &telemetry.KVSample{
			Blocks: kv.Blocks, Bytes: kv.Bytes, Orphans: kv.Orphans, Evicted: kv.Evicted,
		}
		if e := kv.Events; e != nil {
			out.KV.Events, out.KV.Silent = true, e.State == client.EventsSilent
			out.KV.Batches, out.KV.Gaps, out.KV.Restarts, out.KV.Dropped = e.Batches, e.Gaps, e.Restarts,
				e.Dropped
		}
	}
	if t := r.Transfer; t != nil {
		out.Transfer = &telemetry.TransferSample{
			Count: t.Count, Bytes: t.Bytes, Failed: t.Failed, Expired: t.Expired, LateReads: t.LateReads,
			Seconds: t.TotalMs / 1000,
		}
	}
	return out
}

// metricsHandler returns /metrics: it updates the gauges of ranks, KV caches and the lease, then answers.
func metricsHandler(n *Node) http.Handler {
	pages := n.metrics.Handler()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, leads := n.leading.Current()
		n.nodeMetrics.Show(n.node.LeaseLeft().Seconds(), leads)
		var samples []telemetry.RankSample
		var indexes []telemetry.AppIndex
		for unit, ranks := range n.node.RankStatuses() {
			name, _, _ := strings.Cut(unit, "/")
			for i := range ranks {
				samples = append(samples, sampleOf(name, &ranks[i]))
			}
		}
		if n.ingress != nil {
			for name := range n.store.State().Apps {
				if ix := n.ingress.Index(name); ix != nil {
					indexes = append(indexes, telemetry.AppIndex{
						App: name, Blocks: ix.Blocks, Bytes: ix.Bytes, Evicted: ix.Evicted,
						Resyncs: ix.Resyncs,
					})
				}
			}
		}
		n.metrics.ShowRanks(samples, indexes)
		pages.ServeHTTP(w, r)
	})
}
