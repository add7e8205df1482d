package dispatch

import "strings"

// busyType is the error type of vLLM at its own admission limit.
const busyType = "Service Unavailable"

// busyTexts are parts of what engines say in a 503 when they are full and well, in lower case: vLLM, SGLang,
// TGI, TensorRT-LLM, and engines that change their size.
var busyTexts = [...]string{
	"queue is full", "overloaded", "currently busy", "too many requests", "at capacity", "scaling",
}

// Answer is an engine's answer that is no success.
type Answer struct {
	Status int
	Type   string // of its error, "" for none
	Text   string // its message, or all of a body that is no JSON object; "" for none
	IsBare bool   // the body is a text, and no JSON object
	IsDead bool   // it says that the engine's core is gone
	// another rank has answered that model well of late, and the request names none
	IsRanks bool
}

// Classify is the cause of an engine's answer with a status of 300 or above, or of an error event.
func Classify(a Answer) Cause {
	switch {
	case a.Status < 400:
		return Redirected
	case a.Status >= 500 && a.IsDead:
		return EngineDead
	case a.Status == 429, a.Status == 503 && a.isBusy():
		return Busy
	}
	switch a.Status {
	case 401, 403, 404, 405:
		if a.IsRanks {
			return RankError
		}
	case 408:
		return Timeout
	case 501, 505:
		return Passed
	}
	if a.Status < 500 {
		return Passed
	}
	return EngineError
}

// isBusy reports whether a 503 says that the engine is well and full.
func (a Answer) isBusy() bool {
	if a.IsBare || a.Type == busyType {
		return true
	}
	text := strings.ToLower(a.Text)
	for _, part := range busyTexts {
		if strings.Contains(text, part) {
			return true
		}
	}
	return false
}
