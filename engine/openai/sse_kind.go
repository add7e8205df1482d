package openai

// EventKind says what an event of an answer's stream means to a relay.
type EventKind uint8

// The kinds of events, from the least to the most final.
const (
	// EventOther shows nothing and is no token: a comment, a chunk without choices (usage).
	EventOther EventKind = iota
	// EventEmpty is a chunk that is a token but shows nothing: a role, or an empty delta while a UTF-8
	// character is incomplete.
	EventEmpty
	// EventContent carries text, a tool call, reasoning or token ids.
	EventContent
	// EventFinish carries a finish_reason other than abort.
	EventFinish
	// EventAbort carries finish_reason "abort": the engine gave the request up.
	EventAbort
	// EventError is an error object instead of a chunk.
	EventError
	// EventDone is `[DONE]`. It does not prove a complete answer: vLLM sends it after errors as well.
	EventDone
)

var eventKindNames = [...]string{"other", "empty", "content", "finish", "abort", "error", "done"}

func (k EventKind) String() string { return eventKindNames[k] }
