package client

import (
	"bufio"
	"bytes"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

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
	f.Add([]byte("id: 3\ndata: {\"apiVersion\":\"dpserve/v1\",\"number\":3,\"kind\":\"unit\"}\n\n"))
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
	lines := bufio.NewReader(r)
	for {
		e, err := readEvent(lines)
		if err != nil {
			return out, err
		}
		out = append(out, e)
	}
}

// oneByte reads one byte at a time.
type oneByte struct{ r io.Reader }

func (o oneByte) Read(p []byte) (int, error) { return o.r.Read(p[:min(1, len(p))]) }

func TestLongEventIsRefused(t *testing.T) {
	_, err := readLine(bufio.NewReader(strings.NewReader(strings.Repeat("x", maxEvent+1) + "\n")))
	assert.Equal(t, CodeUpstream, CodeOf(err))
}
