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

// ErrTruncated ends DumpEvents when the index is larger than one dump.
var ErrTruncated = errors.New("the index holds more blocks than a dump gives")

// GenerateRequest asks for tokens.
type GenerateRequest struct {
	TokenIDs []uint32 `json:"token_ids"`
	// members of a /v1/completions body: max_tokens, temperature, stop …
	Sampling  map[string]any `json:"sampling,omitempty"`
	RequestID string         `json:"request_id,omitempty"` // "" = dpserve generates one
	// a name that the application serves; "" = its model, no adapter
	Model    string    `json:"model,omitempty"`
	Worker   string    `json:"worker,omitempty"`
	Override *Override `json:"router_config_override,omitempty"`
}

// Part is a piece of a generated answer.
type Part struct {
	TokenIDs     []uint32 `json:"token_ids"`
	Text         string   `json:"text,omitempty"`
	FinishReason string   `json:"finish_reason,omitempty"` // with the last part that has tokens
	Worker       string   `json:"worker,omitempty"`        // with the first part
	RequestID    string   `json:"request_id,omitempty"`    // with the first part
	Usage        *Usage   `json:"usage,omitempty"`         // in a part at the end, if the engine reports it
}

// Usage is the engine's count of tokens.
type Usage struct {
	Prompt     int `json:"prompt_tokens"`
	Cached     int `json:"cached_tokens"`
	Completion int `json:"completion_tokens"`
}

// Generate picks a worker, sends the prompt there and yields the parts of the answer. Queueing, retries
// before the first token and accounting are those of every request. An error is the last pair. Stop ranging,
// or end ctx, to cancel.
func (r *RouterClient) Generate(ctx context.Context, q GenerateRequest) iter.Seq2[Part, error] {
	body, err := json.Marshal(q)
	if err != nil {
		return func(yield func(Part, error) bool) {
			yield(Part{}, newError(CodeInvalidArgument, "", "encode the request: %w", err))
		}
	}
	return streamOf(ctx, r.c, request{
		method: http.MethodPost, path: r.path + "/generate", body: body, json: true, patient: true,
	}, readParts)
}

// readParts reads server-sent events up to [DONE]; a stream that ends before [DONE] is an error.
func readParts(r io.Reader, yield func(Part, error) bool) {
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

func readPart(data []byte, failed bool) (p Part, done bool, err error) {
	switch {
	case failed:
		var e errorReply
		if err := json.Unmarshal(data, &e); err != nil {
			return p, false, fmt.Errorf("an error that cannot be read: %w", err)
		}
		e.Error.Status = http.StatusOK
		return p, false, &e.Error
	case string(data) == "[DONE]":
		return p, true, nil
	}
	if err := json.Unmarshal(data, &p); err != nil {
		return p, false, fmt.Errorf("a part that cannot be read: %w", err)
	}
	return p, false, nil
}

// Run is one chain of blocks in the router's index: the first block follows Parent, each other one its
// predecessor.
type Run struct {
	Worker string `json:"worker"`
	// gpu | cpu | disk: from the engine's events; sent: from the requests that were routed there
	Tier   string   `json:"tier"`
	Parent string   `json:"parent,omitempty"` // 16 hex digits; "" = the run begins a prompt
	Blocks []string `json:"blocks"`           // 16 hex digits each
}

// DumpEvents yields the router's index of its workers' blocks. The hashes use a secret key of the cluster. An
// error is the last pair: ErrTruncated if the index has more.
func (r *RouterClient) DumpEvents(ctx context.Context) iter.Seq2[Run, error] {
	return streamOf(ctx, r.c, request{path: r.path + "/dump_events"},
		func(body io.Reader, yield func(Run, error) bool) {
			if err := readRuns(body, yield); err != nil {
				yield(Run{}, err)
			}
		})
}

// errStopped ends a read whose caller stopped ranging.
var errStopped = errors.New("stopped")

// readRuns reads {…, "events": [run, …], "truncated": bool} without holding all of it in memory.
func readRuns(r io.Reader, yield func(Run, error) bool) error {
	dec := json.NewDecoder(r)
	if err := readOpeningBracket(dec, '{'); err != nil {
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
			err = yieldRuns(dec, yield)
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

func yieldRuns(dec *json.Decoder, yield func(Run, error) bool) error {
	if err := readOpeningBracket(dec, '['); err != nil {
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

// readOpeningBracket reads the bracket that an object or a list starts with.
func readOpeningBracket(dec *json.Decoder, bracket json.Delim) error {
	t, err := dec.Token()
	if err == nil && t != bracket {
		err = fmt.Errorf("found %v, wanted %v", t, bracket)
	}
	return err
}
