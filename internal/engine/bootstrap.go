package engine

import (
	"cmp"
	"errors"
	"net"
	"slices"
	"strconv"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// ErrRankGone says that the rank serves no longer.
var ErrRankGone = errors.New("the rank serves no longer")

// BootstrapServer is where the bootstrap server of a prefill rank listens, "" if the file should say it and
// does not, and the number of the rank among those of that server.
func BootstrapServer(st *state.State, a *app.Application, group, rank int) (
	url string, number int, err error,
) {
	r := a.Engine.Rank(group, rank)
	if r != nil && r.PD != nil && r.PD.Bootstrap != "" || a.Engine.Kind == app.KindAttach {
		if r != nil && r.PD != nil {
			url = r.PD.Bootstrap
		}
	} else if url, err = launchedServer(st, a, group, rank); err != nil {
		return "", 0, err
	}
	return url, numberAtServer(a, r, rank), nil
}

// launchedServer is the address of a server that dpserve has started: at a port of its unit's block, on its
// node. SGLang has one server for all ranks of a lockstep group, on the node of rank 0.
func launchedServer(st *state.State, a *app.Application, group, rank int) (string, error) {
	if a.Disaggregation.Transfer == app.TransferSGLang && a.DataParallel.Coupling == app.Lockstep {
		rank = 0
	}
	for _, u := range st.Units {
		if u.PoolName() != a.PoolName() || u.Group != group {
			continue
		}
		r := slices.IndexFunc(u.Ranks, func(r state.RankGrant) bool { return r.Rank == rank })
		if r < 0 {
			continue
		}
		node := u.Ranks[r].Node
		b := slices.IndexFunc(u.Blocks, func(b state.Block) bool { return b.Node == node })
		if b < 0 {
			break
		}
		host := Loopback
		if n := st.Nodes[node]; n != nil {
			host = cmp.Or(n.Advertise, host)
		}
		return "http://" + net.JoinHostPort(host, strconv.Itoa(bootstrapPort(a, u.Blocks[b].Base, rank))), nil
	}
	return "", ErrRankGone
}

// bootstrapPort is the port of the server of a rank whose unit has the port block at base on its node.
func bootstrapPort(a *app.Application, base, rank int) int {
	s := Spec{App: a, Rank: rank, Base: base}
	return s.Ports().Bootstrap(s.Index())
}

// numberAtServer is the number of a rank among those of its server: what its address selects, or its place
// among the ranks with that server.
func numberAtServer(a *app.Application, r *app.AttachRank, rank int) int {
	switch {
	case r == nil && a.DataParallel.Coupling != app.Lockstep:
		return 0 // dpserve has started it, alone in its group
	case r == nil || r.PD == nil:
		return rank
	case r.Addressing == app.AddressHeader || r.Addressing == app.AddressBody:
		return r.Selector
	}
	place := 0
	for i := range a.Engine.Ranks {
		other := &a.Engine.Ranks[i]
		if other == r {
			break
		}
		if other.PD != nil && other.PD.Bootstrap == r.PD.Bootstrap {
			place++
		}
	}
	return place
}
