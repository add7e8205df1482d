package vllm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// answer is what a test wants to know of one request.
type answer struct {
	Prompt    int    // tokens
	Cached    int    // of Prompt, as the engine reports it
	Predicted int    // of Prompt, as dpserve's header says it; -1 without the header
	Rank      string // GROUP/RANK
	IDs       []uint32
	Text      string
}

var errStatus = errors.New("unexpected status")

// post sends a JSON body, to the rank GROUP/RANK if one is given, and reads the answer to its end.
func post(ctx context.Context, addr, path string, body any, to ...string) (http.Header, []byte, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return nil, nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+path, bytes.NewReader(b))
	if err != nil {
		return nil, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header["X-Dpserve-Rank"] = to
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%w: %s: %s: %s", errStatus, path, resp.Status, text)
	}
	return resp.Header, text, err
}

// reply is the union of whole answers and of the events of a stream.
type reply struct {
	Choices []struct {
		Text     string
		TokenIDs []uint32 `json:"token_ids"`
		Message  struct{ Content string }
		Delta    struct{ Content string }
	}
	Usage *struct {
		PromptTokens int `json:"prompt_tokens"`
		Details      *struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

// add takes one answer or event into a.
func (a *answer) add(text []byte) error {
	var r reply
	if err := json.Unmarshal(text, &r); err != nil {
		return fmt.Errorf("%w in %q", err, text)
	}
	for _, c := range r.Choices {
		a.Text += c.Text + c.Message.Content + c.Delta.Content
		a.IDs = append(a.IDs, c.TokenIDs...)
	}
	if r.Usage != nil {
		a.Prompt = r.Usage.PromptTokens
		if r.Usage.Details != nil {
			a.Cached = r.Usage.Details.Cached
		}
	}
	return nil
}

// ask sends an OpenAI request; body["stream"] says how it is answered.
func ask(ctx context.Context, addr, path string, body map[string]any) (answer, error) {
	a := answer{Predicted: -1}
	header, text, err := post(ctx, addr, path, body)
	if err != nil {
		return a, err
	}
	a.Rank = header.Get("x-dpserve-group") + "/" + header.Get("x-dpserve-rank")
	if v := header.Get("x-dpserve-cached-tokens"); v != "" {
		if a.Predicted, err = strconv.Atoi(v); err != nil {
			return a, err
		}
	}
	if body["stream"] != true {
		return a, a.add(text)
	}
	for line := range strings.Lines(string(text)) {
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if ok && data != "[DONE]" {
			if err := a.add([]byte(data)); err != nil {
				return a, err
			}
		}
	}
	return a, nil
}

// complete sends token ids as a completion; salt "" = none. The answer holds the generated ids.
func complete(ctx context.Context, addr string, ids []uint32, maxTokens int, salt string) (answer, error) {
	body := map[string]any{
		"model": model, "prompt": ids, "max_tokens": maxTokens, "temperature": 0, "ignore_eos": true,
		"return_token_ids": true,
	}
	if salt != "" {
		body["cache_salt"] = salt
	}
	return ask(ctx, addr, "/v1/completions", body)
}

// message is one of a chat.
type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// chat sends a conversation; the answer is streamed.
func chat(ctx context.Context, addr string, messages []message, maxTokens int) (answer, error) {
	return ask(ctx, addr, "/v1/chat/completions", map[string]any{
		"model": model, "messages": messages, "max_tokens": maxTokens, "temperature": 0, "ignore_eos": true,
		"stream": true, "stream_options": map[string]any{"include_usage": true},
	})
}
