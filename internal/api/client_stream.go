package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"

	"github.com/dpserve/dpserve/internal/problem"
)

// maxEvent is the longest line of an event stream in bytes; an event has a few hundred.
const maxEvent = 1 << 20

// Logs opens a stream of log lines as text, one per line (see ParseLogLine). The caller closes it. A cut
// stream ends with io.ErrUnexpectedEOF.
func (c *Client) Logs(ctx context.Context, q LogQuery) (io.ReadCloser, error) {
	res, err := c.do(ctx, http.MethodGet, appPath(q.App)+"/logs", q.encode(), nil)
	if err != nil {
		return nil, err
	}
	return res.Body, nil
}

// Events yields state changes with a number above since, of app ("" = any), until ctx ends or the caller
// stops. An error is the last pair. A node that stops ends the stream with Unavailable; continue from the
// last number.
func (c *Client) Events(ctx context.Context, app string, since uint64) iter.Seq2[Event, error] {
	q := url.Values{"since": {strconv.FormatUint(since, 10)}}
	if app != "" {
		q.Set("app", app)
	}
	return func(yield func(Event, error) bool) {
		res, err := c.do(ctx, http.MethodGet, pathEvents, q.Encode(), nil)
		if err != nil {
			yield(Event{}, err)
			return
		}
		defer func() { _ = res.Body.Close() }() // no longer read
		for e, err := range readEvents(res.Body) {
			if err != nil {
				err = c.streamError(ctx, err)
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

func (c *Client) streamError(ctx context.Context, err error) error {
	var p *problem.Error
	if errors.As(err, &p) {
		return p
	}
	if ctx.Err() == nil && (errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)) {
		return problem.New(problem.Unavailable, "the event stream of %s ended: %w", c.base, err).
			WithHint("dpserve has stopped there, or is being restarted")
	}
	return c.transportError(ctx, err)
}

// readEvents reads server-sent events whose data is one line of JSON. It always ends with an error, because
// the stream has no regular end.
func readEvents(r io.Reader) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		lines := bufio.NewReaderSize(r, 4096)
		for {
			line, err := readLine(lines)
			if err != nil {
				yield(Event{}, err)
				return
			}
			data, ok := bytes.CutPrefix(line, []byte("data:"))
			if !ok {
				continue // ids, comments, blank lines
			}
			var e eventReply
			if err := json.Unmarshal(data, &e); err != nil || e.APIVersion != apiVersion {
				yield(Event{},
					problem.New(problem.Upstream, "event stream cannot be read").WithHint(versionHint))
				return
			}
			if !yield(e.Event, nil) {
				return
			}
		}
	}
}

// readLine reads a line without its end, at most maxEvent bytes. It drops an unfinished line at the end of
// the stream.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		if len(line) > maxEvent {
			return nil, problem.New(problem.Upstream, "event is longer than %d bytes", maxEvent).
				WithHint(versionHint)
		}
		if err == nil {
			return bytes.TrimRight(line, "\r\n"), nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
	}
}
