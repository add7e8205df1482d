package transfer

import (
	"errors"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/dispatch"
)

// Source is the engine process that parameters point into.
type Source struct {
	Rank        string // APP/GROUP/RANK
	Incarnation uint64 // one life of its engine
}

// The reasons why Take gives nothing. All but ErrTaken end the parameters for good.
var (
	ErrTaken  = errors.New("the parameters were sent already")
	ErrLate   = errors.New("the parameters are too old for the prefill engine's lease")
	ErrFenced = errors.New("the prefill engine of the parameters has ended")
	ErrDead   = errors.New("the parameters were discarded")
)

// Params are the transfer parameters of one prefill leg: a pointer to blocks of the prefill engine's cache,
// which the engine does not check. If they are used late, twice, or after a rejection, the answer is 200 with
// a wrong text, and the decode engine keeps the wrong blocks in its prefix cache. So they can be taken once.
// Safe for concurrent use.
type Params struct {
	member   []byte // "kv_transfer_params":{…}, the object byte for byte as the engine wrote it
	source   Source
	deadline time.Time

	mu    sync.Mutex
	state paramsState
}

type paramsState uint8

const (
	paramsReady paramsState = iota
	paramsTaken
	paramsDead
)

// kvParams begins the member that carries a connector's parameters.
const kvParams = `"kv_transfer_params":`

// NewParams keeps a copy of raw, the parameters that source answered; the answer was read at the time read. A
// process that stood still reads an answer long after it came: the caller sees to that (dispatch.Fence). A
// lease of 0 is dispatch.DefaultLease.
func NewParams(raw []byte, source Source, read time.Time, lease time.Duration) *Params {
	if lease <= 0 {
		lease = dispatch.DefaultLease
	}
	member := make([]byte, 0, len(kvParams)+len(raw))
	member = append(append(member, kvParams...), raw...)
	return &Params{member: member, source: source, deadline: read.Add(dispatch.Usable(lease))}
}

// Take returns the parameters for Attempt.AppendDecode, and never again. current is the present life of the
// prefill rank. The caller must write the decode leg before the lease ends (dispatch.Fence); if it finds that
// it has not, it cancels the leg and shows nothing of its answer.
func (p *Params) Take(now time.Time, current Source) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.state == paramsTaken:
		return nil, ErrTaken
	case p.state == paramsDead:
		return nil, ErrDead
	case current != p.source:
		p.state = paramsDead
		return nil, ErrFenced
	case !now.Before(p.deadline):
		p.state = paramsDead
		return nil, ErrLate
	}
	p.state = paramsTaken
	return p.member, nil
}

// PutBack makes taken parameters usable once more. It is only for a dial that failed: not one byte of the
// decode leg was sent, so no engine has seen them.
func (p *Params) PutBack() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == paramsTaken {
		p.state = paramsReady
	}
}

// Discard ends the parameters, whatever their state.
func (p *Params) Discard() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state = paramsDead
}
