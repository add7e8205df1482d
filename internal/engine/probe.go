package engine

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"mime/multipart"
	"net/http"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/app"
)

// errNoCompletion: an engine answered a probe without a completion.
var errNoCompletion = errors.New("the probe was answered without a completion")

// errorTextLimit cuts an engine's error text in bytes.
const errorTextLimit = 300

// Probe asks model for as little as it can compute: one token, non-stream, at temperature 0. nil means that
// the rank computes: the engine sent a completion, or it refused because its own queue is full (503 Service
// Unavailable), which a dead engine cannot do. An engine without /v1/completions is asked for a chat
// completion, and one that does not generate for what it does: embeddings, ranking, classes, speech, the text
// of a sound.
// SGLang's prefill and decode engines take no request without a room; they are asked for one that moves
// nothing.
func (c *Client) Probe(ctx context.Context, model string) error {
	err := c.probeTokens(ctx, model)
	if !isOfOtherKind(err) {
		return err
	}
	for _, task := range otherTasks {
		if _, other := c.post(ctx, task.path, c.probeBody(model, task.input)); other == nil {
			return nil
		}
	}
	if c.soundProbe(ctx, model) == nil {
		return nil
	}
	return err
}

// soundProbe asks an engine for the text of a tenth of a second of silence, which is sent as a form.
func (c *Client) soundProbe(ctx context.Context, model string) error {
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	file, err := w.CreateFormFile("file", "silence.wav")
	if err == nil {
		_, err = file.Write(silence())
	}
	for _, field := range [][2]string{{"model", model}, {"response_format", "json"}, {"temperature", "0"}} {
		err = errors.Join(err, w.WriteField(field[0], field[1]))
	}
	if c.addr.Mode == app.AddressBody {
		err = errors.Join(err, w.WriteField("routed_dp_rank", strconv.Itoa(c.addr.Selector)))
	}
	if err = errors.Join(err, w.Close()); err != nil {
		return err
	}
	_, err = c.postAs(ctx, "/v1/audio/transcriptions", w.FormDataContentType(), form.Bytes())
	return err
}

// silence is a WAV file of a tenth of a second: one channel of 16 bits, 16,000 samples a second.
func silence() []byte {
	const rate, sampleBytes, samples = 16_000, 2, 1_600
	const head, format, size = 36, 16, samples * sampleBytes
	b := append(make([]byte, 0, head+8+size), "RIFF"...)
	b = append(binary.LittleEndian.AppendUint32(b, head+size), "WAVEfmt "...)
	b = binary.LittleEndian.AppendUint32(b, format)
	for _, v := range []uint16{1, 1} { // PCM, one channel
		b = binary.LittleEndian.AppendUint16(b, v)
	}
	for _, v := range []uint32{rate, rate * sampleBytes} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	for _, v := range []uint16{sampleBytes, 8 * sampleBytes} {
		b = binary.LittleEndian.AppendUint16(b, v)
	}
	b = binary.LittleEndian.AppendUint32(append(b, "data"...), size)
	return append(b, make([]byte, size)...)
}

// otherTasks are what an engine that does not generate may compute. The order is that of how much a route
// says about the engine: /pooling answers for nearly all of them.
var otherTasks = []struct {
	path  string
	input map[string]any
}{
	{"/v1/embeddings", map[string]any{"input": "1"}},
	{"/v1/rerank", map[string]any{"query": "1", "documents": []string{"1"}}},
	{"/classify", map[string]any{"input": "1"}},
	{"/pooling", map[string]any{"input": "1"}},
	{"/v1/audio/speech", map[string]any{"input": "1"}},
}

// isOfOtherKind reports that the engine may be one that does not generate: it has no route for it, or says
// that its model cannot.
func isOfOtherKind(err error) bool {
	var status *StatusError
	if !errors.As(err, &status) {
		return false
	}
	return isNoRoute(status) || status.Status == http.StatusBadRequest ||
		status.Status == http.StatusNotImplemented
}

// isNoRoute reports that an engine has no such route. It says more where it only lacks the model.
func isNoRoute(e *StatusError) bool {
	return (e.Status == http.StatusNotFound || e.Status == http.StatusMethodNotAllowed) && e.Text == ""
}

func (c *Client) probeTokens(ctx context.Context, model string) error {
	input := map[string]any{"prompt": "1", "max_tokens": 1, "temperature": 0}
	err := c.complete(ctx, "/v1/completions", c.probeBody(model, input))
	var status *StatusError
	switch {
	case !errors.As(err, &status):
	case isNoRoute(status):
		input["messages"] = []map[string]string{{"role": "user", "content": "1"}}
		delete(input, "prompt")
		return c.complete(ctx, "/v1/chat/completions", c.probeBody(model, input))
	case strings.Contains(status.Text, needsRoom):
		input["bootstrap_host"], input["bootstrap_room"] = fakeBootstrapHost, c.addr.Selector
		return c.complete(ctx, "/v1/completions", c.probeBody(model, input))
	}
	return err
}

const (
	// needsRoom is in the answer of an SGLang engine to a request that is no half of a pair.
	needsRoom = "without bootstrap room id"
	// fakeBootstrapHost makes SGLang's engines compute without a transfer (FAKE_BOOTSTRAP_HOST).
	fakeBootstrapHost = "2.2.2.2"
)

func (c *Client) probeBody(model string, input map[string]any) map[string]any {
	body := maps.Clone(input)
	body["model"] = model
	if c.addr.Mode == app.AddressBody {
		body["routed_dp_rank"] = c.addr.Selector
	}
	return body
}

// complete wants a completion as the answer.
func (c *Client) complete(ctx context.Context, path string, body map[string]any) error {
	answer, err := c.post(ctx, path, body)
	if err != nil || answer == nil {
		return err
	}
	return completed(answer)
}

// post returns the answer to a probe; nil without an error if the engine's queue is full.
func (c *Client) post(ctx context.Context, path string, body map[string]any) ([]byte, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	return c.postAs(ctx, path, jsonType, b)
}

// postAs is post of a body of any type.
func (c *Client) postAs(ctx context.Context, path, contentType string, body []byte) ([]byte, error) {
	status, answer, err := c.askAs(ctx, http.MethodPost, path, contentType, bytes.NewReader(body), maxAnswer)
	switch {
	case err != nil:
		return nil, err
	case status != http.StatusOK:
		return nil, refusedProbe(path, status, answer)
	case answer == nil:
		answer = []byte{}
	}
	return answer, nil
}

func refusedProbe(path string, status int, answer []byte) error {
	var e struct {
		Error struct {
			Message string `json:"message"`
			Type    string `json:"type"`
		} `json:"error"`
		Message string `json:"message"` // SGLang
	}
	if err := json.Unmarshal(answer, &e); err != nil {
		return &StatusError{Path: path, Status: status}
	}
	if status == http.StatusServiceUnavailable && e.Error.Type == "Service Unavailable" {
		return nil
	}
	return &StatusError{Path: path, Status: status, Text: cut(cmp.Or(e.Error.Message, e.Message))}
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
		return fmt.Errorf("%w: %w", errNoCompletion, err)
	}
	for _, ch := range r.Choices {
		if ch.FinishReason != nil && *ch.FinishReason != "abort" {
			return nil
		}
	}
	return errNoCompletion
}
