package openai

import (
	"encoding/json"
	"strings"
)

// EngineError is an engine's error, as read from a body or from an error event. Engines write it in three
// shapes: {"error": {...}}, {"object": "error", ...} and {"detail": ...}. A field that is absent is empty.
type EngineError struct {
	Status  int    // the numeric code if it is an HTTP error status (400 to 599), else 0
	Type    string //
	// cut; may repeat any part of the request. Never goes into another answer, and into a log only if IsKnown
	// says so
	Message string
	Param   string // the field that it is about
	Length  int    // bytes of the whole message
}

// BusyType is the error type of an engine whose own admission limit is reached; the engine is healthy.
const BusyType = "Service Unavailable"

// Busy says that the engine refused because it is full, not because it is ill.
func (e EngineError) Busy() bool { return e.Type == BusyType }

// coreDead begins vLLM's message when its engine core is gone (the process exits within a second).
const coreDead = "EngineCore encountered an issue"

// Dead says that the engine will not answer anybody any more.
func (e EngineError) Dead() bool { return strings.HasPrefix(e.Message, coreDead) }

// maxErrorText bounds what of an engine's message is kept for the log.
const maxErrorText = 300

type errorFields struct {
	Object  string          `json:"object"`
	Message string          `json:"message"`
	Type    string          `json:"type"`
	Param   json.RawMessage `json:"param"`
	Code    json.RawMessage `json:"code"`
}

// ParseError reads an engine's error in any of its shapes: {"error":{…}}, {"error":"text"},
// {"object":"error",…} and {"detail":"text"}. What it cannot read is an empty EngineError.
func ParseError(data []byte) EngineError {
	var top struct {
		errorFields
		Error  json.RawMessage `json:"error"`
		Detail json.RawMessage `json:"detail"`
	}
	if json.Unmarshal(data, &top) != nil {
		return EngineError{}
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
	return EngineError{Status: errorStatus(fields.Code), Type: fields.Type, Message: clip(fields.Message),
		Param: param, Length: len(fields.Message)}
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
