// Package engine is what an engine is to dpserve: how one is started (launch profiles), and how one is asked
// whether it lives, answers and moves on (Client). The folders below it hold one kind or one wire each.
package engine

import (
	"cmp"
	"errors"
	"net"
	"strconv"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// ErrNextVersion says that an engine kind is understood but not launched by this version.
var ErrNextVersion = errors.New("comes with the next version")

// Spec is everything a launch profile needs to know of one rank.
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

// Launch is a rendered start: what to execute, and where the engine will answer. An attached engine has no
// Argv.
type Launch struct {
	Argv []string // Argv[0] is the program
	Env  []string // the whole environment, KEY=VALUE
	URL  string   // http://host:port, no path

	// where its KV events are found; nil: it publishes none, or (attach) its file does not tell
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

// Render gives the launch of one rank. environ is this process's environment (os.Environ); only what the
// profile names of it reaches the engine. Errors: problem.InvalidArgument wrapping ErrNextVersion, or naming
// a rank the app does not declare.
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
