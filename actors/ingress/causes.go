package ingress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// refusals maps a DPServer's refusals to causes.
var refusals = [...]dispatch.Cause{
	msg.Granted: dispatch.OK, msg.Full: dispatch.Full, msg.StaleEpoch: dispatch.StaleEpoch,
	msg.NotReady: dispatch.NotReady, msg.Fenced: dispatch.Fenced, msg.Draining: dispatch.Draining,
	msg.NoLease: dispatch.NoLease, msg.Expired: dispatch.Expired, msg.Gone: dispatch.Gone,
	msg.Overloaded: dispatch.Overloaded,
}

// refusedAs is the cause of a refusal; a refusal that this build does not know counts as not ready.
func refusedAs(r msg.Refusal) dispatch.Cause {
	if int(r) < len(refusals) {
		return refusals[r]
	}
	return dispatch.NotReady
}

// The named causes with which an attempt's context is cancelled.
var (
	errAdmitSlow  = errors.New("the rank's admission did not answer in time")
	errFirstToken = errors.New("no first token in time")
	errStalled    = errors.New("no further token, and the engine failed its probe")
	errSilent     = errors.New("no further token in time, though the engine answers probes")
	errUnitLost   = errors.New("the rank's unit was fenced")
	errDeadline   = errors.New("the request's deadline is over")
	errTail       = errors.New("the answer's end did not come")
	errOver       = errors.New("the attempt is over")
)

// contextCause is the cause for which ctx is over. A context cancelled without one of our errors means that
// the client's connection is gone.
func contextCause(ctx context.Context) dispatch.Cause {
	switch err := context.Cause(ctx); {
	case errors.Is(err, errAdmitSlow):
		return dispatch.Overloaded
	case errors.Is(err, errFirstToken):
		return dispatch.FirstToken
	case errors.Is(err, errStalled):
		return dispatch.Stalled
	case errors.Is(err, errSilent):
		return dispatch.Silent
	case errors.Is(err, errUnitLost):
		return dispatch.UnitLost
	case errors.Is(err, errDeadline):
		return dispatch.Deadline
	case errors.Is(err, errDrained):
		return dispatch.Drained
	case errors.Is(err, errGivenUp):
		return dispatch.GivenUp
	default:
		return dispatch.ClientGone
	}
}

// endOf is what the cause of a RecDone shows of the load that its request was.
func endOf(cause string) routing.End {
	c, ok := dispatch.CauseOf(cause)
	switch {
	case !ok:
		return routing.EndUnknown
	case c == dispatch.OK:
		return routing.EndGood
	case c.Row().Done == dispatch.DoneFailed, c == dispatch.KVFailure:
		return routing.EndFailed
	}
	return routing.EndUnknown
}

// result is how an attempt ended.
type result struct {
	cause        dispatch.Cause
	err          error              // for the log: no part of a prompt or an answer
	engine       openai.EngineError // the engine's error
	status       int                // of the engine, for causes that have one
	text         uint64             // hash of the engine's message; 0: nothing that tells one from another
	nameOverride string             // replaces the cause's name in the log
}

func (r *result) name() string {
	if r.nameOverride != "" {
		return r.nameOverride
	}
	return r.cause.String()
}

// attrs are log attributes of what the engine and the network reported. An engine's message may repeat any
// part of the request: the log shows it if it is a sentence known from engines, or at level debug; otherwise
// the log shows its length and a hash, by which equal messages can be found.
func (r *result) attrs(hash kvindex.Hasher, debug bool) []slog.Attr {
	var out []slog.Attr
	if r.status != 0 {
		out = append(out, slog.Int("engine_status", r.status))
	}
	e := &r.engine
	if t := e.KnownType(); t != "" {
		out = append(out, slog.String("engine_type", t))
	}
	if p := e.KnownParam(); p != "" {
		out = append(out, slog.String("engine_param", p))
	}
	switch {
	case e.Message == "":
	case debug || e.IsKnown():
		out = append(out, slog.String("engine_message", e.Message))
	default:
		out = append(out, slog.Int("engine_message_bytes", e.Length),
			slog.String("engine_message_hash", fmt.Sprintf(
				"%08x", uint32(hash.Key(e.Message)))))
	}
	if r.err != nil {
		out = append(out, slog.Any("err", r.err))
	}
	return out
}

// failedAsk is how a request ended that an Asker has not got answered.
func failedAsk(ctx context.Context, err error) result {
	res := result{cause: dispatch.Reset, err: err}
	switch {
	case ctx.Err() != nil:
		res.cause = contextCause(ctx)
	case errors.Is(err, rankleg.ErrUnreachable):
		res.cause = dispatch.Unreachable
	case errors.Is(err, rankleg.ErrFirstToken):
		res.cause = dispatch.FirstToken
	case rankleg.IsOutOfFiles(err):
		res.cause = dispatch.NoFiles
	case rankleg.IsRefused(err):
		res.cause = dispatch.ConnRefused
	case errors.Is(err, rankleg.ErrTooLate):
		res.cause = dispatch.TooLate
	case errors.Is(err, rankleg.ErrNotResent):
		res.cause = dispatch.NotResent
	case rankleg.IsMalformed(err):
		res.cause = dispatch.Malformed
	}
	return res
}

// failedRead is how an answer ended that could not be read to its end. begun: the client has the begin of it.
func failedRead(ctx context.Context, err error, begun bool) result {
	res := result{cause: dispatch.Empty, err: err}
	switch {
	case ctx.Err() != nil:
		res.cause = contextCause(ctx)
		if (res.cause == dispatch.Stalled || res.cause == dispatch.Silent) && !begun {
			res.cause = dispatch.FirstToken // the engine sent an empty delta and then nothing
		}
	case errors.Is(err, rankleg.ErrUnreachable):
		res.cause = dispatch.Unreachable
	case errors.Is(err, rankleg.ErrNoLease):
		res.cause, res.err = dispatch.UnitLost, nil
	case begun:
		res.cause = dispatch.UpstreamLost
	}
	return res
}

// failure is an answer of dpserve's own.
type failure struct {
	status      int
	code        string
	message     string
	param       string
	retryAfter  int // seconds; 0: no header
	cause       string
	clientGone  bool    // no client can read the answer
	lastAttempt *result // nil: none
}

// result is what the log shows of the failure.
func (f *failure) result() *result {
	var out result
	if f.lastAttempt != nil {
		out = *f.lastAttempt
	}
	out.nameOverride = f.cause
	return &out
}

func newFailure(code, message string) *failure {
	return &failure{status: openai.Status(code), code: code, message: message, cause: code}
}

func (f *failure) withRetryAfter(seconds int) *failure {
	f.retryAfter = seconds
	return f
}

// finalFailure is what dpserve says of the last end of a leg, when nobody is left to ask.
func finalFailure(r *result) *failure {
	f := failureFor(r.cause)
	f.cause, f.lastAttempt = r.cause.String(), r
	return f
}

func failureFor(c dispatch.Cause) *failure {
	switch c {
	case dispatch.ClientGone, dispatch.SlowReader:
		return &failure{status: statusClientGone, clientGone: true}
	case dispatch.NoMemory:
		return noBodyMemory()
	case dispatch.Drained:
		return newFailure(openai.CodeNoReadyRank, "this ingress is shutting down; try again").withRetryAfter(
			1)
	default:
	}
	switch code := c.Row().Own; code {
	case openai.CodeOverloaded:
		return newFailure(code, "every rank that was asked is busy; try again").withRetryAfter(1)
	case openai.CodeNoFiles:
		return newFailure(code, "this node has no file descriptor left for a connection to the engine; "+
			"try again, and raise the limit of open files (ulimit -n)").withRetryAfter(1)
	case openai.CodeFirstTokenTimeout:
		return newFailure(code,
			"no rank gave a first token in time; try again, or raise timeouts.first_token_s")
	case openai.CodeDeadlineExceeded:
		return newFailure(code, "the deadline of x-dpserve-timeout-ms is over")
	case openai.CodeNoReadyRank:
		return newFailure(code, "no rank took the request; try again").withRetryAfter(1)
	default:
		return newFailure(openai.CodeUpstreamFailed,
			"every rank that was asked failed; try again").withRetryAfter(1)
	}
}

// twoDied is the answer to a request under which two engines have died.
func twoDied(last *result) *failure {
	f := finalFailure(last)
	f.message, f.cause = "two ranks died while they had this request; it is not sent to a third one",
		"killed_two_ranks"
	return f
}

// statusClientGone is the status in logs and metrics of a request whose client left; it is never sent.
const statusClientGone = 499

// streamError is the code and text of the error event that ends a stream after its first byte.
func streamError(c dispatch.Cause) (code, message string) {
	switch code := c.Row().Begun; code {
	case openai.CodeStalled:
		return code, "the engine stopped sending tokens; send the request again"
	case openai.CodeDrained:
		return code, "the rank was shut down before the answer was complete; send the request again"
	case openai.CodeDeadlineExceeded:
		return code, "the deadline of x-dpserve-timeout-ms is over"
	default:
		return openai.CodeUpstreamLost,
			"the engine was lost before the answer was complete; send the request again"
	}
}
