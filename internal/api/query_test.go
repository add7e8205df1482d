package api

import (
	"context"
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
)

// The server parses a query as the client encoded it.
func TestLogQueryRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := client.LogQuery{
			App:    "demo",
			Group:  rapid.IntRange(0, maxNumber).Draw(t, "group"),
			Rank:   rapid.IntRange(client.AllRanks, maxNumber).Draw(t, "rank"),
			Tail:   rapid.IntRange(client.AllLines, maxTail).Draw(t, "tail"),
			Follow: rapid.Bool().Draw(t, "follow"),
		}
		if rapid.Bool().Draw(t, "since") {
			q.Since = time.Unix(0, rapid.Int64Range(1, 1<<62).Draw(t, "at")).UTC()
		}
		got, err := parseLogQuery("demo", sentQuery(t, q), time.Now())
		require.NoError(t, err)
		assert.Equal(t, q, got)
	})
}

// transportFunc is an http.RoundTripper.
type transportFunc func(*http.Request) (*http.Response, error)

func (f transportFunc) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// sentQuery returns the query string that the client sends.
func sentQuery(t require.TestingT, q client.LogQuery) (raw string) {
	transport := transportFunc(func(r *http.Request) (*http.Response, error) {
		raw = r.URL.RawQuery
		return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody}, nil
	})
	c, err := client.New("", client.WithTransport(transport))
	require.NoError(t, err)
	_, err = c.Logs(context.Background(), q)
	require.NoError(t, err)
	return raw
}

func TestSinceAsDuration(t *testing.T) {
	now := time.Unix(1000, 0)
	q, err := parseLogQuery("demo", "since=10m", now)
	require.NoError(t, err)
	assert.Equal(t, now.Add(-10*time.Minute), q.Since)
}

// Any query string gives bounded values or an invalid argument with a hint.
func FuzzLogQuery(f *testing.F) {
	for _, s := range []string{
		"", "group=0&rank=3&tail=20&follow=true&since=10m", "since=2026-01-02T15:04:05Z", "tail=-1", "a=%zz",
		"rank=1;x", "group=1&group=2",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		q, err := parseLogQuery("demo", raw, time.Unix(1000, 0))
		if err != nil {
			var p *problem.Error
			require.ErrorAs(t, err, &p)
			assert.Equal(t, problem.InvalidArgument, p.Code)
			assert.NotEmpty(t, p.Hint)
			return
		}
		assert.GreaterOrEqual(t, q.Tail, client.AllLines)
		assert.LessOrEqual(t, q.Tail, maxTail)
		assert.False(t, q.Rank != client.AllRanks && q.Group == client.AllRanks)
		v, err := url.ParseQuery(raw)
		require.NoError(t, err)
		for key := range v {
			assert.Contains(t, []string{"group", "rank", "since", "tail", "follow"}, key)
		}
	})
}
