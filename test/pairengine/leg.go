package pairengine

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/engine/transfer"
)

// Leg is one request that reached a stub engine.
type Leg struct {
	At     *Engine
	Side   string // Prefill, Decode or Plain
	Path   string
	Header http.Header
	Body   []byte
	Fields map[string]json.RawMessage
	Params map[string]json.RawMessage // of kv_transfer_params
	Prompt string                     // its bytes in the body
	Ours   bool                       // it is of a request of the test
	Began  time.Time
	Ended  time.Time // zero: it is not over
	Left   bool      // the caller closed the connection before the answer was complete
	Status int

	isFirst bool // it is of a first meeting of two engines
	life    int  // of the engine
	answer  *legAnswer
}

// legAnswer is the answer of a leg; the handler's goroutine alone uses it.
type legAnswer struct {
	w      http.ResponseWriter
	r      *http.Request
	status int
	words  int
	whole  bool
}

// read takes the body apart.
func (l *Leg) read() error {
	if err := json.Unmarshal(l.Body, &l.Fields); err != nil {
		return err
	}
	if raw, ok := l.Fields["kv_transfer_params"]; ok && string(raw) != "null" {
		if err := json.Unmarshal(raw, &l.Params); err != nil {
			return err
		}
	}
	l.Prompt = string(l.Fields["prompt"]) + string(l.Fields["messages"])
	l.isFirst = strings.HasPrefix(l.Prompt, firstMeeting)
	return nil
}

// ID is the X-Request-Id.
func (l *Leg) ID() string { return l.Header.Get("X-Request-Id") }

// Rank is the data-parallel rank that the leg names, by header or body; -1 if it names none.
func (l *Leg) Rank() int {
	rank := l.number("routed_dp_rank", -1)
	if text := l.Header.Get("X-Data-Parallel-Rank"); text != "" {
		_, _ = fmt.Sscan(text, &rank)
	}
	return rank
}

// Rooms are SGLang's rooms, one per prompt.
func (l *Leg) Rooms() []uint64 {
	raw := l.Fields["bootstrap_room"]
	var list []uint64
	if json.Unmarshal(raw, &list) == nil {
		return list
	}
	var one uint64
	if json.Unmarshal(raw, &one) != nil {
		return nil
	}
	return []uint64{one}
}

// isFakeBootstrap reports whether an SGLang engine is asked to compute without a transfer, as health checks
// do.
func (l *Leg) isFakeBootstrap() bool {
	return strings.Contains(string(l.Fields["bootstrap_host"]), "2.2.2.2")
}

// number is a field with a number.
func (l *Leg) number(name string, unset int) int {
	n := unset
	if raw, ok := l.Fields[name]; ok && json.Unmarshal(raw, &n) != nil {
		return unset
	}
	return n
}

func (l *Leg) isSet(name string) bool { return string(l.Fields[name]) == "true" }

// tokens are how many tokens the answer has: one, if an SGLang engine computes a prompt for another one.
func (l *Leg) tokens() int {
	if l.Side == Prefill && l.At.fleet.Transfer == transfer.SGLangName {
		return 1
	}
	return l.number("max_completion_tokens", l.number("max_tokens", 8))
}

// prompts are the prompts of the body, each as its bytes.
func (l *Leg) prompts(prompt string) []string {
	var list []json.RawMessage
	if l.Fields["messages"] != nil || json.Unmarshal([]byte(prompt), &list) != nil {
		return []string{prompt}
	}
	var out []string
	for _, one := range list {
		if one[0] != '"' {
			return []string{prompt} // token ids
		}
		out = append(out, string(one))
	}
	return out
}

var someWords = [16]string{
	" fox", " dog", " moon", " river", " stone", " cloud", " tree", " lamp", " bird", " road", " salt",
	" wind", " door", " glass", " seed", " wave",
}

// text is the text of a choice for a prompt.
func (l *Leg) text(prompt string, choice int) string {
	return strings.Join(wordsFor(prompt, choice, l.tokens()), "")
}

func wordsFor(prompt string, choice, tokens int) []string {
	h := fnv.New64a()
	_, _ = fmt.Fprintf(h, "%d %s", choice, prompt)
	x := h.Sum64()
	out := make([]string, tokens)
	for i := range out {
		x = x*6364136223846793005 + 1442695040888963407
		out[i] = someWords[x>>60]
	}
	return out
}

// fail answers with an error as vLLM does.
func (l *Leg) fail(status int, message string) {
	l.head("application/json", status)
	_, _ = fmt.Fprintf(l.answer.w, `{"error":{"message":%q,"type":%q,"param":null,"code":%d}}`, message,
		strings.ReplaceAll(http.StatusText(status), " ", ""), status)
	l.answer.whole = true
}

// Fail answers with a status and vLLM's words.
func (l *Leg) Fail(status int) bool {
	message := "Internal server error"
	if status < http.StatusInternalServerError {
		message = "This model's maximum context length is 4 tokens"
	}
	l.fail(status, message)
	return true
}

// FailStream answers a stream with an error as its first event, as vLLM does after a failed transfer.
func (l *Leg) FailStream() bool {
	if !l.isSet("stream") {
		return l.Fail(http.StatusInternalServerError)
	}
	l.head("text/event-stream; charset=utf-8", http.StatusOK)
	l.event(`{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, ` +
		`"code": 500}}`)
	l.event("[DONE]")
	l.answer.whole = true
	return true
}

// Reset breaks the connection without a byte of an answer.
func (l *Leg) Reset() bool {
	conn, _, err := http.NewResponseController(l.answer.w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
	l.answer.whole = true
	return true
}

// Handle lets h answer. The body is read already.
func (l *Leg) Handle(h http.HandlerFunc) bool {
	h(l.answer.w, l.answer.r)
	l.answer.whole = true
	return true
}

// Stall answers nothing until the caller leaves.
func (l *Leg) Stall() bool {
	<-l.answer.r.Context().Done()
	return true
}

// StallUntil answers as usual after a channel is closed, unless the caller leaves before.
func (l *Leg) StallUntil(let <-chan struct{}) bool {
	select {
	case <-let:
		return false
	case <-l.answer.r.Context().Done():
		return true
	}
}

// head sends the status and the head of an answer.
func (l *Leg) head(kind string, status int) {
	l.answer.status = status
	l.answer.w.Header().Set("Content-Type", kind)
	l.answer.w.WriteHeader(status)
}

// event sends one event of a stream; false if the caller has left.
func (l *Leg) event(data string) bool {
	if _, err := fmt.Fprintf(l.answer.w, "data: %s\n\n", data); err != nil {
		return false
	}
	return http.NewResponseController(l.answer.w).Flush() == nil && l.answer.r.Context().Err() == nil
}

// pause waits between two tokens; false if the caller has left.
func (l *Leg) pause() bool {
	if l.At.fleet.Pause <= 0 {
		return l.answer.r.Context().Err() == nil
	}
	t := time.NewTimer(l.At.fleet.Pause)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-l.answer.r.Context().Done():
		return false
	}
}

// Answer gives the whole answer for a prompt: the body's own, or the one that the engine got blocks of.
func (l *Leg) Answer(prompt string) bool { return l.AnswerAfterFirst(prompt, nil) }

// AnswerAfterFirst is Answer; a stream waits behind its first token until let is closed.
func (l *Leg) AnswerAfterFirst(prompt string, let <-chan struct{}) bool {
	if !l.isSet("stream") {
		l.answerWhole(prompt, "")
		return true
	}
	l.head("text/event-stream; charset=utf-8", http.StatusOK)
	if l.isChat() && !l.event(l.chunk(`"delta":{"role":"assistant","content":""},"finish_reason":null`)) {
		return true
	}
	for i, word := range wordsFor(prompt, 0, l.tokens()) {
		if i > 0 && !l.pause() || !l.event(l.chunk(l.piece(word, "null"))) {
			return true
		}
		l.answer.words++
		if i == 0 && let != nil && l.StallUntil(let) {
			return true
		}
	}
	l.event(l.chunk(l.piece("", `"length"`)))
	l.event("[DONE]")
	l.answer.whole = true
	return true
}

func (l *Leg) isChat() bool { return l.Path == transfer.Chat.Path() }

// piece is what one event of a stream says of the choice.
func (l *Leg) piece(word, finish string) string {
	if l.isChat() {
		return fmt.Sprintf(`"delta":{"content":%q},"finish_reason":%s`, word, finish)
	}
	return fmt.Sprintf(`"text":%q,"finish_reason":%s`, word, finish)
}

func (l *Leg) chunk(choice string) string {
	if l.isChat() {
		return fmt.Sprintf(`{"id":"chatcmpl-%s","object":"chat.completion.chunk","created":1,"model":%q,`+
			`"choices":[{"index":0,%s}]}`, l.ID(), l.At.fleet.Model, choice)
	}
	return fmt.Sprintf(`{"id":"cmpl-%s","object":"text_completion","created":1,"model":%q,`+
		`"choices":[{"index":0,%s}]}`, l.ID(), l.At.fleet.Model, choice)
}

// answerWhole answers with one JSON object. params is the text of kv_transfer_params, "" for none.
func (l *Leg) answerWhole(prompt, params string) {
	for range l.tokens() - 1 {
		if !l.pause() {
			return
		}
	}
	var choices []string
	for _, one := range l.prompts(prompt) {
		for range max(1, l.number("n", 1)) {
			text := l.text(one, len(choices))
			if len(l.prompts(prompt)) > 1 {
				text = l.text(one, 0)
			}
			member := fmt.Sprintf(`"text":%q`, text)
			if l.isChat() {
				member = fmt.Sprintf(`"message":{"role":"assistant","content":%q}`, text)
			}
			choices = append(choices, fmt.Sprintf(`{"index":%d,%s,"finish_reason":"length"}`, len(choices),
				member))
		}
	}
	if params == "" {
		params = "null"
	}
	tokens := promptTokens(l.Prompt)
	l.head("application/json", http.StatusOK)
	l.answer.words += l.tokens()
	_, err := fmt.Fprintf(l.answer.w, `{"id":"%s","object":"text_completion","created":1,"model":%q,`+
		`"choices":[%s],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d},`+
		`"kv_transfer_params":%s}`, l.ID(), l.At.fleet.Model, strings.Join(choices, ","), tokens,
		tokens+l.tokens(), l.tokens(), params)
	l.answer.whole = err == nil
}

// promptTokens counts a prompt as the stub engines do: four bytes are a token.
func promptTokens(prompt string) int { return max(1, len(prompt)/4) }
