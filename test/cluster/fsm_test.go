package cluster_test

import (
	"bytes"
	"maps"
	"slices"

	"github.com/dpserve/dpserve/internal/state"
)

// fsm is a control machine's own copy of the state, a model of cluster's fsm. Only state.Apply, Encode and
// Decode and the coding of commands are the product's. The machine decodes each committed entry, applies it
// to its own state, writes snapshots of that state and begins from them after a restart. Every machine is
// compared with the canonical copy.
type fsm struct {
	m    *machine
	work *state.State
}

// snapshot is a state as a machine keeps it on disk, or sends it to a machine that is too far behind.
type snapshot struct {
	at      int    // the last entry in it
	term    uint64 // of that entry
	members []voter
	confAt  int // where members stands in the log
	data    []byte
}

// How often a machine encodes its state.
const (
	compactMin   = 24 // entries applied since the last snapshot
	compactMax   = 96
	trailingMax  = 32 // entries before a snapshot that stay in the log
	compareEvery = 16 // entries between two comparisons of the encoded states
	codeOften    = 4  // one reader in so many decodes an entry or a state again, the others share
)

// apply applies one committed entry and holds the outcome to the canonical one.
func (f *fsm) apply(at int, e *entry) (res state.Result, err error) {
	c := f.m.c
	if e.command == nil {
		return res, nil
	}
	command := e.decoded
	if command == nil || (at+f.m.i)%codeOften == 0 {
		if command, err = state.DecodeCommand(e.data); err != nil {
			c.violate("%s cannot decode entry %d: %v", f.m.name, at, err)
		}
		e.decoded = command
	}
	if !f.passesOver(command) {
		res, err = f.work.Apply(uint64(at), command)
		res.Index = uint64(at)
	}
	want, wantErr := c.canon.results[at], c.canon.errs[at]
	if (err != nil) != (wantErr != nil) || res.Unchanged != want.Unchanged || res.Revision != want.Revision ||
		!maps.Equal(res.Epochs, want.Epochs) || !maps.Equal(res.Apps, want.Apps) {
		c.violate("entry %d gives %+v, %v on %s, and %+v, %v elsewhere", at, res, err, f.m.name, want,
			wantErr)
	}
	if at%compareEvery == 0 {
		f.compare(at, f.encode())
	}
	return res, err
}

// passesOver says whether this machine skips a command: a mutant does, as a node of an older version would.
func (f *fsm) passesOver(c *state.Command) bool {
	return f.m.c.cfg.mutant == skips && f.m.i == 1 && c.UnitReady != nil
}

func (f *fsm) encode() []byte {
	data, err := f.work.Encode()
	if err != nil {
		f.m.c.violate("%s cannot encode its state: %v", f.m.name, err)
	}
	return data
}

// compare holds the encoded state after entry at to the canonical one at the same entry.
func (f *fsm) compare(at int, data []byte) {
	if want := f.m.c.canon.encoded(at); !bytes.Equal(data, want) {
		f.m.c.violate("the state of %s has parted from the others' at entry %d:\n%s\n%s", f.m.name, at, data,
			want)
	}
}

// restore begins from a snapshot. The decoded state must encode to the same bytes.
func (f *fsm) restore(s *snapshot) {
	f.work = f.m.c.decode(f.m, s.data)
	if f.m.c.cfg.mutant == losesEpochs {
		maps.DeleteFunc(f.work.Epochs, func(unit string, _ uint64) bool { return f.work.Units[unit] == nil })
	}
	f.compare(s.at, f.encode())
}

func (c *cluster) decode(m *machine, data []byte) *state.State {
	s, err := state.Decode(data)
	if err != nil {
		c.violate("%s cannot decode a state: %v", m.name, err)
	}
	return s
}

// told is a state that is being sent to a node without role control.
type told struct {
	data  []byte
	state *state.State
	uses  int
}

// public is the machine's copy as it sends it to nodes without role control. Copies with the same index are
// equal, so coding the state once per index and now and then anew is enough.
func (m *machine) public() *told {
	c, at := m.c, m.view.Index
	out := c.told[at]
	if out == nil || out.uses%codeOften == codeOften-1 {
		out = &told{data: c.public(m.view)}
		out.state = c.decode(m, out.data)
		c.told[at] = out
	}
	out.uses++
	return out
}

func (c *cluster) public(s *state.State) []byte {
	data, err := s.Public().Encode()
	if err != nil {
		c.violate("a state cannot be encoded: %v", err)
	}
	return data
}

// compact writes a snapshot now and then and drops the entries before it, but for a few.
func (r *raft) compact() {
	if r.applied < r.compactAt {
		return
	}
	r.compactAt = r.applied + compactMin + r.c.IntN(compactMax-compactMin)
	s := &snapshot{at: r.applied, term: r.termAt(r.applied), data: r.fsm.encode()}
	s.members, s.confAt = r.membersAt(r.applied)
	r.fsm.compare(s.at, s.data)
	r.snap = s
	if base := r.applied - r.c.IntN(trailingMax); base > r.base {
		r.baseTerm = r.termAt(base)
		r.log = slices.Clone(r.log[base-r.base:])
		r.base = base
	}
	r.c.log("snapshot", r.m.name, s.at, r.base)
}

// install takes a leader's snapshot in place of the log up to its entry. raft drops the whole log there. It
// can, because it sends a snapshot only while it sends that node nothing else; the messages here overtake
// each other.
func (r *raft) install(a *appendEntries) {
	s := a.snapshot
	if s.at <= r.applied {
		r.reply(a, true, s.at)
		return
	}
	r.write(func() {
		if s.at <= r.applied {
			return
		}
		r.c.log("install", r.m.name, s.at)
		var rest []*entry
		if s.at <= r.last() && r.termAt(s.at) == s.term {
			rest = slices.Clone(r.log[s.at-r.base:])
		}
		r.snap, r.log, r.base, r.baseTerm, r.synced = s, rest, s.at, s.term,
			max(s.at, min(r.synced, s.at+len(rest)))
		r.conf, r.confAt = nil, 0
		r.commit, r.applied = s.at, s.at
		r.fsm.restore(s)
		r.m.publish(r.fsm.work.Clone())
		r.reply(a, true, s.at)
	})
}
