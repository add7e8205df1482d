package openai

import (
	"cmp"
	"net/http"
	"strconv"
)

// Shape is how an API writes its errors. The zero value is OpenAI.
type Shape uint8

// The shapes.
const (
	OpenAI Shape = iota
	Anthropic
	SGLang // of its own route /generate
)

// Error appends an error body of the shape to dst. An empty typ is the type of the status, an empty code or
// param is null or left out.
//
//	OpenAI:    {"error":{"message":…,"type":…,"param":…,"code":…}}
//	Anthropic: {"type":"error","error":{"type":…,"message":…,"code":…}}
//	SGLang:    {"error":{"message":…,"code":…}}
func (s Shape) Error(dst []byte, status int, typ, code, message, param string) []byte {
	switch s {
	case Anthropic:
		dst = append(dst, `{"type":"error","error":{"type":`...)
		dst = AppendString(dst, anthropicType(status))
		dst = append(dst, `,"message":`...)
		dst = AppendString(dst, message)
	case SGLang:
		dst = append(dst, `{"error":{"message":`...)
		dst = AppendString(dst, message)
	default:
		return ErrorBody(dst, status, typ, code, message, param)
	}
	if code != "" {
		dst = AppendString(append(dst, `,"code":`...), code)
	}
	return append(dst, `}}`...)
}

// anthropicType is the type of Anthropic's errors that goes with an HTTP status.
func anthropicType(status int) string {
	switch status {
	case http.StatusUnauthorized:
		return "authentication_error"
	case http.StatusForbidden:
		return "permission_error"
	case http.StatusNotFound:
		return "not_found_error"
	case http.StatusRequestEntityTooLarge:
		return "request_too_large"
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	case http.StatusServiceUnavailable:
		return "overloaded_error"
	case http.StatusGatewayTimeout:
		return "timeout_error"
	}
	if status >= http.StatusInternalServerError {
		return "api_error"
	}
	return "invalid_request_error"
}

// pingEvent is Anthropic's own event for a client that waits.
var pingEvent = []byte("event: ping\ndata: {\"type\": \"ping\"}\n\n")

// keepalive is a comment, which every reader of server-sent events skips.
var keepalive = []byte(": keepalive\n\n")

// Keepalive is what a client of a stream of route r may get at any time between two events, and which is no
// part of the answer. It must not be changed.
func (r Route) Keepalive() []byte {
	if r.Shape() == Anthropic {
		return pingEvent
	}
	return keepalive
}

// EngineErrorEvent is ErrorEvent for an engine's answer with an error. The code is the status.
func EngineErrorEvent(dst []byte, r Route, status int, body []byte) []byte {
	e := readError(body)
	message := cmp.Or(e.Message, http.StatusText(status))
	return ErrorEvent(dst, r, status, e.Type, strconv.Itoa(status), message)
}

// ErrorEvent appends the server-sent event that ends a broken stream of route r, in the shape by which the
// clients of its API find an error. No [DONE] follows, the connection is cut.
func ErrorEvent(dst []byte, r Route, status int, typ, code, message string) []byte {
	switch r {
	case Messages:
		dst = append(dst, "event: error\ndata: "...)
	case Responses, ResponseRead:
		dst = append(dst, `event: error`+"\n"+`data: {"type":"error","param":null,"code":`...)
		dst = AppendString(dst, code)
		dst = AppendString(append(dst, `,"message":`...), message)
		dst = append(dst, ',')
		dst = append(dst, r.Shape().Error(nil, status, typ, code, message, "")[1:]...)
		return append(dst, "\n\n"...)
	default:
		dst = append(dst, "data: "...)
	}
	dst = r.Shape().Error(dst, status, typ, code, message, "")
	return append(dst, "\n\n"...)
}
