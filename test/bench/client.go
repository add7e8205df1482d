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
	"time"
)

var errUnexpected = errors.New("unexpected answer")

// client is one keep-alive connection with prebuilt requests.
type client struct {
	c   net.Conn
	r   *bufio.Reader
	req []byte
}

// payload builds a chat request whose prompt has promptBytes bytes (escaped: an escape every 11 bytes).
func payload(promptBytes, tokens int, pace time.Duration, stream, escaped bool) []byte {
	unit := "hello tok "
	if escaped {
		unit = `hello tok\n`
	}
	prompt := strings.Repeat(unit, promptBytes/len(unit)+1)[:promptBytes/len(unit)*len(unit)]
	body := `{"model":"bench","messages":[{"role":"user","content":"` + prompt + `"}],"stream":` + strconv.FormatBool(stream) +
		`,"max_tokens":` + strconv.Itoa(tokens) + `,"pace_us":` + strconv.FormatInt(pace.Microseconds(), 10) + `}`
	return []byte("POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: " +
		strconv.Itoa(len(body)) + "\r\n\r\n" + body)
}

func dial(ctx context.Context, addr string, req []byte) (*client, error) {
	c, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	return &client{c: c, r: bufio.NewReaderSize(c, 64<<10), req: req}, nil
}

// do sends the request and reads the answer to its end. first is the time to the first content chunk (or the whole body), chunks
// the number of content chunks.
func (c *client) do() (first time.Duration, chunks int, err error) {
	start := time.Now()
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
	for {
		line, err := c.r.ReadSlice('\n')
		if err != nil {
			return first, chunks, err
		}
		switch {
		case bytes.HasPrefix(line, []byte("data: {")):
			if bytes.Contains(line, []byte(`"delta":{"content"`)) {
				if chunks++; chunks == 1 {
					first = time.Since(start)
				}
			} else if bytes.Contains(line, []byte(`"error"`)) {
				return first, chunks, fmt.Errorf("%w: %s", errUnexpected, line)
			}
		case len(line) == 3 && line[0] == '0':
			_, err := c.r.Discard(2)
			return first, chunks, err
		}
	}
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
