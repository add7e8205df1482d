// Package problem is the one error type that reaches users: a code, a message and a hint. Only the edges
// (admin API, CLI, inference routes) map codes to HTTP statuses and exit codes.
package problem

import (
	"errors"
	"fmt"
)

// Code is the closed list of error classes.
type Code string

// The codes.
const (
	InvalidArgument  Code = "invalid_argument"
	Unauthenticated  Code = "unauthenticated"
	PermissionDenied Code = "permission_denied"
	NotFound         Code = "not_found"
	SlowRequest      Code = "slow_request"
	Conflict         Code = "conflict"
	TooLarge         Code = "too_large"
	Unplaceable      Code = "unplaceable"
	QuotaExceeded    Code = "quota_exceeded"
	HeaderTooLarge   Code = "header_too_large"
	Internal         Code = "internal"
	Upstream         Code = "upstream"
	Overloaded       Code = "overloaded"
	Unavailable      Code = "unavailable"
	Timeout          Code = "timeout"
)

// Error is an error for a person: what is wrong, and what to do next.
type Error struct {
	Code    Code     `json:"code"`
	Message string   `json:"message"`
	Hint    string   `json:"hint,omitempty"`
	Doc     string   `json:"doc,omitempty"`
	Details []string `json:"details,omitempty"`
	cause   error
}

// New makes an Error; format may wrap a cause with %w.
func New(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...) //nolint:err113 // this is the constructor
	return &Error{Code: code, Message: err.Error(), cause: errors.Unwrap(err)}
}

// HintOf returns the hint of an error, "" if it has none.
func HintOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Hint
	}
	return ""
}

// WithHint sets the hint and returns e.
func (e *Error) WithHint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

// WithDetails sets the detail lines and returns e.
func (e *Error) WithDetails(lines ...string) *Error {
	e.Details = lines
	return e
}

func (e *Error) Error() string { return e.Message }

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.cause }

// CodeOf is the code of the first Error in err's chain, Internal if there is none.
func CodeOf(err error) Code {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return Internal
}

var https = map[Code]int{
	InvalidArgument: 400, Unauthenticated: 401, PermissionDenied: 403, NotFound: 404, SlowRequest: 408,
	Conflict: 409,
	TooLarge: 413, Unplaceable: 422, QuotaExceeded: 429, HeaderTooLarge: 431, Internal: 500, Upstream: 502,
	Overloaded: 503, Unavailable: 503, Timeout: 504,
}

// HTTPStatus maps a code to the status of the admin API.
func HTTPStatus(c Code) int { return https[c] }

// ExitCode maps a code to the CLI's exit code.
func ExitCode(c Code) int {
	switch c {
	case InvalidArgument, TooLarge:
		return 2
	case Unauthenticated, PermissionDenied:
		return 4
	case Unplaceable:
		return 5
	case Timeout:
		return 8
	default:
		return 1
	}
}
