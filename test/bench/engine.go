//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
)

// The mock engine: raw HTTP/1.1, one goroutine a connection. A request says what it wants in two fields:
// "max_tokens" chunks, and "pace_us" microseconds before each of them (0 = flat out). Each chunk is a system
// call of its own: the mock joins no writes. It closes connections that were idle for keepAlive, as vLLM
// does.
const (
	chunkTop = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"bench",` +
		`"choices":[`
	roleChunk = chunkTop + `{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,` +
		`"finish_reason":null}]}` + "\n\n"
	textChunk = chunkTop + `{"index":0,"delta":{"content":"tok "},"logprobs":null,` +
		`"finish_reason":null,"token_ids":null}]}` + "\n\n"
	lastChunk = chunkTop + `{"index":0,"delta":{"content":"end"},"logprobs":null,` +
		`"finish_reason":"length","stop_reason":null,"token_ids":null}]}` + "\n\n"
	doneEvent = "data: [DONE]\n\n"
	plainBody = `{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"bench","choices":[` +
		`{"index":0,"message":{"role":"assistant","content":"hello","refusal":null},"logprobs":null,` +
		`"finish_reason":"length","stop_reason":null}],` +
		`"usage":{"prompt_tokens":8,"total_tokens":9,"completion_tokens":1}}`
	prefillBody = `{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"bench","choices":[` +
		`{"index":0,"message":{"role":"assistant","content":"h","refusal":null},"logprobs":null,` +
		`"finish_reason":"length","stop_reason":null}],` +
		`"usage":{"prompt_tokens":8,"total_tokens":9,"completion_tokens":1},` +
		pullParams + `}`
	pullParams = `"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,` +
		`"remote_block_ids":[[1,2]],"remote_engine_id":"6b0c1f0a-93a4-4a34-a1f3-40f5f1f0b6f2",` +
		`"remote_request_id":"chatcmpl-bench-0123abcd","remote_host":"127.0.0.1","remote_port":15600,` +
		`"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":8,"remote_blocks_expiry_time":null,` +
		`"transfer_mode":"pull","remote_prefill_cached_tokens":0}`
	modelsBody = `{"object":"list","data":[{"id":"bench","object":"model","created":1,"owned_by":"vllm",` +
		`"root":"bench","parent":null,"max_model_len":1000000}]}`
)

func runEngine(ctx context.Context, addr string) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("mock engine: %w", err)
	}
	go func() { <-ctx.Done(); _ = l.Close() }()
	for {
		c, err := l.Accept()
		if err != nil {
			return nil //nolint:nilerr // closed by ctx
		}
		go serveConn(c)
	}
}

func serveConn(c net.Conn) {
	defer c.Close()
	e := &engineConn{c: c, r: bufio.NewReaderSize(c, 64<<10)}
	for e.request() == nil {
	}
}

type engineConn struct {
	c    net.Conn
	r    *bufio.Reader
	body []byte
	out  []byte
}

// keepAlive is vLLM's (uvicorn's) default.
const keepAlive = 5 * time.Second

func (e *engineConn) request() error {
	if err := e.c.SetReadDeadline(time.Now().Add(keepAlive)); err != nil {
		return err
	}
	line, err := e.r.ReadString('\n')
	if err != nil {
		return err
	}
	length := 0
	for {
		h, err := e.r.ReadSlice('\n')
		if err != nil {
			return err
		}
		if len(h) <= 2 {
			break
		}
		if len(h) > 16 && strings.EqualFold(string(h[:15]), "content-length:") {
			length, _ = strconv.Atoi(strings.TrimSpace(string(h[15:])))
		}
	}
	if cap(e.body) < length {
		e.body = make([]byte, length)
	}
	e.body = e.body[:length]
	for n := 0; n < length; {
		m, err := e.r.Read(e.body[n:])
		if err != nil {
			return err
		}
		n += m
	}
	return e.answer(line)
}

func (e *engineConn) answer(line string) error {
	switch {
	case strings.HasPrefix(line, "GET /v1/models"):
		return e.plain(modelsBody, "application/json")
	case strings.HasPrefix(line, "GET"):
		return e.plain("", "text/plain")
	case bytes.Contains(e.tail(), []byte(keepsBlocks)):
		return e.plain(prefillBody, "application/json")
	case bytes.Contains(e.tail(), []byte(`"stream":true`)):
		return e.stream()
	default:
		return e.plain(plainBody, "application/json")
	}
}

// tail is where the client puts the fields the engine reads, and where a gateway adds its own, so that a 400
// KB prompt costs the mock nothing.
func (e *engineConn) tail() []byte { return e.body[max(0, len(e.body)-1024):] }

// keepsBlocks is what a prefill leg says.
const keepsBlocks = `"do_remote_decode":true`

func (e *engineConn) field(name string) int {
	_, after, ok := bytes.Cut(e.tail(), []byte(`"`+name+`":`))
	if !ok {
		return 0
	}
	n := 0
	for _, d := range after {
		if d < '0' || d > '9' {
			break
		}
		n = n*10 + int(d-'0')
	}
	return n
}

func (e *engineConn) plain(body, ctype string) error {
	e.out = append(e.out[:0], "HTTP/1.1 200 OK\r\ncontent-type: "...)
	e.out = append(e.out, ctype...)
	e.out = append(e.out, "\r\ncontent-length: "...)
	e.out = strconv.AppendInt(e.out, int64(len(body)), 10)
	e.out = append(e.out, "\r\n\r\n"...)
	e.out = append(e.out, body...)
	_, err := e.c.Write(e.out)
	return err
}

func (e *engineConn) stream() error {
	n, pace := e.field("max_tokens"), time.Duration(e.field("pace_us"))*time.Microsecond
	e.out = append(e.out[:0], "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"+
		"transfer-encoding: chunked\r\n\r\n"...)
	start := time.Now()
	if pace > 0 {
		time.Sleep(pace)
	}
	held := time.Since(start)
	e.chunk(fmt.Sprintf(": %s%d\n\n", `"held_us":`, held.Microseconds()))
	if err := e.send(roleChunk); err != nil {
		return err
	}
	for i := 1; i < n; i++ {
		if err := e.send(textChunk); err != nil {
			return err
		}
		if pace > 0 {
			time.Sleep(pace)
		}
	}
	if err := e.send(lastChunk); err != nil {
		return err
	}
	e.chunk(doneEvent)
	e.out = append(e.out, "0\r\n\r\n"...)
	return e.flush()
}

// chunk packs an event.
func (e *engineConn) chunk(s string) {
	e.out = strconv.AppendInt(e.out, int64(len(s)), 16)
	e.out = append(e.out, "\r\n"...)
	e.out = append(e.out, s...)
	e.out = append(e.out, "\r\n"...)
}

// send packs an event and writes it at once, as engines do with each token.
func (e *engineConn) send(s string) error {
	e.chunk(s)
	return e.flush()
}

func (e *engineConn) flush() error {
	_, err := e.c.Write(e.out)
	e.out = e.out[:0]
	return err
}
