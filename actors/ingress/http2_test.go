package ingress

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/dpserve/dpserve/test/memnet"
)

// headersOf returns the block of a HEADERS frame.
func headersOf(t *testing.T, fields ...[2]string) []byte {
	t.Helper()
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, f := range fields {
		require.NoError(t, enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}))
	}
	return block.Bytes()
}

// http2Post returns the fields that a request to a path must have.
func http2Post(path string) [][2]string {
	return [][2]string{{":method", "POST"}, {":scheme", "http"}, {":authority", "x"}, {":path", path}}
}

// http2Client is a client that sends frames as it likes.
type http2Client struct {
	*http2.Framer
	net.Conn
	ended chan struct{} // closed when the server has ended the connection
	reset atomic.Uint32 // streams that the server has reset
	heads atomic.Uint32 // answers
}

// http2Dial opens a connection of HTTP/2 and reads what comes over it.
func http2Dial(t *testing.T, network *memnet.Network) *http2Client {
	t.Helper()
	conn, err := network.DialContext(t.Context(), "tcp", "n1:80")
	require.NoError(t, err)
	c := &http2Client{Framer: http2.NewFramer(conn, conn), Conn: conn, ended: make(chan struct{})}
	_, err = io.WriteString(conn, http2.ClientPreface)
	require.NoError(t, err)
	go func() {
		defer close(c.ended)
		for {
			f, err := c.ReadFrame()
			if err != nil {
				return
			}
			switch f.(type) {
			case *http2.RSTStreamFrame:
				c.reset.Add(1)
			case *http2.HeadersFrame:
				c.heads.Add(1)
			}
		}
	}()
	require.NoError(t, c.WriteSettings())
	return c
}

// SP7: no engine gets a request of a client that resets its streams of HTTP/2 at once, sends headers without
// an end, a small block of headers that unpacks to a large one, or wrong pseudo-headers. Less than 1 MiB of
// endless headers is read, and another client is served.
func TestHostileHTTP2(t *testing.T) {
	const most = 1 << 20 // bytes of headers that are read before a connection ends
	chat := http2Post(chatPath)
	for name, attack := range map[string]func(t *testing.T, c *http2Client){
		"rapid reset": func(t *testing.T, c *http2Client) {
			block := headersOf(t, chat...)
			for i := range uint32(2000) {
				err := c.WriteHeaders(http2.HeadersFrameParam{
					StreamID: 2*i + 1, BlockFragment: block, EndHeaders: true,
				})
				if err != nil || c.WriteRSTStream(2*i+1, http2.ErrCodeCancel) != nil {
					return // the server has had enough
				}
			}
		},
		"a flood of CONTINUATION": func(t *testing.T, c *http2Client) {
			err := c.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: headersOf(t, chat...)})
			require.NoError(t, err)
			block := headersOf(t, [2]string{"x-long", strings.Repeat("~", 8<<10)})
			written := 0
			for ; written < most && err == nil; written += len(block) {
				err = c.WriteContinuation(1, false, block)
			}
			require.Error(t, err, "the server ends the connection")
			<-c.ended
		},
		"a header that unpacks to 40 MiB": func(t *testing.T, c *http2Client) {
			var block bytes.Buffer
			enc := hpack.NewEncoder(&block)
			for _, f := range chat {
				require.NoError(t, enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}))
			}
			for range 10_000 { // from the second one on it is one byte
				err := enc.WriteField(hpack.HeaderField{Name: "x-long", Value: strings.Repeat("~", 4000)})
				require.NoError(t, err)
			}
			require.Less(t, block.Len(), 16<<10)
			require.NoError(t, c.WriteHeaders(http2.HeadersFrameParam{
				StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: true,
			}))
			synctest.Wait()
			select {
			case <-c.ended:
			default:
				assert.EqualValues(t, 1, c.heads.Load()+c.reset.Load(), "refused")
			}
		},
		"wrong pseudo-headers": func(t *testing.T, c *http2Client) {
			for i, fields := range [][][2]string{
				append(http2Post(chatPath), [2]string{":status", "200"}),
				append(http2Post(chatPath), [2]string{":path", "/v1/models"}),
				append([][2]string{{"a", "b"}}, chat...), chat[1:], chat[:3],
			} {
				require.NoError(t, c.WriteHeaders(http2.HeadersFrameParam{
					StreamID: uint32(2*i + 1), BlockFragment: headersOf(t, fields...),
					EndHeaders: true, EndStream: true,
				}))
				synctest.Wait()
				assert.EqualValues(t, i+1, c.reset.Load(), fields)
			}
			assert.Zero(t, c.heads.Load())
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				network := &memnet.Network{}
				var asked atomic.Int32
				g := newRig(t, options{network: network, engines: []http.HandlerFunc{
					func(w http.ResponseWriter, r *http.Request) {
						asked.Add(1)
						replies(200, wholeAnswer)(w, r)
					},
				}})
				c := http2Dial(t, network)
				attack(t, c)
				assert.Equal(t, 200, g.post(chatPath, chatBody).status)
				assert.EqualValues(t, 1, asked.Load())
				require.NoError(t, c.Close())
				<-c.ended
			})
		})
	}
}
