package sim

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// benchClients is the number of connections of a benchmark.
const benchClients = 32

// benchLoad runs b.N requests against an engine process with one P and counts chunks.
func benchLoad(b *testing.B, body string, args ...string) {
	p := launch(b, args...)
	p.waitReady(b)
	request := "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: " +
		"application/json\r\nContent-Length: " +
		strconv.Itoa(len(body)) + "\r\n\r\n" + body
	var left, chunks atomic.Int64
	left.Store(int64(b.N))
	var wg sync.WaitGroup
	before := p.cpu(b)
	b.ResetTimer()
	for range benchClients {
		wg.Go(func() {
			conn, err := net.Dial("tcp", strings.TrimPrefix(p.url(), "http://"))
			if err != nil {
				b.Error(err)
				return
			}
			defer func() { _ = conn.Close() }()
			r := bufio.NewReaderSize(conn, 64<<10)
			buf := make([]byte, 64<<10)
			for left.Add(-1) >= 0 {
				n, err := roundTrip(conn, r, request, buf)
				if err != nil {
					b.Error(err)
					return
				}
				chunks.Add(int64(n))
			}
		})
	}
	wg.Wait()
	used := p.cpu(b) - before
	b.ReportMetric(used*1e6/float64(b.N), "engine-µs/req")
	b.ReportMetric(float64(chunks.Load())/used, "chunks/engine-s")
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "req/s")
	b.ReportMetric(float64(chunks.Load())/b.Elapsed().Seconds(), "chunks/s")
}

// cpu is the processor time of the process in seconds.
func (p *simProcess) cpu(t testing.TB) float64 {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(stat), ") ")
	fields := strings.Fields(rest)
	user, err := strconv.Atoi(fields[11])
	require.NoError(t, err)
	system, err := strconv.Atoi(fields[12])
	require.NoError(t, err)
	return float64(user+system) / 100 // clock ticks of Linux
}

func roundTrip(conn net.Conn, r *bufio.Reader, request string, buf []byte) (chunks int, err error) {
	if _, err := io.WriteString(conn, request); err != nil {
		return 0, err
	}
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	for {
		n, err := resp.Body.Read(buf)
		chunks += bytes.Count(buf[:n], []byte("data: "))
		if err != nil {
			return chunks, nil
		}
	}
}

func BenchmarkSmallRequests(b *testing.B) {
	benchLoad(b, `{"model":"sim","prompt":"hello there","max_tokens":8}`, "--sim-step-ms", "0")
}

func BenchmarkFlatOutStreams(b *testing.B) {
	benchLoad(b, `{"model":"sim","prompt":"hello there","max_tokens":256,"ignore_eos":true,"stream":true}`,
		"--sim-step-ms", "0")
}

func BenchmarkAppendChunk(b *testing.B) {
	c := fast()
	s, err := New(c)
	require.NoError(b, err)
	body := &fields{}
	require.NoError(b, json.Unmarshal([]byte(strings.Replace(streamBody, "40", "30000", 1)), &body.members))
	p, apiErr := readCompletion(body, s.set)
	require.Nil(b, apiErr)
	p.id, p.created, p.rank = "cmpl-0123456789abcdef", 1795230440, noRank
	call := newCall(p, s.set, func(*prompt) int { return 30000 })
	ch := &call.choices[0]
	buf := make([]byte, 0, 4096)
	b.ReportAllocs()
	for b.Loop() {
		if ch.sentTokens > 29000 {
			ch.sentTokens, ch.sentBytes = 0, 0
		}
		ch.produced.Store(int32(ch.sentTokens + 1))
		buf, _ = ch.appendNew(buf[:0], s.set, 1<<30)
	}
}

// BenchmarkPlainRequest is what one request without a stream costs beside HTTP and the engine: its body is
// read and its answer is written.
func BenchmarkPlainRequest(b *testing.B) {
	s, err := New(fast())
	require.NoError(b, err)
	const body = `{"model":"sim","prompt":"hello there","max_tokens":8}`
	b.ReportAllocs()
	for b.Loop() {
		r := httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		members, apiErr := api{s}.body(r)
		require.Nil(b, apiErr)
		p, apiErr := readCompletion(members, s.set)
		require.Nil(b, apiErr)
		c := newCall(p, s.set, func(*prompt) int { return 8 })
		c.choices[0].produced.Store(8)
		c.choices[0].ended.Store(uint32(em.FinishLength))
		_ = c.answer(s.set)
	}
}
