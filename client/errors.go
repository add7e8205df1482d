package client

import (
	"errors"
	"fmt"
)

// The codes of an Error. The list is closed.
const (
	CodeInvalidArgument  = "invalid_argument"
	CodeUnauthenticated  = "unauthenticated"
	CodePermissionDenied = "permission_denied"
	CodeNotFound         = "not_found"
	CodeSlowRequest      = "slow_request"
	CodeConflict         = "conflict"
	CodeTooLarge         = "too_large"
	CodeUnplaceable      = "unplaceable" // there is no room for a rank
	CodeQuotaExceeded    = "quota_exceeded"
	CodeHeaderTooLarge   = "header_too_large"
	CodeInternal         = "internal" // a fault of dpserve
	CodeUpstream         = "upstream" // the engine, or the server at the address, answers wrongly
	CodeOverloaded       = "overloaded"
	CodeUnavailable      = "unavailable" // also: no server answers
	CodeTimeout          = "timeout"     // also: the context's deadline
)

// Error says what is wrong and what to do next. It is an answer of dpserve that is not a success, or the
// reason why there is no answer.
type Error struct {
	Status  int      `json:"-"` // of HTTP; 0: dpserve has not answered
	Code    string   `json:"code"`
	Message string   `json:"message"`           // the reason
	Hint    string   `json:"hint,omitempty"`    // a remedy
	Doc     string   `json:"doc,omitempty"`     // a page that says more
	Details []string `json:"details,omitempty"` // more lines for people
	Faults  []Fault  `json:"faults,omitempty"`  // of an application's file, which Details list for people
	cause   error
}

// newError makes an error without an answer; format may wrap a cause with %w.
func newError(code, hint, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...) //nolint:err113 // this is the constructor
	return &Error{Code: code, Message: err.Error(), Hint: hint, cause: errors.Unwrap(err)}
}

func (e *Error) Error() string { return e.Message }

// Unwrap returns the cause of an error without an answer: errors.Is finds context.Canceled and the like.
func (e *Error) Unwrap() error { return e.cause }

// CodeOf returns the code of the first *Error in err's chain, "" if there is none.
func CodeOf(err error) string {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// Fault is one place of an application's file that breaks a rule, or that is legal but probably a mistake.
type Fault struct {
	File string `json:"file"`
	Line int    `json:"line"`           // from 1
	Col  int    `json:"col"`            // from 1, in characters
	Path string `json:"path,omitempty"` // applications[0].engine.kind; empty for the file as a whole
	// the broken rule; may be empty when Found and Wanted are enough
	Message string `json:"message,omitempty"`
	Found   string `json:"found,omitempty"`
	Wanted  string `json:"wanted,omitempty"`
	Hint    string `json:"hint,omitempty"` // what to do next
}

// errorReply is an error on the wire.
type errorReply struct {
	Error Error `json:"error"`
}
