// Package transfer makes and reads the two requests by which one prompt is computed on a prefill rank and its
// answer on a decode rank: one file per way in which the KV blocks come from the one to the other. It works
// on bytes alone; the caller sends them.
//
// The package is pure and sends nothing. A caller scans the client's body (Scan; what cannot be split goes to
// one rank), begins each attempt with a fresh id (Begin), sends the requests in the transfer's Order, and
// reads the prefill's answer (ReadPrefill). Both prompts are the same bytes of the client's body: members are
// cut or added, and everything else stays. Parameters are opaque, checked and never completed. They are taken
// once, before a deadline that counts from the time at which the answer was read, while the prefill engine is
// the one that answered: read late or twice they give 200 with a wrong text, and the decode engine keeps the
// wrong blocks. A client's own fields of this kind are cut or refused. nixl was tested with real engines,
// nixl-push against captured bytes; mooncake and sglang were never run.
package transfer

import (
	"errors"
	"fmt"
	"time"

	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
)

// The names of the transfers, as in an app file.
const (
	NixlName     = "nixl"
	NixlPushName = "nixl-push"
	MooncakeName = "mooncake"
	SGLangName   = "sglang"
	SimName      = "sim"
)

// Traits is what holds for all requests of a transfer.
type Traits struct {
	Name  string
	Order dispatch.Order
	// HasParams: the prefill's answer holds parameters that the decode leg must carry (Params).
	HasParams bool
	// Lease is how long a prefill engine keeps the blocks of an answered leg if its own setting is unknown.
	Lease time.Duration
	// FreshRequestID: both legs carry the attempt's ID as X-Request-Id, because the engines find each other
	// by it. Otherwise they carry the client's.
	FreshRequestID bool
	// TakesPlain: the engines of both sides accept requests without transfer fields. Where they do not, a
	// request that cannot be split needs a rank of role "both", and no decode rank can compute a prompt.
	TakesPlain bool

	limits    bool // the prefill leg is cut to one token by its body
	toLength  bool // the prefill leg must end by its length, never by a stop
	moveLists bool // several prompts in one body can be split
}

// RequestID is the X-Request-Id of both legs of an attempt at a request whose own is client.
func (t *Traits) RequestID(a *Attempt, client string) string {
	if t.FreshRequestID {
		return a.ID
	}
	return client
}

// Transfer is one way to bring KV blocks from a prefill rank to a decode rank. Safe for concurrent use.
type Transfer interface {
	// Traits never change.
	Traits() *Traits
	// Begin prepares the fields that an attempt at q adds to its two legs. id is fresh for each attempt, also
	// for a retry. draw returns a uniform random number below n. It fails with ErrPeer if the transfer must
	// know more of the prefill rank.
	Begin(q *Request, id string, prefill Peer, draw func(n uint64) uint64) (Attempt, error)
	// Check tells whether a decode engine can use what the prefill leg of q answered.
	Check(a *Answer) Failure
}

// Named returns the transfer of that name.
func Named(name string) (t Transfer, ok bool) {
	switch name {
	case NixlName:
		return nixl{}, true
	case NixlPushName:
		return nixlPush{}, true
	case MooncakeName:
		return mooncake{}, true
	case SGLangName:
		return sglang{}, true
	case SimName:
		return sim{}, true
	}
	return nil, false
}

// ErrPeer is returned by Begin if a prefill rank's data is not known yet, or is wrong. No leg may be sent:
// engines end or wait for ever when such a field is missing.
var ErrPeer = errors.New("the prefill rank's transfer data is incomplete")

func incomplete(transfer, field string) error {
	return fmt.Errorf("%w: %s needs its %s", ErrPeer, transfer, field)
}

// quoted is s as a JSON string.
func quoted(s string) string { return string(openai.AppendString(nil, s)) }

// Peer is what a transfer must know of a prefill rank before the rank has answered. Pull transfers need none
// of it.
type Peer struct {
	EngineID string // nixl-push, mooncake
	Host     string // nixl-push: of the side channel; sglang: of the bootstrap server
	Port     int    // likewise
	TPSize   int    // nixl-push
	PPSize   int    // nixl-push
	// Bootstrap is the URL of the bootstrap server, scheme://host:port (mooncake).
	Bootstrap string
	Rank      int // of its group, as its engine counts (sglang)
	DPSize    int // of its group (sglang)
}

// Attempt is one try to serve a request by one pair of ranks. A retry is another Attempt.
type Attempt struct {
	ID string

	prefill, decode []byte // members of the two bodies
}

// AppendPrefill appends the body of the prefill leg of q to dst.
func (a *Attempt) AppendPrefill(dst []byte, q *Request) []byte {
	return openai.AppendEdited(dst, q.Body, q.forPrefill.Spans, q.limit, a.prefill)
}

// AppendDecode appends the body of the decode leg of q to dst: all bytes of the client's body and the
// transfer's fields. params is what Params.Take returned, nil for a transfer that has none. Without it, the
// body of a transfer with HasParams is that of a plain request: the decode rank computes the prompt itself.
func (a *Attempt) AppendDecode(dst []byte, q *Request, params []byte) []byte {
	return openai.AppendEdited(dst, q.Body, q.forDecode.Spans, a.decode, params)
}
