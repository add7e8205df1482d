package openai

import "net/http"

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

// Status is the HTTP status of a code. Those that only occur inside a stream count as 502 (the engine's
// fault) or 503 (ours) where a status is asked for, as in logs; an unknown code is 500.
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

// ErrorType is the OpenAI error type that goes with an HTTP status.
func ErrorType(status int) string {
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
