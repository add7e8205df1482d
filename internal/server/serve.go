package server

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
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
	// afterDrain is the time that requests get after the grace, to write their error events.
	afterDrain = 2 * time.Second
)

// ports are the listeners of clients and operators.
type ports struct{ http, metrics, admin net.Listener }

// bindPorts binds the ports of clients and operators. A taken port is problem.Unavailable; an Ephemeral node
// takes another one. Until Serve, connections wait in the backlog.
func (n *Node) bindPorts(ctx context.Context) (err error) {
	if n.hasRole(state.RoleIngress) {
		if n.ports.http, err = n.bind(ctx, n.cfg.HTTPBind, "--http-bind"); err != nil {
			return err
		}
	}
	if n.cfg.MetricsBind != "" {
		if n.ports.metrics, err = n.bind(ctx, n.cfg.MetricsBind, "--metrics-bind"); err != nil {
			return err
		}
	}
	n.ports.admin, err = n.bind(ctx, n.cfg.AdminBind, "--admin-bind")
	return err
}

// close closes the listeners, for a start that failed before the servers took them.
func (p *ports) close() {
	for _, l := range []net.Listener{p.http, p.metrics, p.admin} {
		if l != nil {
			_ = l.Close() // its server may have closed it
		}
	}
}

func (n *Node) bind(ctx context.Context, addr, flag string) (net.Listener, error) {
	l, err := n.listen(ctx, addr)
	if n.cfg.Ephemeral && errors.Is(err, syscall.EADDRINUSE) {
		l, err = n.listen(ctx, "127.0.0.1:0")
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, problem.New(problem.Unavailable, "%s %s is taken: %w", flag, addr, err).
			WithHint("stop what listens there, or choose another port with %s", flag)
	case err != nil:
		return nil, problem.New(problem.InvalidArgument, "%s %s: %w", flag, addr, err).
			WithHint("give %s an address of this machine and a port that this user may listen at", flag)
	}
	return l, nil
}

func (n *Node) listen(ctx context.Context, addr string) (net.Listener, error) {
	if n.cfg.Network != nil {
		return n.cfg.Network.Listen(addr)
	}
	return (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
}

// Serve answers until ctx ends or the cluster removes the node. Then it drains and returns when every engine
// is gone. Kill ends the drain. After Restart it leaves the engines running and returns ErrRestart. So does a
// server that fails, with that error: it is no reason to end engines that the next process can adopt.
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
		if n.peering.Refusal() != nil { // it may have been cut off, and its ranks may run elsewhere by now
			n.node.CutAll()
		}
	case <-n.life.restart:
		n.log.Info("restarting: the engines go on, and the next process adopts them")
		n.detach() //nolint:contextcheck // as a drain
		return ErrRestart
	case err = <-failed:
		if n.keepsEngines() {
			n.detach() //nolint:contextcheck // as a drain
			return err
		}
	}
	return errors.Join(err, n.drain()) //nolint:contextcheck // a drain outlives the context that asks for it
}

// drain turns readiness off, lets each app's streams end within its grace, then ends the engines and the
// servers.
func (n *Node) drain() error {
	n.life.stopping.Store(true)
	if n.ingress != nil {
		n.ingress.Drain()
	}
	n.handOverLeadership()
	var err error
	if n.peering == nil { // no other leader exists: the controller must not start the ended ranks again
		err = n.leading.StandDown()
	}
	ends := time.Now().Add(longestGrace(n.store.State()))
	err = errors.Join(err, n.node.Close(n.life.ctx, time.Until(ends)))
	// streams of ranks on other nodes have the same grace
	ctx, cancel := context.WithTimeout(n.life.ctx, max(time.Until(ends), afterDrain))
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

// Restart has Serve end without the engines, for the next process of this node. It returns before that, with
// the version of the program that the caller executes then. Without force it is refused while no leader
// answers.
func (n *Node) Restart(ctx context.Context, force bool) (next string, err error) {
	if !n.keepsEngines() {
		return "", problem.New(problem.Conflict, "the engines of this node end with its process").
			WithHint("`dpserve start` and `dpserve join` can be restarted, `dpserve up` cannot")
	}
	if next, err = checkProgram(n); err != nil {
		return "", err
	}
	if !force {
		if err := awaitRestartable(ctx, n.node); err != nil {
			return "", err
		}
	}
	n.life.restartOnce.Do(func() { close(n.life.restart) })
	return next, nil
}

// keepsEngines reports whether the engines of this node outlive its process: only a stop, a removal from the
// cluster, a delete and a drain end them then. A start that fails and an error of a server do not.
func (n *Node) keepsEngines() bool { return n.cfg.Shims }

// detach closes the node for requests, waits for the open ones for a moment, and lets go of the engines.
func (n *Node) detach() {
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
func (n *Node) Kill() {
	n.life.stopping.Store(true)
	n.life.kill()
}

// Close ends everything that still runs and waits, within bounds for a disk that hangs. Engines that outlive
// this process go on, unless it was asked to stop. Idempotent.
func (n *Node) Close() error { return n.life.close() }

func (n *Node) closeAll() error {
	if n.node != nil && n.keepsEngines() && !n.life.stopping.Load() {
		n.node.Detach(n.life.ctx, n.cfg.RestartGrace, 0)
	}
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
	n.ports.close()
	if n.leader != nil {
		errs = append(errs, n.leader.Close())
	}
	if n.rankLinks != nil {
		n.rankLinks.Close() // before its connections close, or each stream would warn of a break
	}
	if n.groups != nil {
		n.groups.Close()
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

// HTTPAddr is the address for clients; empty without role ingress.
func (n *Node) HTTPAddr() string { return addressOf(n.ports.http) }

// addressOf is where a listener listens; "" without one.
func addressOf(l net.Listener) string {
	if l == nil {
		return ""
	}
	return l.Addr().String()
}

// endpoint is the URL for clients; empty without role ingress. A bind of all addresses is
// reached at the node's own.
func (n *Node) endpoint() string {
	host, port, err := net.SplitHostPort(n.HTTPAddr())
	if err != nil {
		return ""
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = cmp.Or(n.cfg.Advertise, "127.0.0.1")
	}
	return n.access.Scheme() + "://" + net.JoinHostPort(host, port)
}

// AdminAddr is the address of the admin API.
func (n *Node) AdminAddr() string { return addressOf(n.ports.admin) }

// AdminToken is what a caller of the admin API shows; "" if it is open.
func (n *Node) AdminToken() string { return n.adminToken.Text }

// AdminTokenFile is the file that holds the admin token; "" if there is none.
func (n *Node) AdminTokenFile() string { return n.adminToken.File }

// MetricsAddr is the address of --metrics-bind; empty without that flag.
func (n *Node) MetricsAddr() string { return addressOf(n.ports.metrics) }

// Feed returns the streams of all ranks that this node knows, for a second ingress beside it. Without role
// ingress these are the node's own.
func (n *Node) Feed() msg.Feed { return n.hub }

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

// Refusal is what a control node said that refused this node as removed; nil: none has, or somebody has asked
// at this node that it leaves.
func (n *Node) Refusal() error {
	if n.peering == nil || n.leaves.Load() {
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
