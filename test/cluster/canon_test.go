package cluster_test

import (
	"cmp"
	"maps"
	"slices"

	"github.com/dpserve/dpserve/internal/state"
)

// canon is the one log that all machines must agree on, and what state.Apply made of it: the reference that
// knows everything. The first machine that takes an entry for committed writes it; all others, with states of
// their own, are held to it.
type canon struct {
	c       *cluster
	entries []*entry
	master  *state.State
	states  []*state.State // published after so many entries
	heads   []uint64       // the last command among so many entries
	coded   map[int][]byte // the encoded state after so many entries, where somebody has asked
	results []state.Result
	errs    []error
	leaders map[uint64]string // by term
}

func newCanon(c *cluster) *canon {
	return &canon{
		c: c, master: state.New(), states: []*state.State{state.New()}, results: make([]state.Result, 1),
		errs: make([]error, 1), leaders: map[uint64]string{},
		heads: make([]uint64, 1), coded: map[int][]byte{},
	}
}

// commit takes an entry for committed at an index.
func (n *canon) commit(r *raft, at int, e *entry) {
	if at <= len(n.entries) {
		if n.entries[at-1] != e {
			n.c.violate("two committed values at index %d, the other one on %s", at, r.m.name)
		}
		return
	}
	n.entries = append(n.entries, e)
	last, head := n.states[len(n.states)-1], n.heads[len(n.heads)-1]
	var res state.Result
	var err error
	if e.command != nil {
		head = uint64(at)
		n.c.before(e.command)
		res, err = n.master.Apply(uint64(at), e.command)
		res.Index = uint64(at)
		n.c.log("commit", at, e.command.Kind(), err != nil)
		if err == nil && !res.Unchanged {
			last = n.master.Clone()
		}
		n.c.committed(e.term, e.command, res, err)
	}
	n.heads = append(n.heads, head)
	n.states, n.results, n.errs = append(n.states, last), append(n.results, res), append(n.errs, err)
}

// elected: one leader per term, and it has everything that was committed.
func (n *canon) elected(r *raft) {
	if other := n.leaders[r.term]; other != "" {
		n.c.violate("%s and %s lead in term %d", other, r.m.name, r.term)
	}
	n.leaders[r.term] = r.m.name
	n.c.log("leads", r.m.name, r.term)
	for i, e := range n.entries {
		if at := i + 1; at > r.base && (at > r.last() || r.at(at) != e) || at == r.base &&
			r.baseTerm != e.term {
			n.c.violate("%s leads in term %d without the committed entry %d", r.m.name, r.term, i+1)
		}
	}
}

// encoded is the state after so many entries as a snapshot would hold it.
func (n *canon) encoded(at int) []byte {
	if n.coded[at] == nil {
		s := *n.states[at]
		s.Index = n.heads[at]
		data, err := s.Encode()
		if err != nil {
			n.c.violate("the state after entry %d cannot be encoded: %v", at, err)
		}
		n.coded[at] = data
	}
	return n.coded[at]
}

// members is the newest configuration that was committed.
func (n *canon) members() []voter {
	for _, e := range slices.Backward(n.entries) {
		if e.members != nil {
			return e.members
		}
	}
	return nil
}

// now is the newest published state.
func (n *canon) now() *state.State { return n.states[len(n.states)-1] }

func sorted[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
