package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
)

// ErrNoCompletion says that an engine answered a canary without completing anything.
var ErrNoCompletion = errors.New("the canary was answered without a completion")

// errorTextLimit cuts an engine's error text in bytes.
const errorTextLimit = 300

// Canary asks model for one token, non-stream, at temperature 0. nil means that the rank computes: a
// completion came, or the engine refused because its own queue is full (503 Service Unavailable), which only
// a living one does. An engine without /v1/completions is asked for a chat completion.
func (c *Client) Canary(ctx context.Context, model string) error {
	err := c.canary(ctx, "/v1/completions", c.canaryBody(model, "prompt", "1"))
	var status *StatusError
	if errors.As(err, &status) &&
		(status.Status == http.StatusNotFound || status.Status == http.StatusMethodNotAllowed) &&
		status.Text == "" {
		messages := []map[string]string{{"role": "user", "content": "1"}}
		return c.canary(ctx, "/v1/chat/completions", c.canaryBody(model, "messages", messages))
	}
	return err
}

func (c *Client) canaryBody(model, key string, prompt any) map[string]any {
	body := map[string]any{"model": model, key: prompt, "max_tokens": 1, "temperature": 0}
	if c.addr.Mode == "body" {
		body["routed_dp_rank"] = c.addr.Selector
	}
	return body
}

func (c *Client) canary(ctx context.Context, path string, body map[string]any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	status, answer, err := c.ask(ctx, http.MethodPost, path, bytes.NewReader(b), maxAnswer)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return refusedCanary(path, status, answer)
	}
	return completed(answer)
}

func refusedCanary(path string, status int, answer []byte) error {
	var e struct {
		Error struct {
			Message string `json:"message"`
			Type    string `json:"type"`
		} `json:"error"`
	}
	if err := json.Unmarshal(answer, &e); err != nil {
		return &StatusError{Path: path, Status: status}
	}
	if status == http.StatusServiceUnavailable && e.Error.Type == "Service Unavailable" {
		return nil
	}
	return &StatusError{Path: path, Status: status, Text: cut(e.Error.Message)}
}

func cut(s string) string {
	if len(s) > errorTextLimit {
		return s[:errorTextLimit] + "…"
	}
	return s
}

// completed wants a finish_reason other than abort: a stopping engine answers 200 with abort and no tokens.
func completed(answer []byte) error {
	var r struct {
		Choices []struct {
			FinishReason *string `json:"finish_reason"`
		} `json:"choices"`
	}
	if err := json.Unmarshal(answer, &r); err != nil {
		return fmt.Errorf("%w: %w", ErrNoCompletion, err)
	}
	for _, ch := range r.Choices {
		if ch.FinishReason != nil && *ch.FinishReason != "abort" {
			return nil
		}
	}
	return ErrNoCompletion
}
