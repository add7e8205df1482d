package msg

import (
	"errors"
	"time"

	"github.com/dpserve/dpserve/routing"
)

// Where a dispatch to another node ended without an answer of the engine. Anything else that went wrong is an
// engine that was asked and broke off.
var (
	ErrUnreachable   = errors.New("the node's data port cannot be reached")
	ErrEngineRefused = errors.New("the engine took no connection")
	ErrFirstToken    = errors.New("the engine did not answer in time")
	ErrMalformed     = errors.New("the engine's answer is no well-formed HTTP answer, " +
		"or its head is too large")
)

// Dispatch is a request for a rank of another node: admission and data in one round trip.
type Dispatch struct {
	Node string
	App  string
	Unit string
	Rank routing.RankID
	// of the route at the engine; "" = no request follows: the ticket is held until the context ends
	Path   string
	Header map[string][]string // for the engine, read only
	// for the engine, read only; the caller's again when the round trip has ended
	Body []byte
	// as to a rank of the own node, without Ctx and Reply; nil = the request needs no ticket
	Admit      *Admit
	FirstToken time.Duration // for the head of the engine's answer; 0 = no bound

	Resent bool // set by the round trip: the engine was asked a second time (ENGINES 3.6)
}
