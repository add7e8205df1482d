package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
)

// ErrTruncated ends DumpEvents when the index holds more than one dump gives.
var ErrTruncated = errors.New("the index holds more blocks than a dump gives")

// GenerateRequest asks for tokens.
type GenerateRequest struct {
	TokenIDs  []uint32       `json:"token_ids"`
	Sampling  map[string]any `json:"sampling,omitempty"`   // members of a /v1/completions body: max_tokens, temperature, stop …
	RequestID string         `json:"request_id,omitempty"` // "" = dpserve makes one
	Model     string         `json:"model,omitempty"`      // a name that the application serves; "" = its model, no adapter
	Worker    string         `json:"worker,omitempty"`
	Override  *Override      `json:"router_config_override,omitempty"`
}

// Part is a piece of a generated answer.
type Part struct {
	TokenIDs     []uint32 `json:"token_ids"`
	Text         string   `json:"text"`
	FinishReason string   `json:"finish_reason"` // with the last part that has tokens
	Worker       string   `json:"worker"`        // with the first part
	RequestID    string   `json:"request_id"`    // with the first part
	Usage        *Usage   `json:"usage"`         // with a part of its own at the end, if the engine told it
}

// Usage is the engine's count of tokens.
type Usage struct {
	Prompt     int `json:"prompt_tokens"`
	Cached     int `json:"cached_tokens"`
	Completion int `json:"completion_tokens"`
}

// Generate picks a worker, sends the prompt there and yields the answer as it comes; waiting, retries before the first token and
// the account are those of every request. An error ends it, as the last pair. Stop ranging, or end ctx, to cancel.
func (r *RouterClient) Generate(ctx context.Context, q GenerateRequest) iter.Seq2[Part, error] {
	return func(yield func(Part, error) bool) {
		res, err := r.c.do(ctx, http.MethodPost, r.path+"/generate", q)
		if err != nil {
			yield(Part{}, err)
			return
		}
		defer func() { _ = res.Body.Close() }() // given up
		for part, err := range readParts(res.Body) {
			if !yield(part, err) || err != nil {
				return
			}
		}
	}
}

// readParts reads server-sent events up to [DONE]; a stream that ends before it is an error.
func readParts(r io.Reader) iter.Seq2[Part, error] {
	return func(yield func(Part, error) bool) {
		lines := bufio.NewScanner(r)
		lines.Buffer(nil, maxEvent)
		failed := false
		for lines.Scan() {
			line := lines.Bytes()
			failed = failed || string(line) == "event: error"
			data, ok := bytes.CutPrefix(line, []byte("data: "))
			if !ok {
				continue
			}
			part, done, err := readPart(data, failed)
			if done || !yield(part, err) || err != nil {
				return
			}
		}
		err := lines.Err()
		if err == nil {
			err = io.ErrUnexpectedEOF
		}
		yield(Part{}, fmt.Errorf("the stream broke off: %w", err))
	}
}

func readPart(data []byte, failed bool) (p Part, done bool, err error) {
	switch {
	case failed:
		var e errorReply
		if err := json.Unmarshal(data, &e); err != nil {
			return p, false, fmt.Errorf("an error that cannot be read: %w", err)
		}
		return p, false, e.err(http.StatusOK)
	case string(data) == "[DONE]":
		return p, true, nil
	}
	if err := json.Unmarshal(data, &p); err != nil {
		return p, false, fmt.Errorf("a part that cannot be read: %w", err)
	}
	return p, false, nil
}

// Run is one chain of blocks in the router's index: the first follows Parent, each other the one in front.
type Run struct {
	Worker string   `json:"worker"`
	Tier   string   `json:"tier"`   // gpu | cpu | disk: by the engine's events; sent: by what was routed there
	Parent string   `json:"parent"` // 16 hex digits; "" = the run begins a prompt
	Blocks []string `json:"blocks"` // 16 hex digits each
}

// DumpEvents yields what the router believes its workers to hold. The hashes are keyed by a secret of the cluster. An error ends
// it, as the last pair: ErrTruncated if there is more.
func (r *RouterClient) DumpEvents(ctx context.Context) iter.Seq2[Run, error] {
	return func(yield func(Run, error) bool) {
		res, err := r.c.do(ctx, http.MethodGet, r.path+"/dump_events", nil)
		if err != nil {
			yield(Run{}, err)
			return
		}
		defer func() { _ = res.Body.Close() }() // given up
		if err := readRuns(res.Body, yield); err != nil {
			yield(Run{}, err)
		}
	}
}

// errStopped ends a reading whose caller has seen enough.
var errStopped = errors.New("stopped")

// readRuns reads {…, "events": [run, …], "truncated": bool} without holding it whole.
func readRuns(r io.Reader, yield func(Run, error) bool) error {
	dec := json.NewDecoder(r)
	if err := opens(dec, '{'); err != nil {
		return err
	}
	truncated := false
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return err
		}
		switch key {
		case "events":
			err = eachRun(dec, yield)
		case "truncated":
			err = dec.Decode(&truncated)
		default:
			var skipped json.RawMessage
			err = dec.Decode(&skipped)
		}
		if errors.Is(err, errStopped) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("the dump broke off: %w", err)
		}
	}
	if _, err := dec.Token(); err != nil {
		return fmt.Errorf("the dump broke off: %w", err)
	}
	if truncated {
		return ErrTruncated
	}
	return nil
}

func eachRun(dec *json.Decoder, yield func(Run, error) bool) error {
	if err := opens(dec, '['); err != nil {
		return err
	}
	for dec.More() {
		var run Run
		if err := dec.Decode(&run); err != nil {
			return err
		}
		if !yield(run, nil) {
			return errStopped
		}
	}
	_, err := dec.Token()
	return err
}

// opens reads the bracket that an object or a list begins with.
func opens(dec *json.Decoder, bracket json.Delim) error {
	t, err := dec.Token()
	if err == nil && t != bracket {
		err = fmt.Errorf("found %v, wanted %v", t, bracket)
	}
	return err
}
