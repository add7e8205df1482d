package routerapi

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/problem"
)

// CompletionBody is the body of a generation: the caller's sampling fields, and those that a generation sets
// itself.
func CompletionBody(q *msg.Generate, model string) ([]byte, error) {
	own := map[string]any{
		"model": cmp.Or(q.Model, model), "prompt": q.TokenIDs, "stream": true,
		"stream_options": map[string]bool{"include_usage": true}, "return_token_ids": true,
	}
	for _, part := range []struct {
		key     string
		members map[string]json.RawMessage
	}{
		{"sampling", q.Sampling},
		{"stop_conditions", q.StopConditions},
		{"sampling_options", q.SamplingOptions},
	} {
		for name, value := range part.members {
			if part.key != "sampling" && isLeftOut(name, value) {
				continue
			}
			if _, taken := own[name]; taken || name == "n" || name == "best_of" {
				return nil, problem.New(problem.InvalidArgument, "%s.%s is not the caller's to set, or is "+
					"given twice", part.key, name[:min(len(name), maxShown)]).
					WithHint("generate sends one prompt of token ids and streams one answer")
			}
			own[name] = value
		}
	}
	body, err := json.Marshal(own)
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "sampling is not JSON: %w", err).WithHint(
			"its members are those of a /v1/completions body")
	}
	return body, nil
}

// isLeftOut reports whether a member of Dynamo's says nothing: its callers write null for what they leave
// out, and 1 for the number of answers.
func isLeftOut(name string, value json.RawMessage) bool {
	text := string(value)
	return text == "null" || (name == "n" || name == "best_of") && text == "1"
}

// maxLine bounds a line of an engine's answer that is held here, in bytes.
const maxLine = 1 << 20

// TokenWriter is the client's end of a generation: it parses the relayed events and emits their tokens.
type TokenWriter struct {
	Cut bool // the answer has broken off

	header http.Header
	emit   func(*client.Part) error
	status int
	told   bool // the first part, which names worker and request, is emitted
	rest   []byte
	failed error // of emit, or an error event
	done   bool
}

// NewTokenWriter makes a TokenWriter. An error of emit ends the answer.
func NewTokenWriter(emit func(*client.Part) error) *TokenWriter {
	return &TokenWriter{header: http.Header{}, emit: emit}
}

var _ http.ResponseWriter = (*TokenWriter)(nil)

// Header implements http.ResponseWriter.
func (w *TokenWriter) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter.
func (w *TokenWriter) WriteHeader(status int) { w.status = cmp.Or(w.status, status) }

// FlushError is called after every relayed event. It does nothing, because emit has already been called.
func (w *TokenWriter) FlushError() error { return nil }

// Write takes a piece of the answer.
func (w *TokenWriter) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	if len(w.rest)+len(b) > maxLine {
		return 0, errors.New("the engine's answer has a line that is too long to be taken apart")
	}
	w.rest = append(w.rest, b...)
	if w.status != http.StatusOK {
		return len(b), nil // Outcome reads the body of an error
	}
	for {
		end := bytes.IndexByte(w.rest, '\n')
		if end < 0 {
			return len(b), nil
		}
		line := bytes.TrimSuffix(w.rest[:end], []byte("\r"))
		if data, ok := bytes.CutPrefix(line, []byte("data:")); ok {
			if err := w.event(bytes.TrimSpace(data)); err != nil {
				return 0, err
			}
		}
		w.rest = w.rest[end+1:]
	}
}

// completionEvent is the part of a completion's event that TokenWriter reads.
type completionEvent struct {
	Choices []struct {
		Text         string   `json:"text"`
		TokenIDs     []uint32 `json:"token_ids"`
		FinishReason string   `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Details    *struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
	Error json.RawMessage `json:"error"`
}

// event emits one event.
func (w *TokenWriter) event(data []byte) error {
	if string(data) == "[DONE]" {
		w.done = true
		return nil
	}
	var e completionEvent
	if err := json.Unmarshal(data, &e); err != nil {
		w.failed = problem.New(problem.Upstream, "an event of the engine cannot be read: %w", err).WithHint(
			"is it an engine that answers return_token_ids?")
		return w.failed
	}
	if len(e.Error) > 0 {
		w.failed = upstreamError(http.StatusBadGateway, data)
		return nil
	}
	return w.part(&e)
}

func (w *TokenWriter) part(e *completionEvent) error {
	out := client.Part{TokenIDs: []uint32{}}
	if !w.told {
		w.told = true
		out.Worker = w.header.Get("X-Dpserve-Group") + "/" + w.header.Get("X-Dpserve-Rank")
		out.RequestID = w.header.Get("X-Request-Id")
	}
	if len(e.Choices) > 0 {
		c := &e.Choices[0]
		out.Text, out.FinishReason = c.Text, c.FinishReason
		out.TokenIDs = append(out.TokenIDs, c.TokenIDs...)
	}
	if u := e.Usage; u != nil && len(e.Choices) == 0 {
		out.Usage = &client.Usage{Prompt: u.Prompt, Completion: u.Completion}
		if u.Details != nil {
			out.Usage.Cached = u.Details.Cached
		}
	}
	if err := w.emit(&out); err != nil {
		w.failed = err
		return err
	}
	return nil
}

// Outcome is how the generation ended, once the handler has returned.
func (w *TokenWriter) Outcome() error {
	switch {
	case w.failed != nil:
		return w.failed
	case w.status != http.StatusOK && w.status != 0:
		return upstreamError(w.status, w.rest)
	case w.Cut || !w.done:
		return problem.New(problem.Upstream, "the answer broke off").WithHint(
			"dpserve's log says why; try again")
	}
	return nil
}

// upstreamError parses an error in the OpenAI shape: the engine's, or dpserve's own with a word as its code.
func upstreamError(status int, body []byte) error {
	var own struct {
		Error struct {
			Code any `json:"code"`
		} `json:"error"`
	}
	_ = json.Unmarshal(body, &own) // an unreadable body has no code
	code, _ := own.Error.Code.(string)
	e := openai.ParseError(body)
	message := cmp.Or(e.Message, "the engine answered with status "+strconv.Itoa(status))
	return Problem(status, code, message, 0)
}
