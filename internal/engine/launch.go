// Package engine starts engines (launch profiles) and queries them (Client: health, progress, settings). Each
// package below it holds one engine kind or one wire format.
package engine

import (
	"cmp"
	"errors"
	"net"
	"sort"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// ErrNextVersion: this version accepts the engine kind in a file but cannot launch it.
var ErrNextVersion = errors.New("comes with the next version")

// Spec is the input of a launch profile for one rank.
type Spec struct {
	App        *app.Application
	Group      int
	Rank       int    // number in the group, as granted
	Base       int    // first port of the unit's block on this node
	Host       string // where the engine listens and is reached; "" = Loopback
	Devices    []int  // devices of the rank; empty: none
	Executable string // path of this program, which is also the simulated engine
	Rank0Addr  string // lockstep: host of rank 0's rendezvous
	Rank0Port  int    // lockstep: its port
	GroupKey   string // lockstep: a secret of the ranks of one start; "" = none
}

// Launch is a rendered start: the command to execute and the engine's address. An attached engine has no
// Argv.
type Launch struct {
	Argv []string // Argv[0] is the program
	Env  []string // the whole environment, KEY=VALUE
	URL  string   // http://host:port, no path

	// where its KV events are; nil: it publishes none, or (attach) the file does not name them
	Events *EventSource
}

// Ports is the layout of the block of s.
func (s *Spec) Ports() Ports {
	if s.App.DataParallel.Coupling == app.Lockstep {
		return PortsOf(s.Base, s.App.DataParallel.DPSize)
	}
	return PortsOf(s.Base, 1)
}

// host is where the engine listens.
func (s *Spec) host() string { return cmp.Or(s.Host, Loopback) }

func (s *Spec) hostPort(port int) string { return net.JoinHostPort(s.host(), strconv.Itoa(port)) }

// Index is the rank's number inside its unit: what the block's offsets count.
func (s *Spec) Index() int {
	if s.App.DataParallel.Coupling == app.Lockstep {
		return s.Rank
	}
	return 0
}

// profile renders one engine kind.
type profile func(s *Spec, environ []string) (Launch, error)

// profiles is the one table of engine kinds.
func profiles() map[app.Kind]profile {
	return map[app.Kind]profile{
		app.KindSim:    simProfile,
		app.KindVLLM:   nextVersion,
		app.KindSGLang: nextVersion,
		app.KindAttach: attachProfile,
	}
}

// Render returns the launch of one rank. environ is this process's environment (os.Environ); the engine gets
// only the variables that the profile names. Errors: problem.InvalidArgument wrapping ErrNextVersion, or
// naming a rank the app does not declare.
func Render(s *Spec, environ []string) (Launch, error) {
	p, ok := profiles()[s.App.Engine.Kind]
	if !ok {
		return Launch{}, problem.New(problem.InvalidArgument, "unknown engine kind %q", s.App.Engine.Kind)
	}
	return p(s, environ)
}

func nextVersion(s *Spec, _ []string) (Launch, error) {
	return Launch{}, problem.New(problem.InvalidArgument, "launching engine kind %s %w", s.App.Engine.Kind,
		ErrNextVersion).
		WithHint("write engine.kind: sim to try the file without GPUs, or start the engines yourself and " +
			"use kind: attach")
}

func attachProfile(s *Spec, _ []string) (Launch, error) {
	r, err := AttachedRank(s.App, s.Group, s.Rank)
	if err != nil {
		return Launch{}, err
	}
	return Launch{URL: r.URL, Events: declaredEvents(s.App, &r)}, nil
}

// AttachedRank finds the entry of engine.ranks that stands for a rank.
func AttachedRank(a *app.Application, group, rank int) (app.AttachRank, error) {
	if r := a.Engine.Rank(group, rank); r != nil {
		return *r, nil
	}
	return app.AttachRank{}, problem.New(problem.InvalidArgument,
		"app %s declares no engine for rank %d of group %d", a.Name, rank, group).
		WithHint("add it to engine.ranks or lower data_parallel.dp_size")
}

// inherited are the variables of dpserve's own environment that a simulated engine gets: paths of programs,
// home and temporary files, time zone and language. It does not get the rest: tokens, proxies (prompts must
// not pass through one), and settings of other engines.
func inherited() []string {
	return []string{"PATH", "HOME", "USER", "TMPDIR", "TZ", "LANG", "LC_ALL", "GOCOVERDIR"}
}

// stripped are prefixes of variables that no engine gets. vLLM reads its data-parallel rank from VLLM_DP_*,
// and dpserve assigns the ranks: an inherited value would name another rank.
func stripped() []string { return []string{"VLLM_DP_"} }

// environment builds an engine's environment, sorted: the inherited part of environ, then own, then the app's
// engine.env, later ones winning.
func environment(environ, own []string, extra map[string]string) []string {
	vars := map[string]string{}
	keep := map[string]bool{}
	for _, k := range inherited() {
		keep[k] = true
	}
	for _, kv := range environ {
		if k, v, ok := strings.Cut(kv, "="); ok && keep[k] {
			vars[k] = v
		}
	}
	for _, kv := range own {
		k, v, _ := strings.Cut(kv, "=")
		vars[k] = v
	}
	for k, v := range extra {
		vars[k] = v
	}
	return join(vars)
}

func join(vars map[string]string) []string {
	out := make([]string, 0, len(vars))
	for k, v := range vars {
		if !hasAnyPrefix(k, stripped()) {
			out = append(out, k+"="+v)
		}
	}
	sort.Strings(out)
	return out
}

func hasAnyPrefix(s string, prefixes []string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return false
}

// Ports is a unit's port block on a node. Offsets, with D = dp_size of a lockstep unit, 1 of an independent
// one: HTTP 0…D−1 · KV PUB D… · KV replay 2D… · side channel 3D… · bootstrap 4D… · rpc / dist-init 5D. Rank
// is the rank's number in the unit.
type Ports struct {
	base, size int
}

// PortsOf lays out the block that begins at base for a unit of dpSize ranks.
func PortsOf(base, dpSize int) Ports { return Ports{base: base, size: dpSize} }

// HTTP is the port of a rank's API.
func (p Ports) HTTP(rank int) int { return p.base + rank }

// KV is where a rank's engine publishes its KV events to: the engine dials, its DPServer listens.
func (p Ports) KV(rank int) int { return p.base + p.size + rank }

// Replay is where a rank's engine answers for KV events that were missed.
func (p Ports) Replay(rank int) int { return p.base + 2*p.size + rank }

// RPC is where rank 0 of a lockstep unit meets the others.
func (p Ports) RPC() int { return p.base + 5*p.size }

// Bound lists the ports that the engines of the given ranks bind in this version: their API, the replay
// socket if they publish KV events, and the rendezvous if rank 0 is one of them in a unit of several. They
// are bind-tested before a start and verified free after an end.
func (p Ports) Bound(events bool, ranks ...int) []int {
	var out []int
	for _, r := range ranks {
		out = append(out, p.HTTP(r))
		if events {
			out = append(out, p.Replay(r))
		}
		if r == 0 && p.size > 1 {
			out = append(out, p.RPC())
		}
	}
	return out
}

// Used is Bound and the ports where DPServers listen for KV events, which their end frees. Those are not
// bind-tested before a start: the DPServer's own listen is the test, and a socket that a test has closed
// stays open for a moment in a child that is being forked at that time.
func (p Ports) Used(events bool, ranks ...int) []int {
	out := p.Bound(events, ranks...)
	if events {
		for _, r := range ranks {
			out = append(out, p.KV(r))
		}
	}
	return out
}
