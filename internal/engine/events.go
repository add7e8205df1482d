package engine

import (
	"encoding/json"
	"net/url"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/routing"
)

// EventSource locates the KV events of one rank: exactly one of Connect and Bind (the engine dials). All are
// tcp://HOST:PORT.
type EventSource struct {
	Connect string
	Bind    string
	Replay  string // "" = none
	Host    string // where the engine runs; publishers on other hosts are refused
}

// WantsEvents reports whether the engines of a should publish KV events: its policy reads the KV index, its
// file does not forbid them, its kind can, and its engines cache prefixes.
func WantsEvents(a *app.Application) bool {
	if a.Engine.KVEvents == app.KVEventsOff || a.Engine.Family == app.FamilyOpenAI || CachingOff(a) {
		return false
	}
	p, err := a.Routing.NewPolicy()
	if err != nil {
		return false // refused when it was deployed
	}
	needs := routing.NeedsOf(p)
	return needs.Hits && !needs.Approximate
}

// CachingOff reports that engine.args start the engines of a without prefix caching. Of several flags the
// last one counts, as in the engines.
func CachingOff(a *app.Application) bool {
	off := false
	for _, arg := range a.Engine.Args {
		on, ok := arg.Value.(bool)
		switch name := flagName(arg.Name); {
		case !ok:
		case name == "enable-prefix-caching":
			off = !on
		case name == "no-enable-prefix-caching", name == "disable-radix-cache":
			off = on
		}
	}
	return off
}

// AskedBlockSize is the tokens per KV block that engine.args ask for, which an engine need not keep to; 0 =
// they do not say.
func AskedBlockSize(a *app.Application) int {
	for _, arg := range a.Engine.Args {
		if n, ok := arg.Value.(int64); ok && flagName(arg.Name) == "block-size" && n > 0 &&
			n <= maxBlockSize {
			return int(n)
		}
	}
	return 0
}

// eventsConfig is --kv-events-config as dpserve writes it. SGLang has no key to enable events.
type eventsConfig struct {
	Enabled   bool   `json:"enable_kv_cache_events,omitempty"`
	Publisher string `json:"publisher"`
	Endpoint  string `json:"endpoint"`        // without * the engine dials
	Replay    string `json:"replay_endpoint"` // the engine binds
	Topic     string `json:"topic"`
}

// eventFlags make a launched engine publish. It gets the ports of index 0 and adds its own rank number, which
// is 0 for an independent rank.
func eventFlags(s *Spec) ([]string, error) {
	if !WantsEvents(s.App) {
		return nil, nil
	}
	p := s.Ports()
	b, err := json.Marshal(eventsConfig{
		Enabled: s.App.Engine.Kind != app.KindSGLang, Publisher: "zmq", Endpoint: s.tcp(p.KV(0)),
		Replay: s.tcp(p.Replay(0)),
	})
	return []string{"--kv-events-config", string(b)}, err
}

// launchedEvents is where the events of a launched rank arrive; nil if it publishes none.
func launchedEvents(s *Spec) *EventSource {
	if !WantsEvents(s.App) {
		return nil
	}
	p := s.Ports()
	return &EventSource{Bind: s.tcp(p.KV(s.Index())), Replay: s.tcp(p.Replay(s.Index())), Host: s.host()}
}

// declaredEvents is an attached rank's event source from the app file; nil if the file has none or the
// application reads no events.
func declaredEvents(a *app.Application, r *app.AttachRank) *EventSource {
	if r.KVEvents == nil || !WantsEvents(a) {
		return nil
	}
	return &EventSource{
		Connect: r.KVEvents.Connect, Bind: r.KVEvents.Bind, Replay: r.KVEvents.Replay,
		Host: HostOf(r.URL),
	}
}

// HostOf is the host of an engine's URL, without port and brackets; "" if there is none.
func HostOf(base string) string {
	u, err := url.Parse(base)
	if err != nil {
		return ""
	}
	return u.Hostname()
}
