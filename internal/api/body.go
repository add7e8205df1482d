package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/internal/nearest"
	"github.com/dpserve/dpserve/internal/problem"
)

// readRouterBody reads a JSON object into v and refuses unknown keys. guard has set the time limit.
func readRouterBody(c *gin.Context, v any) error {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return err
	}
	if c.Request.ContentLength > maxRouterBody {
		return bodyTooLarge()
	}
	data, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, maxRouterBody))
	var big *http.MaxBytesError
	switch {
	case errors.As(err, &big):
		return bodyTooLarge()
	case err != nil:
		return problem.New(problem.SlowRequest, "the body did not arrive: %w", err).WithHint("send it again")
	}
	// net/http goes on reading to notice a client that leaves
	_ = http.NewResponseController(c.Writer).SetReadDeadline(time.Time{})
	return decodeStrict(data, v)
}

func bodyTooLarge() error {
	return problem.New(problem.TooLarge, "the body is larger than %d bytes", maxRouterBody).
		WithHint("an inference request is at most 16 MiB")
}

// decodeStrict decodes one JSON object into the struct that v points to. It refuses unknown, doubled and
// differently cased keys: encoding/json would silently use the last of them.
func decodeStrict(data []byte, v any) error {
	if len(bytes.TrimSpace(data)) == 0 {
		return problem.New(problem.InvalidArgument, "the body is empty").WithHint("send a JSON object")
	}
	if err := checkKeys(data, jsonKeys(v)); err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return decodeError(err)
	}
	return nil
}

// jsonKeys returns the JSON names of a struct's fields.
func jsonKeys(v any) []string {
	t := reflect.TypeOf(v).Elem()
	var out []string
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		out = append(out, name)
	}
	return out
}

func checkKeys(data []byte, known []string) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	t, err := dec.Token()
	if err != nil {
		return decodeError(err)
	}
	if t != json.Delim('{') {
		return problem.New(problem.InvalidArgument, "the body is not a JSON object").
			WithHint("it takes %s", strings.Join(known, ", "))
	}
	seen := map[string]bool{}
	for dec.More() {
		if err := checkNextKey(dec, seen, known); err != nil {
			return err
		}
	}
	if _, err = dec.Token(); err != nil {
		return decodeError(err)
	}
	if _, err = dec.Token(); !errors.Is(err, io.EOF) {
		return problem.New(problem.InvalidArgument, "something follows the JSON object").
			WithHint("send one object")
	}
	return nil
}

func checkNextKey(dec *json.Decoder, seen map[string]bool, known []string) error {
	t, err := dec.Token()
	if err != nil {
		return decodeError(err)
	}
	key, _ := t.(string)
	if !slices.Contains(known, key) {
		e := problem.New(problem.InvalidArgument, "unknown key %q", truncateText(key))
		if near := nearest.Word(key, known); near != "" {
			return e.WithHint("did you mean %q? it takes %s", near, strings.Join(known, ", "))
		}
		return e.WithHint("it takes %s", strings.Join(known, ", "))
	}
	if seen[key] {
		return problem.New(problem.InvalidArgument, "key %q is given twice", key).WithHint("give it once")
	}
	seen[key] = true
	var skipped json.RawMessage
	if err := dec.Decode(&skipped); err != nil {
		return decodeError(err)
	}
	return nil
}

// maxShown is the most bytes of a caller's text that an error repeats.
const maxShown = 100

func truncateText(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxShown)], "?") }

// decodeError describes a body that cannot be decoded. It rewrites messages of encoding/json that only a Go
// programmer understands.
func decodeError(err error) error {
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &kind):
		return problem.New(problem.InvalidArgument, "%s cannot be a JSON %s", kind.Field,
			truncateText(kind.Value)).WithHint("see docs/router.md for what it takes")
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return problem.New(problem.InvalidArgument, "the body ends too early").
			WithHint("send one whole JSON object")
	}
	return problem.New(problem.InvalidArgument, "the body is not JSON: %s",
		strings.TrimPrefix(err.Error(), "json: ")).WithHint("send one JSON object")
}
