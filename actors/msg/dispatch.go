package msg

import (
	"errors"
	"time"

	"github.com/dpserve/dpserve/routing"
)

// Errors of a dispatch to another node without an answer of the engine. Any other error means that the engine
// was asked and broke off.
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
	// of the route at the engine; "": no request follows, and the ticket lives until the context ends
	Path   string
	Header map[string][]string // for the engine, read only
	// for the engine, read only; it belongs to the caller again when the round trip has ended
	Body []byte
	// as for a rank of the own node, without Ctx and Reply; nil: the request needs no ticket
	Admit      *Admit
	FirstToken time.Duration // time limit for the header of the engine's answer; 0: none

	// set by the round trip: the engine was asked a second time, because it had closed the idle connection
	Resent bool
}
