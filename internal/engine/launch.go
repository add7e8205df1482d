// Package engine starts engines (launch profiles) and queries them (Client: health, progress, settings). Each
// package below it holds one engine kind or one wire format.
package engine

import (
	"cmp"
	"net"
	"slices"
	"strconv"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

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

	Local     []Seat // lockstep: the unit's ranks on this node, ascending; nil = Rank alone
	Nodes     int    // lockstep: how many nodes have ranks of the unit; 0 = 1
	NodeRank  int    // lockstep: this node's number among them, counted along the ranks
	Advertise string // where engines of other nodes reach those of this node; "" = as Host
}

// Seat is a rank of the unit on this node, with its devices.
type Seat struct {
	Rank    int
	Devices []int
}

// Launch is a rendered start: the command to execute, and how the rank asked for is reached. The ranks that
// one process hosts have the same Argv, Env and Ranks. An attached engine has no Argv.
type Launch struct {
	Argv []string // Argv[0] is the program
	Env  []string // the whole environment, KEY=VALUE
	URL  string   // http://host:port; of an attached engine also the path that its routes begin with

	Addressing string // how requests name the rank behind URL: app.AddressURL, AddressHeader, AddressBody
	Selector   int    // the number that they name it by; 0 with AddressURL

	Model string // attach: the engine's own name of the model; "": the names that clients send

	ServerName string // attach: the name in the engine's certificate; "": the host of URL

	// ranks of the unit on this node that the process hosts; nil: the rank asked for alone
	Ranks []int

	// where its KV events are; nil: it publishes none, or (attach) the file does not name them
	Events *EventSource
}

// Command is the program that starts an application's engines, with its first words: engine.command, or the
// default of the kind; nil for this program, which simulates, and for engines that run already.
func Command(a *app.Application) []string {
	switch {
	case a.Engine.Kind == app.KindAttach:
		return nil
	case len(a.Engine.Command) > 0:
		return slices.Clone(a.Engine.Command)
	case a.Engine.Kind == app.KindVLLM:
		return []string{"vllm", "serve"}
	case a.Engine.Kind == app.KindSGLang:
		return []string{"python3", "-m", "sglang.launch_server"}
	}
	return nil
}

// host is where the engine listens.
func (s *Spec) host() string { return cmp.Or(s.Host, Loopback) }

// reach is where engines of other nodes reach this node's.
func (s *Spec) reach() string { return cmp.Or(s.Advertise, s.host()) }

func (s *Spec) isLockstep() bool { return s.App.DataParallel.Coupling == app.Lockstep }

// spans reports whether the unit has ranks on several nodes.
func (s *Spec) spans() bool { return s.Nodes > 1 }

// seats are the unit's ranks on this node.
func (s *Spec) seats() []Seat {
	if len(s.Local) > 0 {
		return s.Local
	}
	return []Seat{{Rank: s.Rank, Devices: s.Devices}}
}

// Index is the rank's number inside its unit: what the block's offsets count.
func (s *Spec) Index() int {
	if s.isLockstep() {
		return s.Rank
	}
	return 0
}

func (s *Spec) hostPort(port int) string { return net.JoinHostPort(s.host(), strconv.Itoa(port)) }

func (s *Spec) tcp(port int) string { return "tcp://" + s.hostPort(port) }

// profile renders one engine kind.
type profile func(s *Spec, environ []string) (Launch, error)

// profiles is the one table of engine kinds.
func profiles() map[app.Kind]profile {
	return map[app.Kind]profile{
		app.KindSim:    simProfile,
		app.KindVLLM:   vllmProfile,
		app.KindSGLang: sglangProfile,
		app.KindAttach: attachProfile,
	}
}

// Render returns the launch of one rank. environ is this process's environment (os.Environ); environment.go
// says what engines get of it. Errors: problem.InvalidArgument naming a rank the app does not declare, or
// arguments that cannot be rendered.
func Render(s *Spec, environ []string) (Launch, error) {
	p, ok := profiles()[s.App.Engine.Kind]
	if !ok {
		return Launch{}, problem.New(problem.InvalidArgument, "unknown engine kind %q", s.App.Engine.Kind)
	}
	return p(s, environ)
}

func attachProfile(s *Spec, _ []string) (Launch, error) {
	r := s.App.Engine.Rank(s.Group, s.Rank)
	if r == nil {
		return Launch{}, problem.New(problem.InvalidArgument,
			"app %s declares no engine for rank %d of group %d", s.App.PoolName(), s.Rank, s.Group).
			WithHint("add it to engine.ranks or lower data_parallel.dp_size")
	}
	return Launch{
		URL: r.URL, Addressing: r.Addressing, Selector: r.Selector, Events: declaredEvents(s.App, r),
		Model: s.App.EngineModel(r), ServerName: r.ServerName(),
	}, nil
}
