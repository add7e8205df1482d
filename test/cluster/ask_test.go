package cluster_test

import (
	"time"

	"github.com/dpserve/dpserve/internal/state"
)

// proposeLimit bounds one command on its way through consensus.
const proposeLimit = 5 * time.Second

// propose puts a command through consensus: on this machine if it leads, else once at the leader.
func (m *machine) propose(c state.Command, limit time.Duration, done func(state.Result, error)) {
	over := false
	finish := func(r state.Result, err error) {
		if !over {
			over = true
			done(r, err)
		}
	}
	m.c.after(m.process, limit, func() { finish(state.Result{}, errLate) })
	if m.raft.propose(&c, finish) {
		return
	}
	m.forward(&c, m.c.now+limit, 1, finish)
}

// proposeHere is propose for what only the leader may propose: it is never sent on. A controller that was
// deposed and does not know it would decide on what it saw last.
func (m *machine) proposeHere(c state.Command, limit time.Duration, done func(state.Result, error)) {
	if m.c.cfg.mutant == sendsOn {
		m.propose(c, limit, done)
		return
	}
	over := false
	finish := func(r state.Result, err error) {
		if !over {
			over = true
			done(r, err)
		}
	}
	m.c.after(m.process, limit, func() { finish(state.Result{}, errLate) })
	if !m.raft.propose(&c, finish) {
		finish(state.Result{}, errNotLeader)
	}
}

func (m *machine) forward(c *state.Command, until time.Duration, again int, done func(state.Result, error)) {
	to := m.leadsAs()
	if to < 0 || to == m.i {
		m.c.after(m.process, 50*time.Millisecond, func() {
			if m.c.now < until && !m.raft.propose(c, done) {
				m.forward(c, until, again, done)
			}
		})
		return
	}
	target := m.c.machines[to]
	call(m.c, m, target, until-m.c.now, false, func(answer func(state.Result, error)) {
		if !target.raft.propose(c, answer) {
			answer(state.Result{}, &notLeaderError{target.leadsAs()})
		}
	}, func(r state.Result, err error) {
		if hint, ok := err.(*notLeaderError); ok { //nolint:errorlint // it is never wrapped
			if again > 0 && hint.leads >= 0 && hint.leads != to {
				m.forward(c, until, again-1, done)
				return
			}
			err = errNotLeader
		}
		done(r, err)
	})
}

// notLeaderError refuses what only the leader does, and names it.
type notLeaderError struct{ leads int }

func (*notLeaderError) Error() string { return "not the leader" }

// askLeader asks each control node in turn until one answers that leads, for at most limit in all: as package
// remote does it.
func askLeader[R any](m *machine, limit time.Duration, twice bool, ask func(l *shell, answer func(R, error)),
	done func(R, error),
) {
	var none R
	if m.shell != nil {
		over := false
		finish := func(r R, err error) {
			if !over {
				over = true
				done(r, err)
			}
		}
		m.c.after(m.process, limit, func() { finish(none, errLate) })
		ask(m.shell, finish)
		return
	}
	until := m.c.now + limit
	tried := map[int]bool{}
	var next func()
	next = func() {
		i := m.nextLeader(tried)
		if i < 0 || m.c.now >= until {
			done(none, errUnreachable)
			return
		}
		tried[i] = true
		to := m.c.machines[i]
		call(m.c, m, to, until-m.c.now, twice, func(answer func(R, error)) {
			if to.shell == nil {
				answer(none, &notLeaderError{to.leadsAs()})
				return
			}
			ask(to.shell, answer)
		}, func(r R, err error) {
			hint, refused := err.(*notLeaderError) //nolint:errorlint // it is never wrapped
			m.learn(i, hint, err)
			if refused || err == errUnreachable || err == errLate { //nolint:errorlint // never wrapped
				next()
				return
			}
			done(r, err)
		})
	}
	next()
}

// nextLeader returns the machine to ask now: the last leader, then the one that is said to lead, then the
// others; a machine that did not answer last comes last.
func (m *machine) nextLeader(tried map[int]bool) int {
	order := append([]int{m.known, m.leadsAs()}, m.controls()...)
	for _, all := range []bool{false, true} {
		for _, i := range order {
			if i >= 0 && i != m.i && !tried[i] && (all || i != m.avoid) {
				return i
			}
		}
	}
	return -1
}

func (m *machine) learn(i int, hint *notLeaderError, err error) {
	switch {
	case hint != nil:
		m.known = hint.leads
	case err == errUnreachable || err == errLate: //nolint:errorlint // they are never wrapped
		m.avoid = i
		if m.known == i {
			m.known = -1
		}
	default:
		m.known = i
		if m.avoid == i {
			m.avoid = -1
		}
	}
}
