package main

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"math"
	"net"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/server"
)

// nodeFlags are the flags of a node that up, start and join share.
type nodeFlags struct {
	config server.Config
	labels map[string]string
	timers map[string]string
}

// apiKeysVariable has the default of --api-keys.
const apiKeysVariable = "DPSERVE_API_KEYS_FILE" //nolint:gosec // a name, no credential

// addCommon adds the flags that up, start and join share.
func (f *nodeFlags) addCommon(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.config.GPUs, "gpus", f.config.GPUs,
		"devices to offer: auto finds them, none, a `list` like 0-3,6, or a count")
	flags.IntVar(&f.config.Slots, "slots", f.config.Slots, "ranks without devices that this node takes")
	flags.IntVar(&f.config.MaxBody, "max-body", f.config.MaxBody,
		"largest body of an inference request in `MIB`, up to 1024")
	flags.StringVar(&f.config.PortRange, "port-range", f.config.PortRange,
		"ports for engines, `LO-HI`, on loopback")
	flags.StringToStringVar(&f.labels, "labels", nil,
		"`key=value` labels that resources.labels of an app must match")
	flags.StringToStringVar(&f.timers, "timers", nil,
		"`name=duration` overrides of timers, for support and tests")
	flags.Lookup("labels").DefValue, flags.Lookup("timers").DefValue = "", "" // "[]" would be noise in help
	flags.StringVar(&f.config.MetricsBind, "metrics-bind", "",
		"`ADDR`, HOST:PORT, that serves metrics alone; default: at the admin API only")
	flags.StringVar(&f.config.APIKeysFile, "api-keys", "",
		"`FILE` with the API keys of the endpoint's clients, a line each: NAME KEY [models=a,b]; read again "+
			"when it changes; default: DPSERVE_API_KEYS_FILE, else clients need no key")
	flags.BoolVar(&f.config.AdminOpen, "admin-open", false,
		"whoever reaches the admin API may start programs, without a token")
	flags.BoolVar(&f.config.RouterAPI, "router-api", false,
		"the endpoint answers /workers, /add_worker and the other paths of SGLang's router, which change "+
			"attached ranks, to programs of this machine and to those with the admin token")
	flags.StringVar(&f.config.RecordTrace, "record-trace", "",
		"`FILE` for a trace of the endpoint's requests, for dpserve simulate: times, lengths and hashes, no "+
			"text; it ends at 1 GiB; if FILE exists, FILE.1 and so on")
	flags.StringVar(&f.config.TLSCert, "tls-cert", "",
		"PEM `FILE` of the certificate, with its chain, for the endpoint and the admin API; read again when "+
			"it changes; default: no TLS")
	flags.StringVar(&f.config.TLSKey, "tls-key", "", "PEM `FILE` of the private key of --tls-cert")
	flags.StringVar(&f.config.LogFormat, "log-format", f.config.LogFormat, "text or json")
	flags.StringVar(&f.config.LogLevel, "log-level", f.config.LogLevel, "debug, info, warn or error")
}

// addNode adds the flags of start and join.
func (f *nodeFlags) addNode(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.config.NodeID, "node-id", f.config.NodeID, "name of this node; default: the host's")
	flags.StringVar(&f.config.DataDir, "data-dir", "", "`folder` for state and engine logs; default: "+
		"$XDG_STATE_HOME/dpserve, else ~/.local/state/dpserve")
	flags.StringVar(&f.config.HTTPBind, "http-bind", f.config.HTTPBind, "`HOST:PORT` of the OpenAI endpoint")
	flags.StringVar(&f.config.AdminBind, "admin-bind", f.config.AdminBind,
		"`HOST:PORT` of the admin API and /metrics")
	flags.StringArrayVar(&f.config.AdminHosts, "admin-host", nil,
		"DNS `NAME` by which the admin API answers; repeatable; IP addresses and the node's name need none")
	flags.BoolVar(&f.config.InsecurePublic, "insecure-public", false,
		"allow a bind that is not loopback, without keys and TLS")
	flags.StringVar(&f.config.Advertise, "advertise", "",
		"`HOST`, an IP address or a name, of this machine for other nodes; without it the node stays alone")
	flags.IntVar(&f.config.NodePort, "node-port", f.config.NodePort, "tcp port between nodes (mutual TLS)")
	flags.IntVar(&f.config.GossipPort, "gossip-port", f.config.GossipPort,
		"tcp and udp port of the gossip between nodes (encrypted)")
	flags.StringSliceVar(&f.config.Roles, "roles", nil,
		"what this node does: control, worker, ingress; fixed when it joins")
	flags.StringVar(&f.config.Zone, "zone", "",
		"`name` of what fails together, like a rack; voters are spread over zones")
	flags.StringVar(&f.config.OnLeaseLoss, "on-lease-loss", f.config.OnLeaseLoss,
		"serve or fence: what ranks do when no leader answers")
	flags.DurationVar(&f.config.OrphanTimeout, "orphan-timeout", f.config.OrphanTimeout,
		"how long engines live without a dpserve of this node; 0: not at all")
	flags.DurationVar(&f.config.RestartGrace, "restart-grace", f.config.RestartGrace,
		"how long the cluster keeps this node's ranks over a restart of dpserve")
	f.addCommon(cmd)
	cmd.Flag("node-id").DefValue = "" // the host's name would make every help text different
	cmd.Flag("roles").DefValue = strings.Join(server.AllRoles(), ",")
}

// adaptBinds uses the advertise address for binds that are at their defaults, if it is a loopback address: so
// several nodes can run on one machine.
func (f *nodeFlags) adaptBinds(cmd *cobra.Command) {
	ip := net.ParseIP(f.config.Advertise)
	if ip == nil || !ip.IsLoopback() {
		return
	}
	for flag, bind := range map[string]*string{
		"http-bind": &f.config.HTTPBind, "admin-bind": &f.config.AdminBind,
	} {
		if _, port, err := net.SplitHostPort(*bind); err == nil && !cmd.Flags().Changed(flag) {
			*bind = net.JoinHostPort(f.config.Advertise, port)
		}
	}
}

// chooseDataDir sets the data dir of a command line without --data-dir.
func (f *nodeFlags) chooseDataDir(cmd *cobra.Command, e *env) (err error) {
	if !cmd.Flags().Changed("data-dir") {
		f.config.DataDir, err = defaultDataDir(e.getenv)
	}
	return err
}

// defaultDataDir returns the folder dpserve below the user's folder for state. The specification of the XDG
// base directories ignores a path that is not absolute.
func defaultDataDir(getenv func(string) string) (string, error) {
	if at := getenv("XDG_STATE_HOME"); filepath.IsAbs(at) {
		return filepath.Join(at, "dpserve"), nil
	}
	if home := getenv("HOME"); filepath.IsAbs(home) {
		return filepath.Join(home, ".local", "state", "dpserve"), nil
	}
	return "", problem.New(problem.InvalidArgument,
		"there is no default for --data-dir: neither XDG_STATE_HOME nor HOME is set").
		WithHint("name a folder with --data-dir, for example --data-dir /var/lib/dpserve")
}

// buildConfig returns the config that the flags describe. It checks only what the config cannot hold;
// server.Config.Validate checks the rest.
func (f *nodeFlags) buildConfig(e *env) (server.Config, error) {
	c := f.config
	c.AdminTokenFile = e.adminTokenFile
	c.APIKeysFile = cmp.Or(c.APIKeysFile, e.getenv(apiKeysVariable))
	c.Version = readBuildInfo().Version
	c.Labels = f.labels
	c.Timers = make(map[string]time.Duration, len(f.timers))
	for name, text := range f.timers {
		d, err := time.ParseDuration(text)
		if err != nil {
			return c, problem.New(problem.InvalidArgument, "--timers %s=%s: wanted a duration", name, text).
				WithHint("for example --timers %s=500ms", name)
		}
		c.Timers[name] = d
	}
	return c, nil
}

// stopAtOnce is the longest time that a node may take to stop at once. Engines get no grace then.
const stopAtOnce = 10 * time.Second

// node is the part of server.Node that up and start use. Serve blocks until its context ends, then drains;
// Kill cuts the drain.
type node interface {
	Serve(ctx context.Context) error
	Kill()
	Restart(ctx context.Context, force bool) (next string, err error)
	Close() error
	HTTPAddr() string
	AdminAddr() string
	AdminToken() string
	AdminTokenFile() string
	MetricsAddr() string
	FirstToken() (address, token string)
	Left() bool
	Refusal() error
	Totals() (requests, tokens uint64, inflight int)
}

// serving is a node whose Serve runs in a goroutine.
type serving struct {
	node
	cancel context.CancelFunc
	done   chan struct{} // closed when Serve has returned
	err    error         // of Serve; read after done
	unlink func()        // removes the link to the admin token
}

// startNode makes a node and runs it. The caller owns the node: it calls stop and Close. The node
// outlives ctx, because a drain outlives the command that was interrupted.
func startNode(ctx context.Context, e *env, c server.Config) (*serving, error) {
	if runtime.GOOS != "linux" {
		printMessage(e.io.Err, "on %s dpserve is for simulated and attached engines: it does not see what "+
			"memory an engine takes, and misses processes that leave its session", runtime.GOOS)
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c.Stop = e.sig.first
	n, err := e.newNode(c)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &serving{
		node: n, cancel: cancel, done: make(chan struct{}),
		unlink: linkAdminToken(e.getenv, n.AdminAddr(), n.AdminTokenFile()),
	}
	go func() {
		defer close(s.done)
		s.err = n.Serve(ctx)
	}()
	return s, nil
}

// Close closes the node, which commands no longer find by itself.
func (s *serving) Close() error {
	s.unlink()
	return s.node.Close()
}

// unexpectedEnd returns the error of a Serve that returned before the command asked the node to stop.
func (s *serving) unexpectedEnd() error {
	if s.err == nil || errors.Is(s.err, context.Canceled) {
		return problem.New(problem.Internal, "the node stopped by itself").WithHint("its log above says why")
	}
	return s.err
}

// stop drains the node, waits for its end and returns the command's error. A second signal stops the node at
// once.
func (s *serving) stop(sig *interrupts, scr *screen) error {
	_, _, inflight := s.Totals()
	scr.printMessage("stopping: %s in flight; Ctrl-C again stops at once", formatCount(inflight, "request"))
	s.cancel()
	select {
	case <-s.done:
		if errors.Is(s.err, context.Canceled) {
			return nil
		}
		return s.err
	case <-sig.second:
	}
	scr.printMessage("stopping at once")
	s.Kill()
	select {
	case <-s.done:
	case <-time.After(stopAtOnce):
		scr.printMessage("warning: the node does not end; its engines die with this process")
	}
	return &silentError{code: exitInterrupted}
}

// schemeOf returns the scheme of the URLs at which a node's clients and operators reach it.
func schemeOf(c *server.Config) string {
	if c.TLSCert != "" {
		return "https"
	}
	return "http"
}

// newNode makes a node in this process and sets the process's memory limit.
func newNode(c server.Config) (node, error) {
	if os.Getenv("GOMEMLIMIT") == "" { // the user decides, also with "off"
		if limit := containerMemory(os.DirFS("/")); limit > 0 {
			debug.SetMemoryLimit(limit / 10 * memoryShareTenths)
		}
	}
	if err := checkAdvertise(c.Advertise); err != nil {
		return nil, err
	}
	return server.New(c)
}

// resolveTimeout bounds the lookup of --advertise.
const resolveTimeout = 5 * time.Second

// checkAdvertise refuses a --advertise at which this machine cannot listen. Ports are not its business.
func checkAdvertise(host string) error {
	if host == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), resolveTimeout)
	defer cancel()
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(host, "0"))
	var unknown *net.DNSError
	switch {
	case err == nil:
		return l.Close()
	case errors.As(err, &unknown):
		return problem.New(problem.InvalidArgument,
			"--advertise %s: this name does not resolve here: %s", host, unknown.Err).
			WithHint("write an IP of this machine: %s", listOwnAddresses())
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return problem.New(problem.InvalidArgument, "--advertise %s is not an address of this machine", host).
			WithHint("write one that other nodes reach: %s", listOwnAddresses())
	}
	return nil // the node's own listeners say what is wrong
}

// listOwnAddresses lists the addresses of this machine's interfaces that other machines might reach.
func listOwnAddresses() string {
	addresses, err := net.InterfaceAddrs()
	var out []string
	for _, a := range addresses {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() && !n.IP.IsLoopback() {
			out = append(out, n.IP.String())
		}
	}
	if err != nil || len(out) == 0 {
		return "127.0.0.1 for nodes on this machine alone"
	}
	return joinSome(out)
}

// memoryShareTenths is the share of a container's memory, in tenths, that the Go runtime may use. The kernel
// counts memory that the runtime does not, such as socket buffers.
const memoryShareTenths = 9

// containerMemory returns the smallest memory limit in bytes of this process's control group and the groups
// above it; 0 means that there is none.
func containerMemory(root fs.FS) int64 {
	groups, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return 0
	}
	least := int64(math.MaxInt64)
	for line := range strings.Lines(string(groups)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3) // number, controllers, path
		if len(part) != 3 {
			continue
		}
		folder, file := "sys/fs/cgroup", "memory.max"
		if part[1] == "memory" { // version 1
			folder, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		} else if part[1] != "" {
			continue
		}
		for group := path.Clean("/" + part[2]); ; group = path.Dir(group) {
			text, err := fs.ReadFile(root, path.Join(folder, group, file))
			if err == nil {
				if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && n > 0 {
					least = min(least, n)
				}
			}
			if group == "/" {
				break
			}
		}
	}
	if least >= unlimitedMemory {
		return 0
	}
	return least
}

// unlimitedMemory is larger than any machine's memory: control groups of version 1 express "no limit" by a
// number near the largest one.
const unlimitedMemory = 1 << 60
