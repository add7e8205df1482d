// Package server assembles the packages into one running node. Commands and whole-system tests start nodes
// here and nowhere else.
//
// It passes functions of one package to another and decides nothing. New builds: peering, the store (a member
// of consensus, or a Watcher), the worker, the servers; Listen binds the ports of clients and operators,
// Serve answers until the end, Close also works on a partly built node. A node without --advertise has no
// peering and no services. The certificate is renewed from before the store is ready on. At SIGTERM:
// readiness off, leadership handed over, engines drained, servers closed; the lease is renewed until the
// engines are gone.
package server

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"maps"
	"math"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/controller"
	"github.com/dpserve/dpserve/actors/dpserver"
	"github.com/dpserve/dpserve/actors/ingress"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/devices"
	"github.com/dpserve/dpserve/internal/doctor"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/nearest"
	"github.com/dpserve/dpserve/internal/noderpc"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Defaults of a node. docs/cluster.md lists the ports.
const (
	DefaultHTTPBind  = "127.0.0.1:8000"
	DefaultAdminBind = "127.0.0.1:8265"
	DefaultPortRange = "20000-29999"
	DefaultSlots     = 64
	DefaultNodePort  = 7947
	DefaultGossip    = 7946
	DefaultMaxBody   = ingress.DefaultMaxBody >> 20 // MiB
	LargestMaxBody   = ingress.LargestMaxBody >> 20 // MiB
	MaxConns         = ingress.DefaultMaxConns      // client connections that a node accepts

	DefaultOrphanTimeout = 10 * time.Minute
	DefaultRestartGrace  = 2 * time.Minute
	longestRestartGrace  = time.Hour
)

// Limits of the token that the first start of a cluster prints.
const (
	FirstTokenTTL  = time.Hour
	FirstTokenUses = 8
)

// Join says which cluster a node joins.
type Join struct {
	Address string // HOST:PORT of the node port of a member
	Token   string
}

// Config describes one node.
type Config struct {
	NodeID         string   // default: host name
	DataDir        string   // raft log, epochs, engine logs; "" = nothing survives a restart
	HTTPBind       string   // OpenAI endpoint
	AdminBind      string   // admin REST and /metrics
	AdminHosts     []string // further names in Host headers that the admin port accepts
	APIKeysFile    string   // API keys of the endpoint's clients; "" = it wants none
	AdminOpen      bool     // the admin API wants no token
	RouterAPI      bool     // HTTPBind answers the paths of SGLang's router, which change attached ranks
	AdminTokenFile string   // of the admin API; "" = admin.token in DataDir, made if it is missing
	RecordTrace    string   // file for a trace of the requests at HTTPBind; "" = none is recorded
	TLSCert        string   // file for HTTPBind and AdminBind; "" = no TLS; with TLSKey
	TLSKey         string
	MetricsBind    string                   // /metrics without the admin API; "" = only at AdminBind
	MaxBody        int                      // MiB of one inference request's body; memory use grows with it
	PortRange      string                   // LO-HI, ports of engines
	Slots          int                      // ranks without devices
	GPUs           string                   // auto, none or "", a count, or a list like 0-3,6
	Labels         map[string]string        // matched by resources.labels
	Timers         map[string]time.Duration // overrides by name, for support and tests
	Advertise      string                   // IP or host for other nodes; "" = this node stands alone
	NodePort       int                      // port at Advertise
	GossipPort     int                      // port at Advertise
	Roles          []string                 // control, worker, ingress; nil = those of the join, or all
	Zone           string                   // failure domain
	OnLeaseLoss    string                   // serve | fence
	Shims          bool                     // engines outlive this process, and its next one adopts them
	OrphanTimeout  time.Duration            // with Shims: an engine lives so long without a node
	RestartGrace   time.Duration            // how long the leader keeps the grants over a Restart
	Stop           <-chan struct{}          // New gives up when it is closed; nil = never
	Join           *Join                    // nil = a cluster of its own, or the cluster of the data dir
	InsecurePublic bool                     // allow a public bind without keys and TLS
	Ephemeral      bool                     // use port 0 if a port is taken; small raft segments
	Executable     string                   // program that starts simulated engines; default: this program
	Program        string                   // what a Restart executes: the path by which this was started
	Version        string
	LogWriter      io.Writer
	LogFormat      string // text | json
	LogLevel       string // debug | info | warn | error

	Network  Network                                 // nil = TCP; else everything but gossip uses it
	Launcher node.Launcher                           // starts engines; nil = processes
	Resolver controller.Resolver                     // of services; nil = that of the machine
	Stores   func(cluster.LogStore) cluster.LogStore // wraps the log store of consensus; nil = no wrapper
	Replace  func(path string, data []byte) error    // writes files that change; nil = diskfile.Replace
}

// DefaultConfig returns the configuration of `dpserve start` without flags. Only the data dir is missing.
func DefaultConfig() Config {
	host, err := os.Hostname()
	if err != nil {
		host = "node"
	}
	return Config{
		NodeID: host, HTTPBind: DefaultHTTPBind, AdminBind: DefaultAdminBind,
		NodePort: DefaultNodePort, GossipPort: DefaultGossip, OnLeaseLoss: "serve",
		OrphanTimeout: DefaultOrphanTimeout, RestartGrace: DefaultRestartGrace,
		MaxBody: DefaultMaxBody, PortRange: DefaultPortRange, Slots: DefaultSlots, GPUs: autoGPUs,
		LogWriter: os.Stderr, LogFormat: "text", LogLevel: "info",
	}
}

// Validate checks everything that needs no bind. Errors are problem.InvalidArgument and name the flag.
func (c *Config) Validate() error {
	for _, b := range []struct {
		flag, addr string
		guarded    bool // strangers who reach it can do nothing
	}{
		{"--http-bind", c.HTTPBind, c.APIKeysFile != ""},
		{"--admin-bind", c.AdminBind, !c.AdminOpen && c.TLSCert != ""},
		{"--metrics-bind", c.MetricsBind, false},
	} {
		if b.flag == "--metrics-bind" && b.addr == "" {
			continue
		}
		if err := c.checkBind(b.flag, b.addr, b.guarded); err != nil {
			return err
		}
	}
	for _, name := range c.AdminHosts {
		if name == "" || strings.ContainsAny(name, "/:*@ \t\n") {
			return problem.New(problem.InvalidArgument,
				"--admin-host %q: want a host name, without scheme and port", name).
				WithHint("for example --admin-host dpserve.example.com; IP addresses need none")
		}
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		return problem.New(problem.InvalidArgument, "--tls-cert and --tls-key belong together").
			WithHint("give both files, or none")
	}
	if _, _, err := parsePortRange(c.PortRange); err != nil {
		return err
	}
	if c.MaxBody < 1 || c.MaxBody > LargestMaxBody {
		return problem.New(problem.InvalidArgument, "--max-body %d: want 1 to %d MiB", c.MaxBody,
			LargestMaxBody).
			WithHint("it bounds one request; images that are larger belong behind a URL that the engine " +
				"can fetch")
	}
	if c.Slots < 0 {
		return problem.New(problem.InvalidArgument, "--slots %d: must not be negative", c.Slots).
			WithHint("--slots 0 takes no ranks without devices")
	}
	if _, err := parseGPUs(c.GPUs); err != nil {
		return err
	}
	if c.OrphanTimeout < 0 || c.RestartGrace < 0 || c.RestartGrace > longestRestartGrace {
		return problem.New(problem.InvalidArgument,
			"--orphan-timeout %s, --restart-grace %s: want times from 0, and a grace up to %s",
			c.OrphanTimeout, c.RestartGrace, longestRestartGrace).
			WithHint("the defaults are %s and %s", DefaultOrphanTimeout, DefaultRestartGrace)
	}
	if err := c.validateCluster(); err != nil {
		return err
	}
	if err := cmp.Or(
		nearest.CheckFlag("--on-lease-loss", c.OnLeaseLoss, string(node.Serve), string(node.Fence)),
		nearest.CheckFlag("--log-format", c.LogFormat, "text", "json"),
		nearest.CheckFlag("--log-level", c.LogLevel, "debug", "info", "warn", "error"),
	); err != nil {
		return err
	}
	if strings.ContainsAny(c.NodeID, "/ \t\n") || c.NodeID == "" {
		return problem.New(problem.InvalidArgument,
			"--node-id %q: must be a name without spaces and slashes", c.NodeID).
			WithHint("for example --node-id gpu-1")
	}
	for name, d := range c.Timers {
		if d <= 0 {
			return problem.New(problem.InvalidArgument, "--timers %s=%s: must be positive", name, d).
				WithHint("for example --timers %s=500ms", name)
		}
		if timersByName[name] == nil {
			return problem.New(problem.InvalidArgument, "--timers: unknown timer %q", name).
				WithHint("timers are %s", strings.Join(slices.Sorted(maps.Keys(timersByName)), ", "))
		}
	}
	return nil
}

func (c *Config) checkBind(flag, addr string, guarded bool) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return problem.New(problem.InvalidArgument, "%s %q: want HOST:PORT", flag, addr).
			WithHint("for example %s 127.0.0.1:8000", flag)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return problem.New(problem.InvalidArgument, "%s %q: the port must be 0 to 65535", flag, addr).
			WithHint("0 takes any free port")
	}
	if c.InsecurePublic || guarded || isLoopback(host) {
		return nil
	}
	if c.Ephemeral {
		return problem.New(problem.InvalidArgument, "%s %s is reachable from outside", flag, addr).
			WithHint("`dpserve up` binds loopback only; `dpserve start` can bind more")
	}
	if flag == "--admin-bind" && !c.AdminOpen {
		return problem.New(problem.InvalidArgument, "%s %s is reachable from outside, without TLS", flag,
			addr).
			WithHint("give it TLS with --tls-cert and --tls-key, or add --insecure-public: the admin token " +
				"then passes in clear text, and whoever has it may start programs")
	}
	hint := "bind 127.0.0.1 behind your own front end, or add --insecure-public if everyone who reaches " +
		"this port may use it"
	if flag == "--http-bind" {
		hint = "ask clients for a key with --api-keys FILE, " + hint
	}
	return problem.New(problem.InvalidArgument,
		"%s %s is reachable from outside, without keys and without TLS", flag, addr).WithHint("%s", hint)
}

// resources returns the resources of this node that placement may use, without devices.
func (c *Config) resources() (state.Resources, error) {
	lo, hi, err := parsePortRange(c.PortRange)
	if err != nil {
		return state.Resources{}, err
	}
	o := state.Resources{Slots: c.Slots, Labels: c.Labels, PortLo: lo, PortHi: hi}
	if !slices.Contains(c.Roles, string(state.RoleWorker)) {
		o.Slots = 0
	}
	return o, nil
}

// AllRoles returns the roles of a node without --roles.
func AllRoles() []string {
	return []string{string(state.RoleControl), string(state.RoleWorker), string(state.RoleIngress)}
}

func (c *Config) validateCluster() error {
	for _, r := range c.Roles {
		if !slices.Contains(AllRoles(), r) {
			return problem.New(problem.InvalidArgument, "--roles: unknown role %q", r).
				WithHint("roles are control, worker and ingress")
		}
	}
	control := c.Roles == nil || slices.Contains(c.Roles, string(state.RoleControl))
	switch {
	case c.Roles != nil && len(c.Roles) == 0:
		return problem.New(problem.InvalidArgument, "--roles is empty").
			WithHint("roles are control, worker and ingress")
	case c.Join != nil && isLoopback(c.Advertise) && !isLoopbackAddress(c.Join.Address):
		return problem.New(problem.InvalidArgument,
			"--advertise %s is reachable on this machine alone, and the cluster is on others", c.Advertise).
			WithHint("leave --advertise out, or write this machine's IP")
	case c.Advertise == "" && c.Join != nil:
		return problem.New(problem.InvalidArgument, "a node that joins must be reachable").
			WithHint("add --advertise with this machine's IP")
	case c.Advertise == "" && !control:
		return problem.New(problem.InvalidArgument, "a node that stands alone needs role control").
			WithHint("add it to --roles, or --advertise and join a cluster")
	case c.Advertise != "" && !isAdvertisable(c.Advertise):
		return problem.New(problem.InvalidArgument,
			"--advertise %q: want an IP or host name that other nodes reach, without a port", c.Advertise).
			WithHint("for example --advertise 10.0.0.1")
	}
	for _, p := range []struct {
		flag string
		port int
	}{{"--node-port", c.NodePort}, {"--gossip-port", c.GossipPort}} {
		if p.port < 0 || p.port > 65535 {
			return problem.New(problem.InvalidArgument, "%s %d: the port must be 0 to 65535", p.flag, p.port).
				WithHint("0 takes any free port")
		}
	}
	return nil
}

// isLoopbackAddress reports whether a HOST:PORT is on this machine.
func isLoopbackAddress(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err != nil || isLoopback(host) // a malformed address fails later with its own error
}

// isAdvertisable reports whether other machines could dial a host.
func isAdvertisable(host string) bool {
	ip := net.ParseIP(host)
	if ip == nil {
		return !strings.ContainsAny(host, ":/ \t\n")
	}
	return !ip.IsUnspecified() && !ip.IsMulticast()
}

func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// OfferedGPUs returns the devices that --gpus names; all says that it offers those that are found.
func (c *Config) OfferedGPUs() (named []int, all bool) {
	named, err := parseGPUs(c.GPUs)
	return named, err == nil && c.GPUs == autoGPUs
}

// EnginePorts returns the first and the last port of engines.
func (c *Config) EnginePorts() (lo, hi int, err error) { return parsePortRange(c.PortRange) }

func parsePortRange(s string) (lo, hi int, err error) {
	a, b, ok := strings.Cut(s, "-")
	if ok {
		lo, err = strconv.Atoi(a)
		if err == nil {
			hi, err = strconv.Atoi(b)
		}
	}
	if !ok || err != nil || lo < 1024 || hi > 65535 || hi-lo < 15 {
		return 0, 0, problem.New(problem.InvalidArgument,
			"--port-range %q: want LO-HI between 1024 and 65535, at least 16 ports", s).
			WithHint("the default is %s", DefaultPortRange)
	}
	return lo, hi, nil
}

// timers holds the timers of every package. A zero field means the package's default.
type timers struct {
	node       node.Timers
	replica    dpserver.Timers
	assigner   rankassigner.Timers
	controller controller.Timers
	ingress    ingress.Timers
	stream     noderpc.StreamTimers
	gossip     membership.Timers
	devices    devices.Timers
}

// durations points to the fields that one name of --timers sets.
type durations = []*time.Duration

// timersByName maps the names of --timers to fields. Each package owns its defaults.
var timersByName = map[string]func(t *timers) durations{
	"start_deadline": func(t *timers) durations { return durations{&t.node.StartupTimeout} },
	"probe":          func(t *timers) durations { return durations{&t.node.Probe, &t.replica.Probe} },
	"kill_grace":     func(t *timers) durations { return durations{&t.node.KillGrace} },
	"verify_named":   func(t *timers) durations { return durations{&t.node.VerifyNamed} },
	"rendezvous": func(t *timers) durations {
		return durations{&t.node.Rendezvous, &t.assigner.Rendezvous}
	},
	"ticket_unused":    func(t *timers) durations { return durations{&t.replica.TicketLapse} },
	"scrape":           func(t *timers) durations { return durations{&t.replica.Scrape} },
	"kv_silence":       func(t *timers) durations { return durations{&t.replica.Silence} },
	"ejection_backoff": func(t *timers) durations { return durations{&t.replica.EjectionBackoff} },
	"start_retry":      func(t *timers) durations { return durations{&t.controller.Unit.StartRetry} },
	"failed_retry":     func(t *timers) durations { return durations{&t.controller.Unit.FailedRetry} },
	"restart_min":      func(t *timers) durations { return durations{&t.controller.Unit.RestartMin} },
	"restart_max":      func(t *timers) durations { return durations{&t.controller.Unit.RestartMax} },
	"restart_reset":    func(t *timers) durations { return durations{&t.controller.Unit.RestartReset} },
	"resend":           func(t *timers) durations { return durations{&t.controller.Unit.Resend} },
	"read_header":      func(t *timers) durations { return durations{&t.ingress.ReadHeader} },
	"body_stall":       func(t *timers) durations { return durations{&t.ingress.BodyStall} },
	"reservation":      func(t *timers) durations { return durations{&t.ingress.Reservation} },
	"lease_ttl": func(t *timers) durations {
		return durations{&t.node.LeaseTTL, &t.controller.LeaseTTL}
	},
	"lease_renew":      func(t *timers) durations { return durations{&t.node.LeaseRenew} },
	"lease_regrant":    func(t *timers) durations { return durations{&t.controller.Regrant} },
	"stream_heartbeat": func(t *timers) durations { return durations{&t.stream.Heartbeat} },
	"stream_suspect":   func(t *timers) durations { return durations{&t.stream.Suspect} },
	"stream_out":       func(t *timers) durations { return durations{&t.stream.Out} },
	"gossip_probe":     func(t *timers) durations { return durations{&t.gossip.Probe} },
	"gossip_timeout":   func(t *timers) durations { return durations{&t.gossip.ProbeTimeout} },
	"seed_rejoin":      func(t *timers) durations { return durations{&t.gossip.Rejoin} },
	"slow_reader":      func(t *timers) durations { return durations{&t.ingress.SlowReader} },
	"device_probe":     func(t *timers) durations { return durations{&t.devices.Probe} },
	"device_reread":    func(t *timers) durations { return durations{&t.devices.Reread} },
	"device_wait":      func(t *timers) durations { return durations{&t.node.DeviceWait} },
}

func (c *Config) timers() *timers {
	t := &timers{}
	for name, d := range c.Timers {
		for _, field := range timersByName[name](t) {
			*field = d
		}
	}
	return t
}

// Network replaces TCP for a node, so that whole nodes run in one process. A dial to an address without a
// listener must fail as net's does (a *net.OpError of op "dial"). Safe for concurrent use.
type Network interface {
	Listen(addr string) (net.Listener, error)
	DialContext(ctx context.Context, network, addr string) (net.Conn, error)
}

// dialer returns the dialer for engines and for the node port; nil = TCP.
func (c *Config) dialer() func(ctx context.Context, network, addr string) (net.Conn, error) {
	if c.Network == nil {
		return nil
	}
	return c.Network.DialContext
}

// probes returns the transport for health probes of engines.
func (c *Config) probes() *http.Transport {
	t := engine.NewTransport()
	if c.Network != nil {
		t.DialContext = c.Network.DialContext
	}
	return t
}

// bindTest reports whether an engine's port can be bound; nil = the node asks TCP.
func (c *Config) bindTest() func(port int) error {
	if c.Network == nil {
		return nil
	}
	return func(port int) error {
		l, err := c.Network.Listen(net.JoinHostPort(c.engineHost(), strconv.Itoa(port)))
		if err != nil {
			return err
		}
		return l.Close()
	}
}

// dialEvents returns the dialer for event sockets that engines bind; nil = TCP.
func (c *Config) dialEvents() func(ctx context.Context, addr string) (net.Conn, error) {
	if c.Network == nil {
		return nil
	}
	return func(ctx context.Context, addr string) (net.Conn, error) {
		return c.Network.DialContext(ctx, "tcp", addr)
	}
}

// listenEvents returns the listener of the node port and of event sockets that engines dial; nil = TCP.
func (c *Config) listenEvents() func(ctx context.Context, addr string) (net.Listener, error) {
	if c.Network == nil {
		return nil
	}
	return func(_ context.Context, addr string) (net.Listener, error) { return c.Network.Listen(addr) }
}

// engineHost is the address where engines listen: loopback, or the advertised address if that is a loopback
// address too, so that several nodes on one machine do not share ports.
func (c *Config) engineHost() string {
	if ip := net.ParseIP(c.Advertise); ip != nil && ip.IsLoopback() {
		return c.Advertise
	}
	return engine.Loopback
}

// leastConnsShare is the share (1/leastConnsShare) of the limit of open files that a node accepts as client
// connections, however many slots it has: few nodes use all their slots.
const leastConnsShare = 8

// maxConns is how many client connections a node accepts whose process may have limit files open. Without
// it, a node with a low limit would accept connections until it has no file left for the admin port, for an
// engine, or for a log. The reserve for those is the one that `dpserve doctor` names. maxConns logs a limit
// that allows fewer connections than MaxConns.
func maxConns(log *slog.Logger, limit uint64, slots int) int {
	files := doctor.Files{Limit: limit, Streams: MaxConns, Ranks: slots}
	conns := max(files.Accepted(), min(MaxConns, int(min(limit, math.MaxInt)/leastConnsShare)))
	if conns == MaxConns {
		return conns
	}
	report := log.Info
	if conns < doctor.FewestStreams {
		report = log.Warn
	}
	report("the limit of open files allows fewer client connections; raise it (ulimit -n, LimitNOFILE)",
		slog.Uint64("limit", limit), slog.Int("reserved", files.Reserve()),
		slog.Int("connections", conns), slog.Int("wanted_limit", files.Needed()))
	return conns
}
