package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/nearest"
	"github.com/dpserve/dpserve/internal/problem"
)

// Bounds of query values.
const (
	maxFileName = 4096   // bytes
	maxTail     = 10_000 // lines per rank
	maxNumber   = 65_535 // group and rank
)

// query is a query string whose keys are known and given once.
type query struct{ values url.Values }

// parseQuery refuses unknown, doubled and empty keys: ignoring a misspelt key could delete the wrong apps.
func parseQuery(raw string, known ...string) (query, error) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return query{}, problem.New(problem.InvalidArgument, "query string cannot be read: %w", err).
			WithHint("escape it as a URL wants it")
	}
	for key, v := range values {
		if !slices.Contains(known, key) {
			return query{}, problem.New(problem.InvalidArgument, "unknown query key %q", key).
				WithHint("%s", describeKeys(known))
		}
		if len(v) > 1 {
			return query{}, problem.New(problem.InvalidArgument, "query key %q is given %d times", key,
				len(v)).WithHint("give it once")
		}
		if v[0] == "" { // an empty variable of a script must not mean "any revision"
			return query{}, problem.New(problem.InvalidArgument, "query key %q is empty", key).
				WithHint("give it a value, or leave it out")
		}
	}
	return query{values}, nil
}

func describeKeys(known []string) string {
	if len(known) == 0 {
		return "this path takes no query"
	}
	return "this path takes " + strings.Join(known, ", ")
}

func badValueError(key, value, wanted string) error {
	return problem.New(problem.InvalidArgument, "query key %q is %q", key, value).WithHint("%s", wanted)
}

// flag reads true or false; absent and empty are false.
func (q query) flag(key string) (bool, error) {
	switch v := q.values.Get(key); v {
	case "", "false":
		return false, nil
	case "true":
		return true, nil
	default:
		return false, badValueError(key, v, "write true or false")
	}
}

// number reads 0..limit; absent is def.
func (q query) number(key string, def, limit int) (int, error) {
	v := q.values.Get(key)
	if v == "" {
		return def, nil
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 0 || n > limit {
		return 0, badValueError(key, v, "write a whole number from 0 to "+strconv.Itoa(limit))
	}
	return n, nil
}

// duration reads a duration from 0 to maxDeadline; absent is nil.
func (q query) duration(key string) (*time.Duration, error) {
	v := q.values.Get(key)
	if v == "" {
		return nil, nil //nolint:nilnil // not given
	}
	d, err := time.ParseDuration(v)
	if err != nil || d < 0 || d > maxDeadline {
		return nil, badValueError(key, v, "write a duration like 30s; 0s cuts running streams")
	}
	return &d, nil
}

// counter reads an unsigned 64-bit number; ok is false when it is absent.
func (q query) counter(key string) (n uint64, ok bool, err error) {
	v := q.values.Get(key)
	if v == "" {
		return 0, false, nil
	}
	n, err = strconv.ParseUint(v, 10, 64)
	if err != nil {
		return 0, false, badValueError(key, v, "write a whole number")
	}
	return n, true, nil
}

// since reads a point in time, RFC 3339 or a duration before now; absent is zero.
func (q query) since(key string, now time.Time) (time.Time, error) {
	v := q.values.Get(key)
	if v == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(v); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	t, err := time.Parse(time.RFC3339Nano, v)
	if err != nil {
		return time.Time{}, badValueError(key, v,
			"write a duration like 10m or a time like 2026-01-02T15:04:05Z")
	}
	return t, nil
}

// file reads a file's name. Messages repeat it, so it must be one printable line without terminal sequences.
func (q query) file(header string) (string, error) {
	v := q.values.Get("file")
	if v == "" {
		v = header
	}
	if v == "" {
		return "app.yaml", nil
	}
	if len(v) > maxFileName || strings.ContainsFunc(v, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return "", problem.New(problem.InvalidArgument, "file name is longer than %d bytes or not printable",
			maxFileName).WithHint("leave file out")
	}
	return v, nil
}

// parseLogQuery reads the query of the logs path.
func parseLogQuery(app, raw string, now time.Time) (q client.LogQuery, err error) {
	v, err := parseQuery(raw, "group", "rank", "since", "tail", "follow")
	if err != nil {
		return q, err
	}
	q.App = app
	if q.Group, err = v.number("group", client.AllRanks, maxNumber); err != nil {
		return q, err
	}
	if q.Rank, err = v.number("rank", client.AllRanks, maxNumber); err != nil {
		return q, err
	}
	if q.Rank != client.AllRanks && q.Group == client.AllRanks {
		return q, problem.New(problem.InvalidArgument, "a rank is given without its group").
			WithHint("add group=0")
	}
	if q.Since, err = v.since("since", now); err != nil {
		return q, err
	}
	if q.Tail, err = v.number("tail", client.AllLines, maxTail); err != nil {
		return q, err
	}
	q.Follow, err = v.flag("follow")
	return q, err
}

// readBody reads a body of at most limit bytes. guard has set the time limit. hint says what to send instead
// of a larger one.
func readBody(c *gin.Context, limit int64, hint string) ([]byte, error) {
	tooLarge := problem.New(problem.TooLarge, "the body is larger than %d bytes", limit).WithHint("%s", hint)
	if c.Request.ContentLength > limit {
		return nil, tooLarge
	}
	data, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, limit))
	if _, isLarge := errors.AsType[*http.MaxBytesError](err); isLarge {
		return nil, tooLarge
	}
	if err != nil {
		return nil, problem.New(problem.SlowRequest, "the body did not arrive: %w", err).
			WithHint("send it again")
	}
	// net/http goes on reading to notice a client that leaves
	_ = http.NewResponseController(c.Writer).SetReadDeadline(time.Time{})
	return data, nil
}

// readRouterBody reads a JSON object into v and refuses unknown keys.
func readRouterBody(c *gin.Context, v any) error {
	data, err := readBody(c, maxRouterBody, "an inference request is at most 16 MiB")
	if err != nil {
		return err
	}
	return decodeStrict(data, v)
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
