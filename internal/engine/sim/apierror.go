package sim

import (
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
	msgScaleOut = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to " +
		"enable them."
	msgMediaType = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
	msgNoPrompt  = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
	msgInjected  = "simulated failure"
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

// body is the compact form of a HTTP answer.
func (e *apiError) body() []byte {
	b := append([]byte(`{"error":{"message":`), appendJSON(nil, e.message)...)
	b = appendJSON(append(b, `,"type":`...), e.kind)
	b = appendStringOrNull(append(b, `,"param":`...), e.param)
	b = strconv.AppendInt(append(b, `,"code":`...), int64(e.status), 10)
	return append(b, "}}"...)
}

// event is the spaced form of a stream.
func (e *apiError) event(dst []byte) []byte {
	dst = appendJSON(append(dst, `data: {"error": {"message": `...), e.message)
	dst = appendJSON(append(dst, `, "type": `...), e.kind)
	dst = appendStringOrNull(append(dst, `, "param": `...), e.param)
	dst = strconv.AppendInt(append(dst, `, "code": `...), int64(e.status), 10)
	return append(dst, "}}\n\n"...)
}

// fieldError is one complaint of the schema check.
type fieldError struct {
	kind, loc, msg, input, ctx string
}

func (f *fieldError) String() string {
	s := fmt.Sprintf("{'type': '%s', 'loc': '%s', 'msg': '%s', 'input': '%s'", f.kind, f.loc, f.msg, f.input)
	if f.ctx != "" {
		s += ", 'ctx': {" + f.ctx + "}"
	}
	return s + "}"
}

// schemaError joins complaints into the answer of a failed schema check.
func schemaError(faults []fieldError) *apiError {
	plural := "s"
	if len(faults) == 1 {
		plural = ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d validation error%s:", len(faults), plural)
	for i := range faults {
		b.WriteString("\n  ")
		b.WriteString(faults[i].String())
	}
	return &apiError{
		status: http.StatusBadRequest, kind: "Bad Request", message: b.String(),
		param: faults[0].loc,
	}
}
