package kvevents

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// Endpoints are the sockets of one rank: exactly one of Connect and Bind, and where replays are asked. All
// are tcp://HOST:PORT.
type Endpoints struct {
	Connect string // the engine binds its publisher here
	Bind    string // the engine dials its publisher to here; host * = the node address, loopback without one
	Replay  string // the engine's ROUTER; "" = none
}

// Hosts lists the hosts that event sockets may use beside loopback. Events steer routing, so they are
// accepted from declared engines only (test/acceptance.md, SP12).
type Hosts struct {
	Node  string   // this node's advertised address: where Bind may listen; "" = loopback only
	Peers []string // hosts or addresses of declared engines
}

const schemeTCP = "tcp://"

// hostPort splits tcp://HOST:PORT.
func hostPort(endpoint string) (host, port string, err error) {
	rest, ok := strings.CutPrefix(endpoint, schemeTCP)
	if ok {
		host, port, err = net.SplitHostPort(rest)
	}
	if _, bad := strconv.ParseUint(port, 10, 16); !ok || err != nil || bad != nil {
		return "", "", problem.New(problem.InvalidArgument, "event endpoint %q is not tcp://HOST:PORT",
			endpoint).
			WithHint("other transports of engines are not supported; write the TCP form")
	}
	return host, port, nil
}

// isLoopback reports that host is this machine's loopback.
func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}

func isWildcard(host string) bool {
	if host == "*" || host == "" {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsUnspecified()
}

// peer reports whether sockets may connect to host.
func (h Hosts) peer(host string) bool {
	if isLoopback(host) || h.Node != "" && sameHost(host, h.Node) {
		return true
	}
	for _, p := range h.Peers {
		if sameHost(host, p) {
			return true
		}
	}
	return false
}

func sameHost(a, b string) bool {
	x, errX := netip.ParseAddr(a)
	y, errY := netip.ParseAddr(b)
	if errX == nil && errY == nil {
		return x.Unmap() == y.Unmap()
	}
	return strings.EqualFold(a, b)
}

// dialAddr is HOST:PORT of an endpoint that is to be dialled.
func (h Hosts) dialAddr(endpoint string) (string, error) {
	host, port, err := hostPort(endpoint)
	if err != nil {
		return "", err
	}
	if isWildcard(host) || !h.peer(host) || port == "0" {
		return "", problem.New(problem.InvalidArgument,
			"event endpoint %s is neither loopback nor a declared engine's address", endpoint).
			WithHint("name the host that the rank's url names")
	}
	return net.JoinHostPort(host, port), nil
}

// listenAddr is HOST:PORT of an endpoint that is to be bound.
func (h Hosts) listenAddr(endpoint string) (string, error) {
	host, port, err := hostPort(endpoint)
	if err != nil {
		return "", err
	}
	if host == "*" {
		if host = h.Node; host == "" {
			host = "127.0.0.1"
		}
	}
	if isWildcard(host) || !isLoopback(host) && !sameHost(host, h.Node) {
		return "", problem.New(problem.InvalidArgument,
			"event endpoint %s would listen beyond loopback and the node's address", endpoint).
			WithHint("bind tcp://127.0.0.1:PORT, or the node's advertised address for engines on other " +
				"machines")
	}
	return net.JoinHostPort(host, port), nil
}

// accepts reports whether a peer that dialled may publish here. Names are not resolved: an engine that dials
// from another host must be declared by address.
func (h Hosts) accepts(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return true // a transport inside this process
	}
	return h.peer(tcp.IP.String())
}

// Check reports the first fault of e.
func (e Endpoints) Check(h Hosts) error {
	_, err := e.resolve(h)
	return err
}

// addresses are Endpoints as host:port.
type addresses struct{ connect, bind, replay string }

func (e Endpoints) resolve(h Hosts) (a addresses, err error) {
	if (e.Connect == "") == (e.Bind == "") {
		return a, problem.New(problem.InvalidArgument,
			"event endpoints of a rank: want exactly one of connect and bind")
	}
	if e.Connect != "" {
		a.connect, err = h.dialAddr(e.Connect)
	} else {
		a.bind, err = h.listenAddr(e.Bind)
	}
	if err == nil && e.Replay != "" {
		a.replay, err = h.dialAddr(e.Replay)
	}
	if err != nil {
		return addresses{}, fmt.Errorf("event endpoints: %w", err)
	}
	return a, nil
}

// maxSources bounds the answer of /kv_event_sources.
const (
	maxSources     = 4096
	maxSourcesBody = 1 << 20
)

// Source is one rank's entry in the engine's GET /kv_event_sources, rank offset applied.
type Source struct {
	Enabled        bool    `json:"enable_kv_cache_events"`
	Publisher      string  `json:"publisher"`
	Endpoint       string  `json:"endpoint"`
	ReplayEndpoint *string `json:"replay_endpoint"`
	BufferSteps    int     `json:"buffer_steps"`
	HWM            int     `json:"hwm"`
	MaxQueueSize   int     `json:"max_queue_size"`
	Topic          string  `json:"topic"`
}

// publishes reports that the source has a ZeroMQ publisher.
func (s Source) publishes() bool { return s.Enabled && s.Publisher == "zmq" }

// binds reports whether the engine's PUB binds, by the engine's own rule.
func (s Source) binds() bool {
	return strings.Contains(s.Endpoint, "*") || strings.Contains(s.Endpoint, "::") ||
		strings.HasPrefix(s.Endpoint, "ipc://") ||
		strings.HasPrefix(s.Endpoint, "inproc://")
}

// ParseSources reads the body of GET /kv_event_sources: entries by global rank.
func ParseSources(body []byte) (map[int]Source, error) {
	if len(body) > maxSourcesBody {
		return nil, problem.New(problem.Upstream, "/kv_event_sources: %d bytes are too many", len(body))
	}
	var byText map[string]Source
	if err := json.Unmarshal(body, &byText); err != nil {
		return nil, problem.New(problem.Upstream, "/kv_event_sources: %w", err)
	}
	if len(byText) > maxSources {
		return nil, problem.New(problem.Upstream, "/kv_event_sources lists %d ranks: at most %d are possible",
			len(byText), maxSources)
	}
	out := make(map[int]Source, len(byText))
	for text, s := range byText {
		rank, err := strconv.Atoi(text)
		if err != nil || rank < 0 {
			return nil, problem.New(problem.Upstream, "/kv_event_sources: %q is no rank", text)
		}
		out[rank] = s
	}
	return out, nil
}

// Discovered holds a subscription's settings as the engine reports them.
type Discovered struct {
	Endpoints Endpoints
	Topic     string
}

// Discover finds the sockets of a rank that was attached without declared ones. host is the engine's, from
// its URL: * reads as it, any other host is refused. ok is false where the engine publishes nothing for that
// rank. rank is the engine's own number, or where it has no such number the place among its ranks; -1 = the
// only one there is.
func Discover(sources map[int]Source, rank int, host string, hosts Hosts) (d Discovered, ok bool, err error) {
	if rank < 0 && len(sources) == 1 {
		rank = slices.Collect(maps.Keys(sources))[0]
	}
	if _, found := sources[rank]; !found && rank >= 0 && rank < len(sources) { // the place behind the URL
		rank = slices.Sorted(maps.Keys(sources))[rank]
	}
	s, found := sources[rank]
	if !found || !s.publishes() {
		return Discovered{}, false, nil
	}
	hosts.Peers = append(slices.Clone(hosts.Peers), host)
	d.Topic = s.Topic
	if s.binds() {
		d.Endpoints.Connect, err = onHost(s.Endpoint, host)
	} else {
		d.Endpoints.Bind = s.Endpoint // the engine dials, so the socket must be ours
	}
	if err == nil && s.ReplayEndpoint != nil && *s.ReplayEndpoint != "" {
		d.Endpoints.Replay, err = onHost(*s.ReplayEndpoint, host)
	}
	if err == nil {
		err = d.Endpoints.Check(hosts)
	}
	if err != nil {
		return Discovered{}, false, fmt.Errorf("rank %d of /kv_event_sources: %w", rank, err)
	}
	return d, true, nil
}

// onHost replaces a wildcard by the engine's host and refuses every other one that is not loopback beside a
// loopback engine.
func onHost(endpoint, host string) (string, error) {
	h, port, err := hostPort(endpoint)
	if err != nil {
		return "", err
	}
	switch {
	case isWildcard(h), sameHost(h, host):
	case isLoopback(h) && isLoopback(host):
	default:
		return "", problem.New(problem.Upstream, "the engine names %s, which is not on its host %s", endpoint,
			host).
			WithHint("declare kv_events for the rank if it is meant")
	}
	return schemeTCP + net.JoinHostPort(host, port), nil
}

// Verify compares the endpoints that a launched engine reports with its flags; a difference is a start
// failure. pub is the address that the engine dials, replay the one that it binds.
func Verify(sources map[int]Source, rank int, pub, replay string) error {
	s, ok := sources[rank]
	switch {
	case !ok || !s.publishes():
		return problem.New(problem.Upstream,
			"the engine publishes no kv events for rank %d, though its command asks for them", rank)
	case s.Endpoint != pub:
		return problem.New(problem.Upstream, "the engine publishes kv events of rank %d on %s instead of %s",
			rank, s.Endpoint, pub)
	case s.ReplayEndpoint == nil || *s.ReplayEndpoint != replay:
		got := "nothing"
		if s.ReplayEndpoint != nil {
			got = *s.ReplayEndpoint
		}
		return problem.New(problem.Upstream, "the engine replays kv events of rank %d on %s instead of %s",
			rank, got, replay)
	}
	return nil
}
