//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

var errUnexpected = errors.New("unexpected answer")

// client is one keep-alive connection with prebuilt requests.
type client struct {
	c      net.Conn
	r      *bufio.Reader
	req    []byte
	tokens int     // chunks that req asks for
	seen   []byte  // the end of the stream so far
	tag    []byte  // part of req's prompt that do changes each time; nil = always the same prompt
	before *client // sends its own request first, and reads the whole answer; nil = nothing comes first
}

// seenBytes is how much of a stream's end is kept: the first two chunks of a stream.
const seenBytes = 1 << 10

// payload builds a chat request whose prompt has promptBytes bytes (escaped: an escape every 11 bytes).
func payload(promptBytes, tokens int, pace time.Duration, stream, escaped bool) []byte {
	unit := "hello tok "
	if escaped {
		unit = `hello tok\n`
	}
	prompt := strings.Repeat(unit, promptBytes/len(unit)+1)[:promptBytes/len(unit)*len(unit)]
	return post(`{"model":"bench","messages":[{"role":"user","content":"` + prompt + `"}],"stream":` +
		strconv.FormatBool(stream) +
		`,"max_tokens":` + strconv.Itoa(tokens) + `,"pace_us":` + strconv.FormatInt(pace.Microseconds(), 10) +
		`}`)
}

// post is a whole HTTP request with that body.
func post(body string) []byte {
	return []byte("POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n" +
		"Content-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body)
}

// tokensOf is the number of chunks a request asks for.
func tokensOf(req []byte) int {
	_, after, _ := bytes.Cut(req[max(0, len(req)-256):], []byte(`"max_tokens":`))
	digits, _, _ := bytes.Cut(after, []byte(","))
	n, err := strconv.Atoi(string(digits))
	if err != nil {
		return 0
	}
	return n
}

// tagged is where a prompt begins: its first tagBytes bytes can be overwritten with anything of that length.
func tagged(req []byte) []byte {
	const mark = `"content":"`
	i := bytes.Index(req, []byte(mark)) + len(mark)
	return req[i : i+tagBytes]
}

const tagBytes = 16

// promptNumber makes all prompts of a run different.
var promptNumber atomic.Uint64

// nextPrompt makes the prompt one that was never sent before.
func (c *client) nextPrompt() {
	copy(c.tag, fmt.Sprintf("%0*x", tagBytes, promptNumber.Add(1)*0x9E3779B97F4A7C15))
}

func (c *client) close() {
	if c.before != nil {
		c.before.close()
	}
	_ = c.c.Close()
}

func dial(ctx context.Context, addr string, req []byte) (*client, error) {
	c, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	return &client{c: c, r: bufio.NewReaderSize(c, 64<<10), req: req, tokens: tokensOf(req)}, nil
}

// do sends the request and reads the answer to its end. first is the time to the first content chunk (or the
// whole body), less what the engine says it slept before it, so that the mock's timers do not count as
// anybody's latency. chunks is what the request asked for: a stream that does not end with [DONE] is an
// error.
func (c *client) do() (first time.Duration, chunks int, err error) {
	if c.tag != nil {
		c.nextPrompt()
	}
	start := time.Now()
	if c.before != nil {
		if _, _, err := c.before.do(); err != nil {
			return 0, 0, err
		}
	}
	if err := c.c.SetDeadline(start.Add(60 * time.Second)); err != nil {
		return 0, 0, err
	}
	if _, err := c.c.Write(c.req); err != nil {
		return 0, 0, err
	}
	length, err := c.head()
	if err != nil {
		return 0, 0, err
	}
	if length >= 0 {
		_, err := c.r.Discard(length)
		return time.Since(start), 0, err
	}
	first, err = c.chunks(start)
	return first, c.tokens, err
}

// chunks reads a chunked body by its chunks: a proxy cuts them where it likes, also within an event.
func (c *client) chunks(start time.Time) (first time.Duration, err error) {
	c.seen = c.seen[:0]
	for {
		size, err := c.size()
		switch {
		case err != nil:
			return first, err
		case size == 0:
			if !bytes.HasSuffix(c.seen, []byte(doneEvent)) {
				return first, fmt.Errorf("%w: the stream ends in %q", errUnexpected, c.seen)
			}
			_, err := c.r.Discard(2)
			return first, err
		}
		if err := c.keep(size); err != nil {
			return first, err
		}
		if first == 0 && bytes.Contains(c.seen, contentMark) {
			first = max(time.Since(start)-held(c.seen), 1)
		}
	}
}

var contentMark = []byte(`"delta":{"content"`)

// size reads the line of a chunk's size.
func (c *client) size() (int, error) {
	line, err := c.r.ReadSlice('\n')
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(string(bytes.TrimSpace(line)), 16, 31)
	return int(n), err
}

// keep reads a chunk of n bytes: the end of it stays in seen.
func (c *client) keep(n int) error {
	b, err := c.r.Peek(min(n+2, c.r.Size()))
	if err != nil {
		return err
	}
	if n+2 > len(b) {
		return fmt.Errorf("%w: a chunk of %d bytes", errUnexpected, n)
	}
	c.seen = append(c.seen[:copy(c.seen, c.seen[max(0, len(c.seen)-seenBytes):])],
		b[max(0, n-seenBytes):n]...)
	_, err = c.r.Discard(n + 2)
	return err
}

// held reads how long the engine slept before its first chunk.
func held(seen []byte) time.Duration {
	_, after, _ := bytes.Cut(seen, []byte(`"held_us":`))
	n := 0
	for _, d := range after {
		if d < '0' || d > '9' {
			break
		}
		n = n*10 + int(d-'0')
	}
	return time.Duration(n) * time.Microsecond
}

func (c *client) head() (length int, err error) {
	length = -1
	line, err := c.r.ReadSlice('\n')
	if err != nil {
		return 0, err
	}
	if !bytes.Contains(line, []byte(" 200 ")) {
		return 0, fmt.Errorf("%w: %s", errUnexpected, line)
	}
	for {
		line, err := c.r.ReadSlice('\n')
		if err != nil {
			return 0, err
		}
		if len(line) <= 2 {
			return length, nil
		}
		if len(line) > 15 && strings.EqualFold(string(line[:15]), "content-length:") {
			if length, err = strconv.Atoi(strings.TrimSpace(string(line[15:]))); err != nil {
				return 0, err
			}
		}
	}
}
