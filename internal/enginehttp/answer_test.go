package enginehttp

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// RP49: well-formed answers, however they are cut into reads, and whether the connection is kept.
func TestAnswers(t *testing.T) {
	long := strings.Repeat("0123456789abcdef", 4<<10)
	for name, tc := range map[string]struct {
		raw    string
		status int
		body   string
		length int64
		pooled bool
	}{
		"length":       {okAnswer, 200, "ok", 2, true},
		"length 0":     {"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, "", 0, true},
		"no reason":    {"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\nx", 200, "x", 1, true},
		"empty reason": {"HTTP/1.1 200 \r\nContent-Length: 1\r\n\r\nx", 200, "x", 1, true},
		"equal lengths": {
			"HTTP/1.1 200 OK\r\nContent-Length: 1\r\ncontent-length: 1\r\n\r\nx", 200, "x", 1,
			true,
		},
		"close": {"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx", 200, "x", 1, false},
		"close among others": {
			"HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 1\r\n\r\nx", 200,
			"x", 1, false,
		},
		"1.0": {"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, "x", 1, false},
		"1.0 keep-alive": {
			"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx", 200,
			"x", 1, true,
		},
		"until close": {"HTTP/1.1 200 OK\r\n\r\nabc", 200, "abc", -1, false},
		"interim": {
			"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + okAnswer, 200,
			"ok", 2, true,
		},
		"204":               {"HTTP/1.1 204 No Content\r\n\r\n", 204, "", 0, true},
		"204 with a length": {"HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\nabc", 204, "", 0, false},
		"204 chunked": {
			"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 204, "", 0,
			false,
		},
		"304": {"HTTP/1.1 304 Not Modified\r\n\r\n", 304, "", 0, true},
		"chunked": {
			chunkTop + "3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n",
			200, "abc0123456789", -1, true,
		},
		"no chunks":     {chunkTop + "0\r\n\r\n", 200, "", -1, true},
		"extensions":    {chunkTop + "3;a=b\r\nabc\r\n1 ; x\r\nd\r\n0;z\r\n\r\n", 200, "abcd", -1, true},
		"leading zeros": {chunkTop + "0003\r\nabc\r\n000\r\n\r\n", 200, "abc", -1, true},
		"trailer":       {chunkTop + "3\r\nabc\r\n0\r\nX-A: b\r\nX-C: d\r\n\r\n", 200, "abc", -1, true},
		"large chunk": {
			chunkTop + "10000\r\n" + long + "\r\n1\r\nx\r\n0\r\n\r\n",
			200, long + "x", -1, true,
		},
		"large body": {"HTTP/1.1 200 OK\r\nContent-Length: 65536\r\n\r\n" + long, 200, long, 65536, true},
		"large head": {
			"HTTP/1.1 200 OK\r\nX-Long: " + long[:60<<10] + "\r\nContent-Length: 1\r\n\r\nx", 200,
			"x", 1, true,
		},
		"bytes behind the end": {okAnswer + "HTTP/1.1 200 OK\r\n", 200, "ok", 2, false},
		"bytes behind chunks":  {chunkTop + "0\r\n\r\nx", 200, "", -1, false},
		"blanks around a value": {
			"HTTP/1.1 200 OK\r\nContent-Length: \t 1 \r\nX-E:\r\n\r\nx", 200, "x", 1,
			true,
		},
	} {
		for _, size := range []int{1, 2, 3, 7, 1 << 20} {
			if size < 7 && len(tc.raw) > 60<<10 {
				continue
			}
			t.Run(fmt.Sprintf("%s by %d", name, size), func(t *testing.T) {
				got := outcome(t, scripted(t, &script{pieces: split(tc.raw, size)}))
				require.NoError(t, got.err)
				assert.Equal(t, tc.status, got.status)
				assert.Equal(t, tc.body, got.body)
				assert.Equal(t, tc.length, got.length)
				// else they are left for the look before the next request
				if size > 7 || !strings.HasPrefix(name, "bytes behind") {
					assert.Equal(t, tc.pooled, got.pooled, "pooled")
				}
			})
		}
		t.Run(name+" over TLS", func(t *testing.T) {
			got := outcome(t, secured(t, tc.raw))
			require.NoError(t, got.err)
			assert.Equal(t, tc.status, got.status)
			assert.Equal(t, tc.body, got.body)
			assert.Equal(t, tc.length, got.length)
		})
	}
}

// RP27, RP49: what is not clear is an error, before or in the body, and its connection is not used again.
func TestMalformed(t *testing.T) {
	head := func(fields string) string { return "HTTP/1.1 200 OK\r\n" + fields + "\r\n\r\n" }
	const chunked = "Transfer-Encoding: chunked"
	tooLong := strings.Repeat("x", maxChunkLine)
	for name, raw := range map[string]string{
		"garbage":                 "SSH-2.0-OpenSSH\r\n",
		"TLS alert":               "\x15\x03\x01\x00\x02\x02\x16",
		"HTTP/2":                  "HTTP/2.0 200 OK\r\n\r\n",
		"HTTP/1.2":                "HTTP/1.2 200 OK\r\n\r\n",
		"short status":            "HTTP/1.1 20\r\n\r\n",
		"long status":             "HTTP/1.1 2000 OK\r\n\r\n",
		"no digits":               "HTTP/1.1 2x0 OK\r\n\r\n",
		"status below 100":        "HTTP/1.1 099 OK\r\n\r\n",
		"control in the reason":   "HTTP/1.1 200 O\x01K\r\n\r\n",
		"line feeds alone":        "HTTP/1.1 200 OK\nContent-Length: 1\n\nx",
		"one line feed alone":     "HTTP/1.1 200 OK\r\nA: b\nContent-Length: 1\r\n\r\nx",
		"carriage return alone":   head("A: b\rc"),
		"folded":                  head("A: b\r\n c"),
		"first field folded":      head(" A: b"),
		"blank before the colon":  head("A : b"),
		"no colon":                head("abc"),
		"no name":                 head(": b"),
		"NUL in a value":          head("A: b\x00c"),
		"lengths that differ":     head("Content-Length: 1\r\nContent-Length: 2") + "xx",
		"list of lengths":         head("Content-Length: 1, 1") + "x",
		"negative length":         head("Content-Length: -1"),
		"signed length":           head("Content-Length: +1") + "x",
		"empty length":            head("Content-Length:"),
		"huge length":             head("Content-Length: 9223372036854775808"),
		"length and chunked":      head("Content-Length: 5\r\nTransfer-Encoding: chunked") + "0\r\n\r\n",
		"gzip, chunked":           head("Transfer-Encoding: gzip, chunked") + "0\r\n\r\n",
		"chunked twice":           head(chunked+"\r\n"+chunked) + "0\r\n\r\n",
		"chunked in 1.0":          "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"head too large":          head("A: " + strings.Repeat("x", maxHead)),
		"too many interim":        strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", maxInterim+1) + okAnswer,
		"switch of protocols":     "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
		"body too short":          "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab",
		"chunks without end":      chunkTop + "3\r\nabc\r\n",
		"chunk cut":               chunkTop + "3\r\nab",
		"trailer cut":             chunkTop + "0\r\n",
		"chunk longer than said":  chunkTop + "3\r\nabcd\r\n0\r\n\r\n",
		"chunk's CR alone":        chunkTop + "3\r\nabc\rx0\r\n\r\n",
		"chunk's LF alone":        chunkTop + "3\nabc\n0\n\n",
		"no size":                 chunkTop + "\r\nabc\r\n0\r\n\r\n",
		"bad size":                chunkTop + "x\r\nabc\r\n0\r\n\r\n",
		"size with 0x":            chunkTop + "0x3\r\nabc\r\n0\r\n\r\n",
		"negative size":           chunkTop + "-3\r\nabc\r\n0\r\n\r\n",
		"blank before size":       chunkTop + " 3\r\nabc\r\n0\r\n\r\n",
		"huge size":               chunkTop + "fffffffffffffffff\r\nabc\r\n0\r\n\r\n",
		"control in an extension": chunkTop + "3;a\rb\r\nabc\r\n0\r\n\r\n",
		"extension too long":      chunkTop + "3;" + tooLong + "\r\nabc\r\n0\r\n\r\n",
		"bad trailer":             chunkTop + "0\r\nno colon\r\n\r\n",
		"trailer too long":        chunkTop + "0\r\nA: " + strings.Repeat("x", maxTrailer) + "\r\n\r\n",
		"too many trailers":       chunkTop + "0\r\n" + strings.Repeat("A: b\r\n", maxTrailer/6+1) + "\r\n",
	} {
		for _, size := range []int{1, 5, 1 << 20} {
			t.Run(fmt.Sprintf("%s by %d", name, size), func(t *testing.T) {
				s := &script{pieces: split(raw, size)}
				c := scripted(t, s)
				got := outcome(t, c)
				require.Error(t, got.err)
				require.NotErrorIs(t, got.err, io.EOF, "no clean end")
				assert.True(t, s.closed.Load())
				assert.True(t, c.Unused())
				var e *SendError
				if errors.As(got.err, &e) {
					assert.True(t, e.Begun)
				}
			})
		}
		t.Run(name+" over TLS", func(t *testing.T) {
			c := secured(t, raw)
			got := outcome(t, c)
			require.Error(t, got.err)
			require.NotErrorIs(t, got.err, io.EOF, "no clean end")
			assert.True(t, c.Unused())
		})
	}
}

// TestOneReadGivesAllPayloads: what one read of the socket has brought comes in one Read, in however many
// chunks.
func TestOneReadGivesAllPayloads(t *testing.T) {
	s := &script{pieces: [][]byte{
		[]byte(chunkTop + "1\r\na\r\n2\r\nbc\r\n"), []byte("1\r\nd\r\n1\r\ne\r\n3\r\nf"), []byte("gh\r\n1"),
		[]byte("\r\ni\r\n0\r\n\r\n"),
	}}
	resp, err := post(t, scripted(t, s), "{}")
	require.NoError(t, err)
	p := make([]byte, 100)
	for _, want := range []string{"abc", "def", "gh", "i"} {
		n, err := resp.Body.Read(p)
		assert.Equal(t, want, string(p[:n]))
		if want == "i" {
			assert.Equal(t, io.EOF, err, "with the last bytes")
		} else {
			require.NoError(t, err)
		}
	}
	n, err := resp.Body.Read(p)
	assert.Zero(t, n)
	assert.Equal(t, io.EOF, err)
	assert.Equal(t, 4, s.reads)
}

// TestSmallReads: a reader with little room loses nothing.
func TestSmallReads(t *testing.T) {
	for size := range 4 {
		resp, err := post(t, scripted(t,
			&script{pieces: split(chunkTop+"3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n", 1<<10)}), "{}")
		require.NoError(t, err)
		var got []byte
		p := make([]byte, size+1)
		for err == nil {
			var n int
			n, err = resp.Body.Read(p)
			got = append(got, p[:n]...)
		}
		assert.Equal(t, io.EOF, err)
		assert.Equal(t, "abc0123456789", string(got))
	}
}

func TestHeaderFields(t *testing.T) {
	raw := "HTTP/1.1 429 Too Many Requests\r\nserver: uvicorn\r\nx-a: 1\r\nX-A: 2\r\n" +
		"retry-after: 7\r\ncontent-length: 0\r\ntrailer: x\r\n\r\n"
	got := outcome(t, scripted(t, &script{pieces: split(raw, 1000)}))
	require.NoError(t, got.err)
	assert.Equal(t, http.Header{
		"Server": {"uvicorn"}, "X-A": {"1", "2"}, "Retry-After": {"7"},
		"Content-Length": {"0"},
	}, got.header)
	server := got.header["Server"]
	_ = append(server, "mine")
	assert.Equal(t, []string{"7"}, got.header["Retry-After"], "values do not share spare room")
}

func TestHEADHasNoBody(t *testing.T) {
	c := scripted(t, &script{pieces: split("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", 100)})
	resp, err := c.Send(t.Context(), http.MethodHead, "/health", nil, nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	assert.EqualValues(t, 5, resp.ContentLength)
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	assert.Empty(t, b)
	assert.False(t, c.pool.empty())
}

func TestRequests(t *testing.T) {
	h := http.Header{
		"X-A": {"1", "2"}, "User-Agent": nil, "Host": {"evil"}, "content-length": {"9"},
		"Transfer-Encoding": {"chunked"}, "Connection": {"close"},
		"Expect": {"100-continue"}, "Upgrade": {"x"}, "TRAILER": {"y"},
	}
	b, err := appendRequest(nil, http.MethodPost, "/v1/x?y=z", "engine:1", h, 3)
	require.NoError(t, err)
	assert.Equal(t,
		"POST /v1/x?y=z HTTP/1.1\r\nHost: engine:1\r\nX-A: 1\r\nX-A: 2\r\nContent-Length: 3\r\n\r\n",
		string(b))
	b, err = appendRequest(nil, http.MethodGet, "/", "e", nil, 0)
	require.NoError(t, err)
	assert.Equal(t, "GET / HTTP/1.1\r\nHost: e\r\n\r\n", string(b))
	for _, bad := range []http.Header{
		{"A\r\nB": {"x"}},
		{"A": {"x\r\nB: y"}},
		{"": {"x"}},
		{"A ": {"x"}},
		{"A": {"\x00"}},
	} {
		_, err = appendRequest(nil, http.MethodPost, "/", "e", bad, 0)
		require.Error(t, err, bad)
	}
	for _, target := range []string{"", "x", "/a b", "/a\r\nB: c", "/\x7f"} {
		_, err = appendRequest(nil, http.MethodPost, target, "e", nil, 0)
		require.Error(t, err, target)
	}
}

func TestAddress(t *testing.T) {
	for host, want := range map[string]string{
		"h": "h:80", "h:8000": "h:8000", "[::1]": "[::1]:80",
		"[::1]:9": "[::1]:9", "127.0.0.1": "127.0.0.1:80",
	} {
		assert.Equal(t, want, address(host, "80"))
	}
}
