package sim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// apiError is an error of the engine's API: status, and the object form of its body.
type apiError struct {
	status  int
	kind    string
	message string
	param   string // "" = null
}

func (e *apiError) Error() string { return e.message }

// Error texts of the imitated engine that clients or dpserve tell apart.
const (
	msgEngineDead = "EngineCore encountered an issue. See stack trace (above) for the root cause."
	msgStopping   = "cannot schedule new futures after shutdown"
	msgBusy       = "The engine is currently busy and cannot accept new requests. Please try again later " +
		"or on a different instance."
	msgMediaType = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
	msgNoPrompt  = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
	msgInjected  = "simulated failure"
	msgInternal  = "Internal server error"
)

const kindInternal = "InternalServerError"

func badRequest(param, format string, args ...any) *apiError {
	return &apiError{
		status: http.StatusBadRequest, kind: "BadRequestError",
		message: fmt.Sprintf(format, args...), param: param,
	}
}

func internalError(message string) *apiError {
	return &apiError{status: http.StatusInternalServerError, kind: kindInternal, message: message}
}

func busyError() *apiError {
	return &apiError{status: http.StatusServiceUnavailable, kind: "Service Unavailable", message: msgBusy}
}

// codeError is an injected error of any code.
func codeError(code int) *apiError {
	switch {
	case code == http.StatusServiceUnavailable:
		return busyError()
	case code >= http.StatusInternalServerError:
		return &apiError{status: code, kind: kindInternal, message: msgInjected}
	}
	return &apiError{status: code, kind: "BadRequestError", message: msgInjected}
}

// body is the answer of a request that failed, in the compact spelling of vLLM's answers.
func (e *apiError) body() []byte {
	return e.append(nil, `{"error":{"message":%s,"type":%s,"param":%s,"code":%d}}`)
}

// messagesError is the error as /v1/messages says it.
func (e *apiError) messagesError() map[string]string {
	return map[string]string{"type": e.kind, "message": e.message}
}

// messagesBody is body in Anthropic's shape.
func (e *apiError) messagesBody() []byte {
	return mustMarshal(map[string]any{"type": "error", "error": e.messagesError()})
}

// event is the event of a stream that failed, in the spaced spelling of vLLM's events.
func (e *apiError) event(dst []byte) []byte {
	return e.append(dst, `data: {"error": {"message": %s, "type": %s, "param": %s, "code": %d}}`+"\n\n")
}

func (e *apiError) append(dst []byte, format string) []byte {
	param := []byte("null")
	if e.param != "" {
		param = mustMarshal(e.param)
	}
	return fmt.Appendf(dst, format, mustMarshal(e.message), mustMarshal(e.kind), param, e.status)
}

// Texts of faults in the form of a body.
const (
	msgRequired   = "Field required"
	msgNotInteger = "Input should be a valid integer, unable to parse string as an integer"
	msgNegative   = "Input should be greater than or equal to 0"
)

// schemaError is the answer to a body that is no request. input says what stood there.
func schemaError(param, why, input string) *apiError {
	kind := "value_error"
	switch why {
	case msgRequired:
		kind = "missing"
	case msgNotInteger:
		kind = "int_parsing"
	case msgNegative:
		kind = "greater_than_equal"
	}
	return &apiError{
		status: http.StatusBadRequest, kind: "Bad Request", param: param,
		message: fmt.Sprintf("1 validation error:\n  {'type': %s, 'loc': %s, 'msg': %s, 'input': %s}",
			pythonString(kind), pythonString(param), pythonString(why), pythonString(input)),
	}
}

// pythonString is a text as Python shows it inside an object.
func pythonString(text string) string {
	if strings.Contains(text, "'") && !strings.Contains(text, `"`) {
		return `"` + text + `"`
	}
	return "'" + strings.ReplaceAll(text, "'", `\'`) + "'"
}

// pythonFloat spells a number as the imitated engine does: whole ones have a decimal place.
func pythonFloat(v float64) string {
	text := strconv.FormatFloat(v, 'g', -1, 64)
	if !strings.ContainsAny(text, ".eIN") {
		text += ".0"
	}
	return text
}

// maxInputShown bounds what an error repeats of the body.
const maxInputShown = 100

// inputText is a member of a body as an error shows it: objects and lists by their size.
func inputText(raw json.RawMessage) string {
	var object map[string]json.RawMessage
	var list []json.RawMessage
	switch {
	case len(raw) == 0:
		return "None"
	case raw[0] == '{' && json.Unmarshal(raw, &object) == nil:
		return fmt.Sprintf("<dict of %d items>", len(object))
	case raw[0] == '[' && json.Unmarshal(raw, &list) == nil:
		return fmt.Sprintf("<list of %d items>", len(list))
	}
	text := strings.Trim(string(raw), `"`)
	return text[:min(len(text), maxInputShown)]
}

// mustMarshal encodes values that always have a JSON form.
func mustMarshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}
