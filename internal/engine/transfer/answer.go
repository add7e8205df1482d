package transfer

import "github.com/dpserve/dpserve/internal/engine/openai"

// MaxAnswer is the largest answer of a prefill leg that is read, in bytes. The block numbers of a prompt of a
// million tokens take half a MiB.
const MaxAnswer = 4 << 20

// Ending is how a prefill leg ended, by the finish_reason of its answer.
type Ending uint8

const (
	// EndedOtherwise: aborted, failed, or not said. Engines keep no blocks then.
	EndedOtherwise Ending = iota
	EndedByLength
	EndedByStop
)

// Answer is what a prefill leg answered. Counts are -1 where the engine gives none.
type Answer struct {
	Params       []byte // kv_transfer_params as written, within the answer's bytes; nil if absent or null
	Ending       Ending
	PromptTokens int
	CachedTokens int // of the prompt, in the prefill rank's cache
	RemoteTokens int // whose blocks the parameters name (remote_num_tokens)
}

// ReadPrefill reads the whole body of a prefill leg's answer of status 200, at most MaxAnswer bytes. The
// answer may be used only if the failure is NoFailure.
func ReadPrefill(t Transfer, q *Request, body []byte) (Answer, Failure) {
	a := Answer{PromptTokens: -1, CachedTokens: -1, RemoteTokens: -1}
	if len(body) > MaxAnswer {
		return a, PrefillBroken
	}
	if !t.Traits().limits {
		if holdsError(body) {
			return a, PrefillBroken
		}
		return a, t.Check(&a)
	}
	if a.read(body) != nil {
		return a, PrefillBroken
	}
	return a, t.Check(&a)
}

// holdsError reports whether an answer, streamed or not, tells of an error: a prefill leg that streams has
// status 200 even if it fails.
func holdsError(body []byte) bool {
	for len(body) > 0 {
		data, end := body, len(body)
		if n := openai.EventEnd(body, 0); n > 0 {
			end = n
		}
		if event := openai.EventData(body[:end]); event != nil {
			data = event
		}
		if e := openai.ParseError(data); e.Status != 0 || e.Type != "" || e.Message != "" {
			return true
		}
		body = body[end:]
	}
	return false
}

// read fills a from an answer that is not streamed.
func (a *Answer) read(body []byte) error {
	return openai.Members(body, func(key []byte, _, v openai.Span) error {
		raw := body[v.Start:v.End]
		switch string(key) {
		case "kv_transfer_params":
			a.Params = nil
			if raw[0] != 'n' {
				a.Params = raw
			}
		case "choices":
			a.Ending = endingOfChoices(raw)
		case "usage":
			return a.readUsage(raw)
		}
		return nil
	})
}

// endingOfChoices is the ending of the only choice; more or fewer are none that was asked for.
func endingOfChoices(raw []byte) Ending {
	if raw[0] != '[' {
		return EndedOtherwise
	}
	n, ending := 0, EndedOtherwise
	openai.Elements(raw, func(e openai.Span) bool {
		n++
		choice := raw[e.Start:e.End]
		err := openai.Members(choice, func(key []byte, _, v openai.Span) error {
			if string(key) == "finish_reason" {
				ending = endingOf(choice[v.Start:v.End])
			}
			return nil
		})
		return err == nil
	})
	if n != 1 {
		return EndedOtherwise
	}
	return ending
}

// endingOf reads a finish_reason. A call of a tool is how chats call a stop.
func endingOf(raw []byte) Ending {
	switch string(raw) {
	case `"length"`:
		return EndedByLength
	case `"stop"`, `"tool_calls"`, `"function_call"`:
		return EndedByStop
	}
	return EndedOtherwise
}

// readUsage takes the counts of tokens.
func (a *Answer) readUsage(raw []byte) error {
	if raw[0] != '{' {
		return nil
	}
	return openai.Members(raw, func(key []byte, _, v openai.Span) error {
		value := raw[v.Start:v.End]
		switch string(key) {
		case "prompt_tokens":
			a.PromptTokens = tokens(value)
		case "prompt_tokens_details":
			if value[0] == '{' {
				return openai.Members(value, func(key []byte, _, v openai.Span) error {
					if string(key) == "cached_tokens" {
						a.CachedTokens = tokens(value[v.Start:v.End])
					}
					return nil
				})
			}
		}
		return nil
	})
}

// maxTokens is beyond any context; a larger count is none.
const maxTokens = 1 << 31

// tokens is a plain number of tokens, -1 if raw is none.
func tokens(raw []byte) int {
	n, ok := openai.Number(raw)
	if !ok || raw[0] == '"' || n < 0 || n > maxTokens {
		return -1
	}
	return int(n)
}

// Failure is why a prefill's answer is of no use to a decode leg. Its text is for logs.
type Failure uint8

// The closed list of failures.
const (
	NoFailure       Failure = iota
	PrefillBroken           // an abort, or an answer that is no answer
	PrefillNoParams         // no parameters: the engine has no connector, or one of another kind
	PrefillUnfit            // they would end a decode engine, or make it compute another prompt
	PrefillStopped          // the leg ended by a stop, and this transfer keeps blocks of a full length only
	numFailures
)

var failureNames = [numFailures]string{
	"", "prefill_broken", "prefill_no_params", "prefill_unfit", "prefill_stopped",
}

func (f Failure) String() string { return failureNames[f] }
