package main

import (
	"context"
	"errors"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/pause"
)

// How long a command waits for a cluster that does not answer. An election takes a second or two.
const (
	maxLeaderWait = 3 * time.Second // of a command that asks once, while there is no leader
	maxAPISilence = 5 * time.Second // of one that watches
)

// patience decides whether a command asks again after an error: the cluster elects a leader, or the node that
// was asked is being restarted. It prints one line when a silence begins.
type patience struct {
	most time.Duration // how long a silence may last
	now  func() time.Time
	say  func(format string, args ...any)

	answered    bool      // false: no dpserve has answered yet, and perhaps none runs at the address
	silentSince time.Time // zero = the cluster answers
}

func newPatience(e *env, most time.Duration) *patience {
	return &patience{most: most, now: e.now, say: e.screen().printMessage}
}

// ask calls f. ok is false without an error if the caller may ask again.
func (p *patience) ask(ctx context.Context, f func(ctx context.Context) error) (ok bool, err error) {
	err = f(ctx)
	if err == nil {
		p.hear()
		return true, nil
	}
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	if p.isOver(err) {
		return false, err
	}
	if p.silentSince.IsZero() {
		p.silentSince = p.now()
		p.say("%s; asking again for up to %s", joinLines(err.Error()), p.most)
	}
	return false, nil
}

// hear notes that the cluster answers.
func (p *patience) hear() { p.answered, p.silentSince = true, time.Time{} }

// isOver reports whether asking again after err changes nothing, or has lasted long enough.
func (p *patience) isOver(err error) bool {
	switch client.CodeOf(err) {
	case client.CodeUnavailable, client.CodeTimeout, client.CodeOverloaded:
	default:
		return true
	}
	p.answered = p.answered || isAnswer(err)
	return !p.answered || !p.silentSince.IsZero() && p.now().Sub(p.silentSince) > p.most
}

// isAnswer reports whether an error is the answer of a dpserve.
func isAnswer(err error) bool {
	e, ok := errors.AsType[*client.Error](err)
	return ok && e.Status != 0
}

// askUntilAnswered calls f until the cluster answers.
func (p *patience) askUntilAnswered(ctx context.Context, f func(ctx context.Context) error) error {
	for {
		ok, err := p.ask(ctx, f)
		if ok || err != nil {
			return err
		}
		if err := pause.For(ctx, pollEvery); err != nil {
			return err
		}
	}
}

// watchOnce is ask with a deadline, for one look of a command that watches.
func (p *patience) watchOnce(ctx context.Context, f func(ctx context.Context) error) (ok bool, err error) {
	return p.ask(ctx, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		return f(ctx)
	})
}
