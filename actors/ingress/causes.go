package ingress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// cause is the closed list of how an attempt ends. Its String goes to logs, metrics and Done.
type cause uint8

const (
	causeOK     cause = iota
	causePassed       // an answer for the client to judge: 4xx, an error event below 500

	// Refusals of the DPServer.
	causeFull
	causeStaleEpoch
	causeNotReady
	causeFenced
	causeDraining
	causeNoLease
	causeGone
	causeOverloaded
	causeExpired

	// Failures before the first byte.
	causeRefused     // no connection
	causeNoFiles     // this node, or that of the rank, has no file left for a connection
	causeReset       // reset or end before any byte of an answer
	causeUnreachable // the data port of the rank's node is lost, before the first byte or after it
	causeUnitLost    // the stream shows the unit as fenced or gone
	causeEngineBusy  // the engine's own admission limit
	causeEngineDead  // the engine reported that its core is dead
	causeStatus      // 5xx, 408 or 429
	causeEmpty       // 200 without a first byte
	causeAborted     // finish_reason abort that the ingress did not cause
	causeFirstToken  // no first token in time
	causeMalformed   // the answer is not HTTP, or its head is larger than 64 KiB
	causeTooLate     // the parameters of a decode leg were too old directly before the write
	causeNotResent   // the idle connection was closed, and the leg must not be sent twice
	causeStoodStill  // the process stood still before the first byte

	// Failures after the first byte.
	causeUpstreamLost
	causeStalled
	causeSilent     // nothing for first_token_s, though the rank made progress
	causeErrorEvent // an error event below 500 was passed on

	// Caused by the ingress or the client, before or after the first byte.
	causeClientGone
	causeSlowReader
	causeDeadline
	causeDrained
	causeGivenUp // the request goes another way
)

// causePolicy is what follows from a cause.
type causePolicy struct {
	name  string
	retry bool // before the first byte: another rank may be tried
	free  bool // the retry costs no budget
	trip  bool // counts towards the rank's trip
	death bool // the engine died, or its connection did, while it had the request
	probe bool // the DPServer checks its engine at once
	busy  bool // the DPServer counts the rank as full
	done  msg.Outcome
}

var causePolicies = [...]causePolicy{
	causeOK:     {name: "ok", done: msg.OK},
	causePassed: {name: msg.CauseClientError, done: msg.OK}, // the engine did its work

	causeFull:       {name: "full", retry: true, free: true, done: msg.Refused},
	causeStaleEpoch: {name: "stale_epoch", retry: true, free: true, done: msg.Refused},
	causeNotReady:   {name: "not_ready", retry: true, free: true, done: msg.Refused},
	causeFenced:     {name: "fenced", retry: true, free: true, done: msg.Refused},
	causeDraining:   {name: "draining", retry: true, free: true, done: msg.Refused},
	causeNoLease:    {name: "no_lease", retry: true, free: true, done: msg.Refused},
	causeGone:       {name: "gone", retry: true, free: true, done: msg.Refused},
	causeOverloaded: {name: "overloaded", retry: true, free: true, done: msg.Refused},
	causeExpired:    {name: "expired", done: msg.Refused},

	causeRefused: {
		name: "connection_refused", retry: true, free: true, probe: true,
		done: msg.FailedOutcome,
	},
	causeNoFiles: {name: "no_files", done: msg.Cancelled},
	causeReset: {
		name: "reset", retry: true, free: true, death: true, probe: true,
		done: msg.FailedOutcome,
	},
	causeUnreachable: {name: "node_unreachable", retry: true, free: true, done: msg.FailedOutcome},
	causeUnitLost:    {name: "unit_lost", retry: true, free: true, death: true, done: msg.FailedOutcome},
	causeEngineBusy:  {name: "engine_busy", retry: true, free: true, busy: true, done: msg.FailedOutcome},
	causeEngineDead: {
		name: "engine_dead", retry: true, free: true, death: true, probe: true,
		done: msg.FailedOutcome,
	},
	causeStatus:     {name: "engine_error", retry: true, trip: true, done: msg.FailedOutcome},
	causeEmpty:      {name: "empty", retry: true, trip: true, done: msg.FailedOutcome},
	causeAborted:    {name: "aborted", retry: true, trip: true, done: msg.FailedOutcome},
	causeFirstToken: {name: "first_token_timeout", retry: true, trip: true, done: msg.FailedOutcome},
	causeMalformed:  {name: "malformed_answer", retry: true, trip: true, done: msg.FailedOutcome},

	causeTooLate:    {name: "params_late", retry: true, free: true, done: msg.Cancelled},
	causeNotResent:  {name: "not_resent", retry: true, free: true, done: msg.Cancelled},
	causeStoodStill: {name: "stood_still", retry: true, free: true, done: msg.Cancelled},

	causeUpstreamLost: {name: "upstream_lost", trip: true, probe: true, done: msg.FailedOutcome},
	causeStalled:      {name: "stalled", trip: true, probe: true, done: msg.FailedOutcome},
	// the rank made progress, so this says nothing about its health
	causeSilent:     {name: "silent_stream", done: msg.FailedOutcome},
	causeErrorEvent: {name: "error_event", done: msg.FailedOutcome},

	causeClientGone: {name: "client_gone", done: msg.Cancelled},
	causeSlowReader: {name: "slow_reader", done: msg.Cancelled},
	causeDeadline:   {name: "deadline_exceeded", done: msg.Cancelled},
	causeDrained:    {name: "drained", done: msg.Cancelled},
	causeGivenUp:    {name: "given_up", done: msg.Cancelled},
}

func (c cause) String() string { return causePolicies[c].name }

// refusals maps a DPServer's refusals to causes.
var refusals = [...]cause{
	msg.Granted: causeOK, msg.Full: causeFull, msg.StaleEpoch: causeStaleEpoch, msg.NotReady: causeNotReady,
	msg.Fenced:   causeFenced,
	msg.Draining: causeDraining, msg.NoLease: causeNoLease, msg.Expired: causeExpired, msg.Gone: causeGone,
	msg.Overloaded: causeOverloaded,
}

// refusedAs is the cause of a refusal; a refusal that this build does not know counts as not ready.
func refusedAs(r msg.Refusal) cause {
	if int(r) < len(refusals) {
		return refusals[r]
	}
	return causeNotReady
}

// The named causes with which an attempt's context is cancelled.
var (
	errAdmitSlow  = errors.New("the rank's admission did not answer in time")
	errFirstToken = errors.New("no first token in time")
	errStalled    = errors.New("no further token in time, and no progress of the rank")
	errSilent     = errors.New("no further token in time, though the rank makes progress")
	errUnitLost   = errors.New("the rank's unit was fenced")
	errDeadline   = errors.New("the request's deadline is over")
	errTail       = errors.New("the answer's end did not come")
	errOver       = errors.New("the attempt is over")
)

// contextCause is the cause for which ctx is over. A context cancelled without one of our errors means that
// the client's connection is gone.
func contextCause(ctx context.Context) cause {
	switch err := context.Cause(ctx); {
	case errors.Is(err, errAdmitSlow):
		return causeOverloaded
	case errors.Is(err, errFirstToken):
		return causeFirstToken
	case errors.Is(err, errStalled):
		return causeStalled
	case errors.Is(err, errSilent):
		return causeSilent
	case errors.Is(err, errUnitLost):
		return causeUnitLost
	case errors.Is(err, errDeadline):
		return causeDeadline
	case errors.Is(err, errDrained):
		return causeDrained
	case errors.Is(err, errGivenUp):
		return causeGivenUp
	default:
		return causeClientGone
	}
}

// result is how an attempt ended.
type result struct {
	cause        cause
	err          error              // for the log: no part of a prompt or an answer
	engine       openai.EngineError // the engine's error
	status       int                // of the engine, for causes that have one
	nameOverride string             // replaces the cause's name in the log
}

func (r *result) name() string {
	if r.nameOverride != "" {
		return r.nameOverride
	}
	return causePolicies[r.cause].name
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
				"%08x", uint32(hash.Key(e.Message))))) //nolint:gosec // the low half is enough
	}
	if r.err != nil {
		out = append(out, slog.Any("err", r.err))
	}
	return out
}

// statusCause is the cause of an engine's status 4xx or 5xx.
func statusCause(status int, e *openai.EngineError) cause {
	switch {
	case status == http.StatusServiceUnavailable && e.Busy():
		return causeEngineBusy
	case status >= http.StatusInternalServerError && e.Dead():
		return causeEngineDead
	case status >= http.StatusInternalServerError, status == http.StatusRequestTimeout,
		status == http.StatusTooManyRequests:
		return causeStatus
	default:
		return causePassed
	}
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

// finalFailure is what the client sees when an attempt was the last one and none is left to try.
func finalFailure(r *result) *failure {
	f := failureFor(r)
	f.cause, f.lastAttempt = r.cause.String(), r
	return f
}

func failureFor(r *result) *failure {
	switch r.cause {
	case causeEngineBusy:
		return newFailure(openai.CodeOverloaded,
			"every rank that was asked is busy; try again").withRetryAfter(1)
	case causeNoFiles:
		return newFailure(openai.CodeNoFiles, "this node has no file descriptor left for a connection to "+
			"the engine; try again, and raise the limit of open files (ulimit -n)").withRetryAfter(1)
	case causeFirstToken:
		return newFailure(openai.CodeFirstTokenTimeout,
			"no rank gave a first token in time; try again, or raise timeouts.first_token_s")
	case causeExpired, causeDeadline:
		return newFailure(openai.CodeDeadlineExceeded, "the deadline of x-dpserve-timeout-ms is over")
	case causeStaleEpoch, causeNotReady, causeFenced, causeDraining, causeNoLease, causeGone, causeOverloaded,
		causeFull:
		return newFailure(openai.CodeNoReadyRank, "no rank took the request; try again").withRetryAfter(1)
	case causeDrained:
		return newFailure(openai.CodeNoReadyRank, "this ingress is shutting down; try again").withRetryAfter(
			1)
	case causeClientGone, causeSlowReader:
		return &failure{status: statusClientGone, clientGone: true}
	case causeStatus, causeEngineDead:
		return engineFailed(r.status)
	default:
		return engineFailed(http.StatusBadGateway)
	}
}

// engineFailed is 502 upstream_failed; the engine's 503 stays 503.
func engineFailed(status int) *failure {
	f := newFailure(openai.CodeUpstreamFailed, "every rank that was asked failed; try again").withRetryAfter(
		1)
	if status == http.StatusServiceUnavailable {
		f.status = status
	}
	return f
}

// statusClientGone is the status in logs and metrics of a request whose client left; it is never sent.
const statusClientGone = 499

// streamError is the code and text of the error event that ends a stream after its first byte.
func streamError(c cause) (code, message string) {
	switch c {
	case causeStalled, causeSilent:
		return openai.CodeStalled, "the engine stopped sending tokens; send the request again"
	case causeDrained:
		return openai.CodeDrained,
			"the rank was shut down before the answer was complete; send the request again"
	case causeDeadline:
		return openai.CodeDeadlineExceeded, "the deadline of x-dpserve-timeout-ms is over"
	default:
		return openai.CodeUpstreamLost,
			"the engine was lost before the answer was complete; send the request again"
	}
}
