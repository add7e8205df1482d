package node

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/internal/state"
)

// A process hosts one rank, or several ranks of its unit on this node (engine.Launch.Ranks). Those share the
// process: it is started, signalled and watched once, its output is in the log of the first of them, and its
// end fails all of them.

// partOf is what launches of the unit on this node have in common; meeting is where rank 0 is met, if that is
// known.
func partOf(u *unit, meeting engine.Bind) *engine.Spec {
	s := &engine.Spec{
		App: u.m.App, Group: u.m.Group, Base: u.m.Block.Base, Host: u.n.cfg.EngineHost,
		Executable: u.n.cfg.Executable, Rank0Addr: meeting.Host, Rank0Port: meeting.Port,
		GroupKey: u.groupKey(), Advertise: u.n.cfg.Advertise,
	}
	if u.lockstep() {
		for _, g := range u.m.Ranks {
			s.Local = append(s.Local, engine.Seat{Rank: g.Rank, Devices: g.Devices})
		}
		nodes := nodesOf(u.m.AllRanks)
		s.Nodes, s.NodeRank = len(nodes), max(0, slices.Index(nodes, u.n.cfg.ID))
	}
	return s
}

func renderRank(u *unit, g state.RankGrant, meeting engine.Bind) (engine.Launch, error) {
	s := partOf(u, meeting)
	s.Rank, s.Devices = g.Rank, g.Devices
	return engine.Render(s, os.Environ())
}

// nodesOf lists the nodes of ranks along the ranks.
func nodesOf(ranks []state.RankGrant) []string {
	var nodes []string
	for _, g := range byRank(ranks) {
		if !slices.Contains(nodes, g.Node) {
			nodes = append(nodes, g.Node)
		}
	}
	return nodes
}

func byRank(ranks []state.RankGrant) []state.RankGrant {
	return slices.SortedFunc(slices.Values(ranks),
		func(a, b state.RankGrant) int { return cmp.Compare(a.Rank, b.Rank) })
}

// checkShares refuses seats of an SGLang group that its processes cannot have: SGLang gives every node the
// same number of consecutive ranks.
func checkShares(u *unit) error {
	if u.m.App.Engine.Kind != app.KindSGLang || !u.spansNodes() {
		return nil
	}
	ranks, nodes := byRank(u.m.AllRanks), nodesOf(u.m.AllRanks)
	share := len(ranks) / len(nodes)
	for i, g := range ranks {
		if len(ranks)%len(nodes) != 0 || g.Node != nodes[i/share] {
			return problem.New(problem.InvalidArgument, "SGLang needs the same number of consecutive ranks "+
				"on each node, and the %d ranks of %s are on %s; write max_ranks_per_node, or STRICT_PACK",
				len(ranks), u.m.Unit, strings.Join(nodes, ", "))
		}
	}
	return nil
}

// hostOf returns the rank whose process hosts r too, nil if r needs a process of its own.
func hostOf(u *unit, r *rank, l *engine.Launch) *rank {
	for _, other := range u.ranks {
		if other != r && other.process() != nil && slices.Contains(l.Ranks, other.grant.Rank) {
			return other
		}
	}
	return nil
}

// joinProcess makes r a rank of the process of host.
func joinProcess(r, host *rank) {
	_, _ = fmt.Fprintf(r.out[0], "rank %d is part of the process of rank %d, whose log has its output\n",
		r.grant.Rank, host.grant.Rank)
	r.setProc(host.process())
	r.shareLog(host)
}

// enginesOf lists the engines of the unit on this node, each once.
func enginesOf(u *unit) []Process {
	var out []Process
	for _, r := range u.ranks {
		if p := r.process(); p != nil && !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out
}

// portsOf lists the ports that the process started for r binds.
func portsOf(u *unit, r *rank, l *engine.Launch) []int {
	s := partOf(u, engine.Bind{})
	if len(l.Ranks) == 0 {
		s.Rank, s.Local = r.grant.Rank, nil
	}
	var out []int
	for _, b := range s.Binds() {
		out = append(out, b.Port)
	}
	return out
}

// logOf returns the rank whose log has the output of a rank's engine.
func logOf(u *unit, number int) int {
	var p Process
	for _, r := range u.ranks {
		if r.grant.Rank == number {
			p = r.process()
		}
	}
	for _, r := range u.ranks {
		if p != nil && r.process() == p {
			return r.grant.Rank
		}
	}
	return number
}

// findProgram replaces the program of a launch by its path, along the engine's own PATH, which may be another
// than that of this process.
func findProgram(l *engine.Launch) error {
	path := ""
	for _, kv := range l.Env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			path = v
		}
	}
	file, err := process.FindProgram(l.Argv[0], path)
	switch {
	case errors.Is(err, process.ErrNotInPath):
		return problem.New(problem.InvalidArgument, "there is no program %s on this node; install it, put "+
			"it in PATH, or name its path in engine.command", l.Argv[0])
	case err != nil:
		return problem.New(problem.InvalidArgument, "engine.command: %w", err)
	}
	l.Argv = slices.Concat([]string{file}, l.Argv[1:])
	return nil
}
