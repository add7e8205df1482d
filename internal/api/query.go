package api

import (
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/dpserve/dpserve/client"
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
