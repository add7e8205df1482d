package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
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
}

func (e *BodyError) Error() string { return e.Message }

// fault is the closed list of what a scanner refuses.
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

func newBodyError(param []byte, format string, args ...any) *BodyError {
	return &BodyError{
		Message: fmt.Sprintf(format, args...), Param: string(param[:min(len(param), maxParam)]),
		Code: CodeInvalidRequest,
	}
}

// The stable words in the "code" of an error on the inference routes.
const (
	CodeInvalidRequest    = "invalid_request"
	CodeInvalidKey        = "invalid_api_key"
	CodeModelNotFound     = "model_not_found"
	CodeRouteDenied       = "route_denied"
	CodeSlowRequest       = "slow_request"
	CodeBodyTooLarge      = "body_too_large"
	CodeQuotaExceeded     = "quota_exceeded"
	CodeUpstreamFailed    = "upstream_failed"
	CodeOverloaded        = "overloaded"
	CodeQueueTimeout      = "queue_timeout"
	CodeNoFiles           = "no_files"
	CodeNoReadyRank       = "no_ready_rank"
	CodeLoopDetected      = "loop_detected"
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
	case CodeInvalidKey:
		return http.StatusUnauthorized
	case CodeRouteDenied:
		return http.StatusForbidden
	case CodeModelNotFound:
		return http.StatusNotFound
	case CodeSlowRequest:
		return http.StatusRequestTimeout
	case CodeBodyTooLarge:
		return http.StatusRequestEntityTooLarge
	case CodeQuotaExceeded:
		return http.StatusTooManyRequests
	case CodeUpstreamFailed, CodeUpstreamLost, CodeStalled:
		return http.StatusBadGateway
	case CodeOverloaded, CodeQueueTimeout, CodeNoReadyRank, CodeNoFiles, CodeDrained:
		return http.StatusServiceUnavailable
	case CodeLoopDetected:
		return http.StatusLoopDetected
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

// EngineError is an engine's error, as read from a body or from an error event. Engines write it in three
// shapes: {"error": {...}}, {"object": "error", ...} and {"detail": ...}. A field that is absent is empty.
type EngineError struct {
	Status int    // the numeric code if it is an HTTP error status (400 to 599), else 0
	Type   string //
	// cut; may repeat any part of the request, so it never goes into another answer, and into a log only if
	// IsKnown
	Message string
	Param   string // the field that it is about
	Length  int    // bytes of the whole message
	IsBare  bool   // the message is all there is: the body is a text, and no JSON object
}

// IsDead reports that vLLM's engine core is gone: the process exits within a second.
func (e *EngineError) IsDead() bool { return strings.HasPrefix(e.Message, coreDead) }

// coreDead begins vLLM's message then.
const coreDead = "EngineCore encountered an issue"

// maxErrorText is the length in bytes to which an engine's message is cut for the log.
const maxErrorText = 300

type errorFields struct {
	Object  string          `json:"object"`
	Message string          `json:"message"`
	Type    string          `json:"type"`
	Param   json.RawMessage `json:"param"`
	Code    json.RawMessage `json:"code"`
}

// ParseError reads an engine's error in any of its shapes: {"error":{…}}, {"error":"text"},
// {"object":"error",…} and {"detail":"text"}; or a bare text. The result for any other data is an empty
// EngineError.
func ParseError(data []byte) EngineError {
	e := readError(data)
	e.Message = clip(e.Message)
	return e
}

// readError is ParseError with the whole message.
func readError(data []byte) EngineError {
	var top struct {
		errorFields
		Error  json.RawMessage `json:"error"`
		Detail json.RawMessage `json:"detail"`
	}
	if json.Unmarshal(data, &top) != nil {
		text := strings.Trim(string(bytes.TrimSpace(data)), `"`)
		if text == "" || text[0] == '{' || text[0] == '[' || text[0] == '<' {
			return EngineError{}
		}
		return EngineError{Message: text, Length: len(text), IsBare: true}
	}
	fields := top.errorFields
	for _, raw := range []json.RawMessage{top.Error, top.Detail} {
		if len(raw) == 0 || string(raw) == "null" {
			continue
		}
		if json.Unmarshal(raw, &fields) != nil {
			fields.Message = strings.Trim(string(raw), `"`)
		}
		break
	}
	var param string
	if json.Unmarshal(fields.Param, &param) != nil {
		param = "" // null, or no name
	}
	return EngineError{
		Status: errorStatus(fields.Code), Type: fields.Type, Message: fields.Message,
		Param: param, Length: len(fields.Message),
	}
}

// errorStatus is the code if it is a JSON number from 400 to 599; other codes are words, which count as none.
func errorStatus(code json.RawMessage) int {
	var n int
	if json.Unmarshal(code, &n) != nil || n < 400 || n > 599 {
		return 0
	}
	return n
}

func clip(s string) string {
	if len(s) <= maxErrorText {
		return s
	}
	return strings.ToValidUTF8(s[:maxErrorText], "") + "…"
}

// knownTypes are the error types of vLLM, SGLang and OpenAI. Another one could be anything.
var knownTypes = []string{
	"BadRequestError", "Bad Request", "PermissionDeniedError", "NotFoundError", "NotImplementedError",
	"InternalServerError", "Service Unavailable",
	"UnauthorizedError", "Unauthorized", "invalid_request_error", "server_error", "rate_limit_exceeded",
}

// knownMessages are sentences of engines that repeat nothing of a request but numbers, each of which is
// written as #.
var knownMessages = []string{
	coreDead + ". See stack trace (above) for the root cause.",
	"cannot schedule new futures after shutdown",
	"Internal server error",
	"Internal Server Error",
	"The engine is currently busy and cannot accept new requests. Please try again later or on a different " +
		"instance.",
	"Unauthorized",
	"Not Found",
	"Method Not Allowed",
	"Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
	"You must pass at least one prompt",
	"There was an error parsing the body",
	"Stream options can only be defined when `stream=True`. (parameter=stream_options)",
	"n must be at least #, got #.",
	"temperature must be non-negative, got #. (parameter=temperature, value=#)",
	"top_p must be in (#, #], got #. (parameter=top_p, value=#)",
	"min_tokens must be greater than or equal to #, got #. (parameter=min_tokens, value=#)",
	"max_tokens must be at least #, got #. (parameter=max_tokens, value=#)",
	"max_tokens=# cannot be greater than max_model_len=#. Please request fewer output tokens. " +
		"(parameter=max_tokens, value=#)",
	"This model's maximum context length is # tokens. However, your prompt contains # input tokens, which " +
		"exceeds this limit even without " +
		"any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=#)",
	"This model's maximum context length is # tokens. However, your prompt contains at least # input " +
		"tokens, which exceeds this limit even " +
		"without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, " +
		"value=#)",
	"Requested sample logprobs of #, which is greater than max allowed: # (parameter=logprobs, value=#)",
	"Requested prompt logprobs of #, which is greater than max allowed: # (parameter=prompt_logprobs, " +
		"value=#)",
	"data_parallel_rank # is out of range [#, #).",
	`"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set`,
	"Cannot apply chat template to an empty conversation. Provide at least one message.",
	"simulated failure",
}

// IsKnown reports that the message is one of knownMessages, so that it repeats no text of the request.
func (e *EngineError) IsKnown() bool {
	return slices.ContainsFunc(knownMessages, func(pattern string) bool { return fits(pattern, e.Message) })
}

// KnownType is the type if it is one that engines have, else "".
func (e *EngineError) KnownType() string {
	if slices.Contains(knownTypes, e.Type) {
		return e.Type
	}
	return ""
}

// knownParams are the fields of a request that an error may be about.
var knownParams = []string{
	"model", "messages", "prompt", "prompt_embeds", "input_tokens", "max_tokens", "max_completion_tokens",
	"min_tokens", "temperature", "top_p", "top_k",
	"min_p", "n", "stream", "stream_options", "stop", "logprobs", "prompt_logprobs", "top_logprobs",
	"logit_bias", "seed", "tools", "tool_choice",
	"response_format", "structured_outputs", "guided_json", "frequency_penalty", "presence_penalty",
	"repetition_penalty", "echo", "suffix", "user",
	"priority", "cache_salt", "chat_template", "chat_template_kwargs", "vllm_xargs", "token_ids", "tokens",
	"truncate_prompt_tokens",
}

// KnownParam is the field that the error is about if it is one of those that requests have, else "".
func (e *EngineError) KnownParam() string {
	if slices.Contains(knownParams, e.Param) {
		return e.Param
	}
	return ""
}

// fits reports whether s is pattern with a number in place of each #.
func fits(pattern, s string) bool {
	for len(pattern) > 0 {
		if pattern[0] != '#' {
			if len(s) == 0 || s[0] != pattern[0] {
				return false
			}
			pattern, s = pattern[1:], s[1:]
			continue
		}
		n := 0
		for n < len(s) && isOfNumber(s, n) {
			n++
		}
		if n == 0 {
			return false
		}
		pattern, s = pattern[1:], s[n:]
	}
	return len(s) == 0
}

// isOfNumber reports whether s[i] goes on a number that began at s[0]: digits, a sign in front, a point with
// a digit behind it.
func isOfNumber(s string, i int) bool {
	c := s[i]
	return c-'0' <= 9 || i == 0 && c == '-' || c == '.' && i > 0 && i+1 < len(s) && s[i+1]-'0' <= 9
}
