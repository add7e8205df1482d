package openai

import (
	"fmt"
	"net/http"
	"unicode/utf8"
)

// ErrorBody appends an error in the OpenAI shape to dst:
//
//	{"error":{"message":…,"type":…,"param":…,"code":…}}
//
// An empty typ is the type of the status, an empty code or param is null.
func ErrorBody(dst []byte, status int, typ, code, message, param string) []byte {
	if typ == "" {
		typ = errorType(status)
	}
	dst = append(dst, `{"error":{"message":`...)
	dst = AppendString(dst, message)
	dst = append(dst, `,"type":`...)
	dst = AppendString(dst, typ)
	dst = append(dst, `,"param":`...)
	dst = appendStringOrNull(dst, param)
	dst = append(dst, `,"code":`...)
	dst = appendStringOrNull(dst, code)
	return append(dst, `}}`...)
}

// ErrorEvent appends the server-sent event that ends a broken stream of route r. Completions and chat share
// one shape: clients look for "error" in the event's data. No [DONE] follows, the connection is cut.
func ErrorEvent(dst []byte, _ Route, status int, typ, code, message string) []byte {
	dst = append(dst, "data: "...)
	dst = ErrorBody(dst, status, typ, code, message, "")
	return append(dst, "\n\n"...)
}

func appendStringOrNull(dst []byte, s string) []byte {
	if s == "" {
		return append(dst, "null"...)
	}
	return AppendString(dst, s)
}

const hexDigits = "0123456789abcdef"

// AppendString appends s as a JSON string; bytes that are not UTF-8 become U+FFFD.
func AppendString(dst []byte, s string) []byte {
	dst = append(dst, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r == '\n':
			dst = append(dst, `\n`...)
		case r < ' ' || r == 0x7f:
			dst = append(dst, `\u00`...)
			dst = append(dst, hexDigits[r>>4], hexDigits[r&0xf])
		default:
			dst = utf8.AppendRune(dst, r)
		}
	}
	return append(dst, '"')
}

// BodyError is the reason why a request body is refused with 400, in a text for the client. It never quotes
// the prompt.
type BodyError struct {
	Message string
	Param   string // top-level field, empty if none is to blame
	Code    string // always CodeInvalidRequest so far

	fault fault
}

func (e *BodyError) Error() string { return e.Message }

// fault is the closed list of reasons for a BodyError.
type fault uint8

const (
	faultNone fault = iota
	faultEmpty
	faultCut
	faultByte
	faultControl
	faultEscape
	faultNumber
	faultLiteral
	faultAfter
	faultNotFinite
	faultNotObject
	faultDepth
	faultKeys
	faultTopKeys
	faultDuplicate
	faultType
	faultTooLarge
	faultReserved
)

// text is the message of a fault at byte at of the body.
func (f fault) text(at int) string {
	const not = "body is not valid JSON: "
	switch f {
	case faultEmpty:
		return "body is empty; send a JSON object"
	case faultCut:
		return fmt.Sprintf(not+"it ends at byte %d, in the middle of a value", at)
	case faultControl:
		return fmt.Sprintf(not+"raw control character in a string at byte %d; escape it", at)
	case faultEscape:
		return fmt.Sprintf(not+"unknown escape in a string at byte %d", at)
	case faultNumber:
		return fmt.Sprintf(not+"malformed number at byte %d", at)
	case faultLiteral:
		return fmt.Sprintf(not+"unknown word at byte %d; there are true, false and null", at)
	case faultAfter:
		return fmt.Sprintf(not+"something follows the object at byte %d", at)
	case faultNotFinite:
		return fmt.Sprintf(not+"NaN or Infinity at byte %d; send a finite number or leave the field out", at)
	case faultNotObject:
		return "body must be a JSON object"
	case faultDepth:
		return fmt.Sprintf("body is nested deeper than %d levels", maxDepth)
	case faultKeys:
		return fmt.Sprintf("body has more than %d keys in all", maxKeys)
	case faultTopKeys:
		return fmt.Sprintf("body has more than %d fields", maxFields)
	default:
		return fmt.Sprintf(not+"unexpected character at byte %d", at)
	}
}

// maxParam is how much of a field's name an error repeats, in bytes.
const maxParam = 64

func newBodyError(f fault, param []byte, format string, args ...any) *BodyError {
	return &BodyError{
		Message: fmt.Sprintf(format, args...), Param: string(param[:min(len(param), maxParam)]),
		Code: CodeInvalidRequest, fault: f,
	}
}

// The stable words in the "code" of an error on the inference routes.
const (
	CodeInvalidRequest    = "invalid_request"
	CodeModelNotFound     = "model_not_found"
	CodeUnsupportedRoute  = "unsupported_route"
	CodeSlowRequest       = "slow_request"
	CodeBodyTooLarge      = "body_too_large"
	CodeQuotaExceeded     = "quota_exceeded"
	CodeUpstreamFailed    = "upstream_failed"
	CodeOverloaded        = "overloaded"
	CodeQueueTimeout      = "queue_timeout"
	CodeNoReadyRank       = "no_ready_rank"
	CodeFirstTokenTimeout = "first_token_timeout"
	CodeDeadlineExceeded  = "deadline_exceeded"

	// Inside a stream, after the first byte: the HTTP status is 200 by then.
	CodeUpstreamLost = "upstream_lost"
	CodeStalled      = "stalled"
	CodeDrained      = "drained"
)

// Status is the HTTP status of a code. Codes that only occur inside a stream map to 502 (the engine's fault)
// or 503 (dpserve's), for logs; an unknown code is 500.
func Status(code string) int {
	switch code {
	case CodeInvalidRequest:
		return http.StatusBadRequest
	case CodeModelNotFound, CodeUnsupportedRoute:
		return http.StatusNotFound
	case CodeSlowRequest:
		return http.StatusRequestTimeout
	case CodeBodyTooLarge:
		return http.StatusRequestEntityTooLarge
	case CodeQuotaExceeded:
		return http.StatusTooManyRequests
	case CodeUpstreamFailed, CodeUpstreamLost, CodeStalled:
		return http.StatusBadGateway
	case CodeOverloaded, CodeQueueTimeout, CodeNoReadyRank, CodeDrained:
		return http.StatusServiceUnavailable
	case CodeFirstTokenTimeout, CodeDeadlineExceeded:
		return http.StatusGatewayTimeout
	}
	return http.StatusInternalServerError
}

// errorType is the OpenAI error type that goes with an HTTP status.
func errorType(status int) string {
	switch {
	case status == http.StatusUnauthorized:
		return "authentication_error"
	case status == http.StatusForbidden:
		return "permission_error"
	case status == http.StatusNotFound:
		return "not_found_error"
	case status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case status >= http.StatusInternalServerError:
		return "server_error"
	}
	return "invalid_request_error"
}
