package kvevents

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

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
// rank. rank is the engine's own number; -1 = the only one there is.
func Discover(sources map[int]Source, rank int, host string, hosts Hosts) (d Discovered, ok bool, err error) {
	if rank < 0 && len(sources) == 1 {
		rank = slices.Collect(maps.Keys(sources))[0]
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
			"the engine publishes no kv events for rank %d, though it was told to", rank)
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
