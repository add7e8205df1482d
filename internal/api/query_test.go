package api

import (
	"bufio"
	"bytes"
	"io"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/problem"
)

// The server parses a query as the client encoded it.
func TestLogQueryRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := LogQuery{
			App:    "demo",
			Group:  rapid.IntRange(0, maxNumber).Draw(t, "group"),
			Rank:   rapid.IntRange(AllRanks, maxNumber).Draw(t, "rank"),
			Tail:   rapid.IntRange(AllLines, maxTail).Draw(t, "tail"),
			Follow: rapid.Bool().Draw(t, "follow"),
		}
		if rapid.Bool().Draw(t, "since") {
			q.Since = time.Unix(0, rapid.Int64Range(1, 1<<62).Draw(t, "at")).UTC()
		}
		got, err := parseLogQuery("demo", q.encode(), time.Now())
		require.NoError(t, err)
		assert.Equal(t, q, got)
	})
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
		assert.GreaterOrEqual(t, q.Tail, AllLines)
		assert.LessOrEqual(t, q.Tail, maxTail)
		assert.False(t, q.Rank != AllRanks && q.Group == AllRanks)
		v, err := url.ParseQuery(raw)
		require.NoError(t, err)
		for key := range v {
			assert.Contains(t, []string{"group", "rank", "since", "tail", "follow"}, key)
		}
	})
}

// A line that parses is printed unchanged, apart from its time zone.
func FuzzLogLine(f *testing.F) {
	f.Add("2026-01-02T03:04:05Z demo/0/3 stderr out of memory")
	f.Add("2026-01-02T03:04:05Z demo/0/-3 stderr ")
	f.Add("x y z")
	f.Fuzz(func(t *testing.T, s string) {
		l, err := ParseLogLine(s)
		if err != nil {
			return
		}
		again, err := ParseLogLine(l.String())
		require.NoError(t, err)
		assert.True(t, l.Time.Equal(again.Time))
		l.Time, again.Time, l.Text = time.Time{}, time.Time{}, joinLines(l.Text)
		assert.Equal(t, l, again)
	})
}

// Any stream of bytes ends with one error and gives the same events for any sizes of reads.
func FuzzReadEvents(f *testing.F) {
	var good bytes.Buffer
	require.NoError(f, writeEvent(&good, &Event{Number: 3, Kind: "unit", App: "demo"}, ""))
	f.Add(good.Bytes())
	f.Add([]byte(": alive\n\ndata: {}\n\n"))
	f.Add([]byte("data: {\"apiVersion\":\"dpserve/v1\",\"number\":-1}\n"))
	f.Add([]byte("id: 1\r\ndata: {\"apiVersion\":\"dpserve/v1\"}\r\n\r\ndata: {"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		whole, werr := collect(bytes.NewReader(stream))
		bytewise, berr := collect(oneByte{bytes.NewReader(stream)})
		assert.Equal(t, whole, bytewise)
		require.Error(t, werr)
		require.Error(t, berr)
		assert.Equal(t, werr.Error(), berr.Error())
	})
}

func collect(r io.Reader) (out []Event, last error) {
	for e, err := range readEvents(r) {
		if err != nil {
			return out, err
		}
		out = append(out, e)
	}
	return out, nil
}

// oneByte reads one byte at a time.
type oneByte struct{ r io.Reader }

func (o oneByte) Read(p []byte) (int, error) { return o.r.Read(p[:min(1, len(p))]) }

func TestLongEventIsRefused(t *testing.T) {
	_, err := readLine(bufio.NewReader(strings.NewReader(strings.Repeat("x", maxEvent+1) + "\n")))
	assert.Equal(t, problem.Upstream, problem.CodeOf(err))
}
