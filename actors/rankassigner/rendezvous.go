package rankassigner

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// meeting is the rendezvous of one grant: its ranks wait until rank 0 has published its address.
type meeting struct {
	epoch    uint64
	addr     string
	port     int
	settings string             // of rank 0's engine; "" = not published
	open     bool               // rank 0 has published
	err      error              // the deadline has passed
	reported map[int]bool       // ranks that published or awaited
	waiters  map[int]*msg.Await // at most one per rank
	deadline *time.Timer
}

// expired reports that the deadline of a meeting has passed.
type expired struct {
	unit  string
	epoch uint64
}

// table holds one meeting per unit, that of the highest epoch. Only the actor uses it.
type table struct {
	wait     time.Duration
	post     func(any)
	meetings map[string]*meeting
	last     *state.State // newest snapshot: the ranks of each unit
}

func newTable(wait time.Duration, post func(any)) *table {
	return &table{wait: wait, post: post, meetings: map[string]*meeting{}, last: state.New()}
}

// publish stores rank 0's address and settings, and answers all waiting ranks. A second address for the same
// grant replaces the first.
func (t *table) publish(s *state.State, p *msg.Publish) error {
	m, err := t.join(s, p.Unit, p.Epoch, p.Rank)
	if err != nil {
		return err
	}
	m.addr, m.port, m.open = p.Addr, p.Port, true
	if p.Settings != "" {
		m.settings = p.Settings
	}
	m.deadline.Stop()
	m.answer(m.said())
	return nil
}

func (m *meeting) said() msg.AwaitReply {
	return msg.AwaitReply{Addr: m.addr, Port: m.port, Settings: m.settings}
}

// await answers at once if it can, else it keeps the request in the meeting.
func (t *table) await(s *state.State, w *msg.Await) {
	if w.Ctx.Err() != nil {
		return // the caller has given up
	}
	m, err := t.join(s, w.Unit, w.Epoch, w.Rank)
	switch {
	case err != nil:
		w.Reply <- msg.AwaitReply{Err: err}
	case m.open:
		w.Reply <- m.said()
	case m.err != nil:
		w.Reply <- msg.AwaitReply{Err: m.err}
	default:
		if old := m.waiters[w.Rank]; old != nil {
			old.Reply <- msg.AwaitReply{Err: problem.New(problem.Conflict, "await rank 0 of %s: %w", w.Unit,
				ErrSuperseded)}
		}
		m.waiters[w.Rank] = w
	}
}

// join finds or opens the meeting of a grant and notes that the rank has reported.
func (t *table) join(s *state.State, unit string, epoch uint64, rank int) (*meeting, error) {
	t.prune(s)
	u := s.Units[unit]
	switch {
	case u == nil || !u.Holds():
		return nil, problem.New(problem.NotFound, "rendezvous of %s: %w", unit, ErrNotGranted)
	case u.Epoch != epoch:
		return nil, errStale(unit, epoch, u.Epoch)
	case !u.HasRank(rank):
		return nil, problem.New(problem.InvalidArgument, "rendezvous of %s: rank %d: %w", unit, rank,
			ErrNotGranted)
	}
	m := t.meetings[unit]
	if m == nil {
		m = &meeting{epoch: epoch, reported: map[int]bool{}, waiters: map[int]*msg.Await{}}
		m.deadline = time.AfterFunc(t.wait, func() { t.post(expired{unit, epoch}) })
		t.meetings[unit] = m
	}
	m.reported[rank] = true
	return m, nil
}

func errStale(unit string, epoch, have uint64) error {
	return problem.New(problem.Conflict, "rendezvous of %s: %w: it is at epoch %d, this is epoch %d", unit,
		state.ErrStaleEpoch, have, epoch).
		WithHint("stop: the unit was started anew")
}

// expire fails a meeting without an address, and all present and later requests: a gang starts together or
// not at all.
func (t *table) expire(e expired) {
	m := t.meetings[e.unit]
	if m == nil || m.epoch != e.epoch || m.open || m.err != nil {
		return
	}
	m.err = problem.New(problem.Timeout, "%w: %s, epoch %d: after %s no report from %s", ErrRendezvous,
		e.unit, e.epoch, t.wait, rankList(m.missing(t.last.Units[e.unit]))).
		WithHint("look at the log of those ranks: dpserve logs %s", appOf(e.unit))
	m.answer(msg.AwaitReply{Err: m.err})
}

func appOf(unit string) string {
	name, _, _ := strings.Cut(unit, "/")
	return name
}

func (m *meeting) missing(u *state.Unit) []int {
	var out []int
	if u == nil {
		return out
	}
	for i := range u.Ranks {
		if r := u.Ranks[i].Rank; !m.reported[r] {
			out = append(out, r)
		}
	}
	return out
}

// rankList is "rank 0", "ranks 0, 3", or a note on rank 0's address if all ranks reported.
func rankList(ranks []int) string {
	switch len(ranks) {
	case 0:
		return "rank 0, which reported but published no address"
	case 1:
		return fmt.Sprintf("rank %d", ranks[0])
	default:
		slices.Sort(ranks)
		return "ranks " + strings.Trim(strings.ReplaceAll(fmt.Sprint(ranks), " ", ", "), "[]")
	}
}

// prune drops the meetings of ended grants and answers their waiters. A snapshot older than a meeting says
// nothing about it.
func (t *table) prune(s *state.State) {
	if s.Index >= t.last.Index {
		t.last = s
	}
	for unit, m := range t.meetings {
		have := s.LastEpoch(unit)
		if have < m.epoch || (have == m.epoch && s.Units[unit] != nil && s.Units[unit].Holds()) {
			continue
		}
		m.deadline.Stop()
		m.answer(msg.AwaitReply{Err: errStale(unit, m.epoch, have)})
		delete(t.meetings, unit)
	}
}

// answer sends the same reply to every waiter. Each reply channel has a free slot.
func (m *meeting) answer(r msg.AwaitReply) {
	for rank, w := range m.waiters {
		w.Reply <- r
		delete(m.waiters, rank)
	}
}

// close stops the timers after the actor has stopped.
func (t *table) close() {
	for _, m := range t.meetings {
		m.deadline.Stop()
	}
}
