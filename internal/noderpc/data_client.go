package noderpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"

	"github.com/dpserve/dpserve/actors/msg"
)

// dataHost fills the host of the URL: the transport already has the node.
const dataHost = "data.dpserve"

// DataClient sends requests to the ranks of other nodes. Safe for concurrent use.
type DataClient struct {
	transport func(node string) (http.RoundTripper, error)
	hashes    sync.Pool // *[]byte
}

// NewDataClient makes a client. transport returns the HTTP/2 transport to a node's data port without waiting
// for the node: the same one until the node moves.
func NewDataClient(transport func(node string) (http.RoundTripper, error)) *DataClient {
	c := &DataClient{transport: transport}
	c.hashes.New = func() any { return new([]byte) }
	return c
}

// Send asks for a ticket and, with it, for an answer. It returns when the engine's header is there; then d's
// memory belongs to the caller again. Without an error, either reply is a refusal, or it holds the ticket and
// resp is the engine's answer, whose body the caller closes. With an error there is no answer; if reply holds
// a ticket, the caller gives it back. Errors: those of msg.Dispatch; any other means that the engine broke
// off. A body that ends with msg.ErrUnreachable lost its node, not its engine.
//
// If ctx ends before the answer has begun, no ticket is left: the data port gives it back.
func (c *DataClient) Send(
	ctx context.Context, d *msg.Dispatch,
) (resp *http.Response, reply msg.AdmitReply, err error) {
	way, err := c.transport(d.Node)
	if err != nil {
		return nil, reply, nodeUnreachable(d.Node, err)
	}
	u, mem := c.newUpload(d)
	resp, err = way.RoundTrip(u.newRequest(ctx, d))
	u.release()
	c.hashes.Put(mem)
	if err != nil {
		return nil, reply, nodeUnreachable(d.Node, err)
	}
	return readAnswer(ctx, d, resp)
}

func (c *DataClient) newUpload(d *msg.Dispatch) (u *upload, mem *[]byte) {
	mem, _ = c.hashes.Get().(*[]byte)
	*mem = (*mem)[:0]
	if d.Admit != nil {
		*mem = appendBlocks(*mem, d.Admit.Blocks)
	}
	return &upload{parts: [2][]byte{*mem, d.Body}}, mem
}

func nodeUnreachable(node string, err error) error {
	return fmt.Errorf("node %s: %w: %w", node, msg.ErrUnreachable, err)
}

func (u *upload) newRequest(ctx context.Context, d *msg.Dispatch) *http.Request {
	path := d.Path
	if path == "" {
		path = holdPath
	}
	r := &http.Request{
		Method: http.MethodPost, URL: &url.URL{Scheme: "http", Host: dataHost, Path: path}, Host: dataHost,
		Proto: "HTTP/2.0", ProtoMajor: 2, Header: writeHead(d, time.Now()), ContentLength: int64(u.size()),
		Body: http.NoBody,
	}
	if u.size() > 0 {
		r.Body, _ = u.open()
		r.GetBody = u.open // for a connection that was closing: the node has read nothing of the request
	}
	return r.WithContext(ctx)
}

// readAnswer reads the answer of a data port.
func readAnswer(
	ctx context.Context, d *msg.Dispatch, resp *http.Response,
) (*http.Response, msg.AdmitReply, error) {
	h := resp.Header
	rep, refused := readReply(d, h)
	cause := h[dataCause]
	d.Resent = len(h[dataResent]) > 0
	if !refused && len(cause) == 0 && (rep.Ticket.ID != 0 || d.Admit == nil) {
		for name := range h {
			if strings.HasPrefix(name, dataPrefix) {
				delete(h, name)
			}
		}
		resp.Body = &answerBody{ctx: ctx, inner: resp.Body, node: d.Node}
		return resp, rep, nil
	}
	if err := resp.Body.Close(); err != nil || refused {
		return nil, rep, nil //nolint:nilerr // the body is empty
	}
	if len(h[dataMalformed]) > 0 {
		return nil, rep, fmt.Errorf("node %s: %w", d.Node, msg.ErrMalformed)
	}
	return nil, rep, causeError(d.Node, resp.StatusCode, cause)
}

func causeError(node string, status int, cause []string) error {
	if len(cause) == 0 {
		return nodeUnreachable(node, fmt.Errorf("status %d, and no ticket", status))
	}
	switch cause[0] {
	case causeRefused:
		return fmt.Errorf("node %s: %w", node, msg.ErrEngineRefused)
	case causeReset:
		return fmt.Errorf("node %s: the engine broke off before it answered", node)
	case causeFirstToken:
		return fmt.Errorf("node %s: %w", node, msg.ErrFirstToken)
	default:
		return nodeUnreachable(node, fmt.Errorf("status %d, %q", status, cause[0]))
	}
}

// readReply reads a ticket, or a refusal, from the header of an answer.
func readReply(d *msg.Dispatch, h http.Header) (rep msg.AdmitReply, refused bool) {
	number := func(name string) uint64 {
		if v := h[name]; len(v) == 1 {
			n, err := strconv.ParseUint(v[0], 10, 64)
			if err == nil {
				return n
			}
		}
		return 0
	}
	rep.Epoch, rep.Seq = number(dataEpoch), number(dataSeq)
	if name := h[dataRefused]; len(name) > 0 {
		rep.Refusal = refusalOf(name[0])
		return rep, true
	}
	rep.Ticket = msg.Ticket{
		ID: number(dataTicket), Epoch: rep.Epoch, Incarnation: number(dataInc),
		Seq: rep.Seq, Rank: d.Rank,
	}
	return rep, false
}

// answerBody tells an engine that broke off, which the data port reports by a reset, from a lost connection.
type answerBody struct {
	ctx   context.Context //nolint:containedctx // of the request: its end is not an error of the connection
	inner io.ReadCloser
	node  string
}

func (b *answerBody) Read(p []byte) (int, error) {
	n, err := b.inner.Read(p)
	if err == nil || errors.Is(err, io.EOF) || b.ctx.Err() != nil {
		return n, err
	}
	var reset http2.StreamError
	if !errors.As(err, &reset) {
		err = nodeUnreachable(b.node, err)
	}
	return n, err
}

func (b *answerBody) Close() error { return b.inner.Close() }

// upload is the body of a request to a data port: chain hashes and the engine's body, whose memory belongs to
// the caller of Send. The transport may still read after its round trip has ended, so it reads under a lock,
// and nothing after release.
type upload struct {
	mu         sync.Mutex
	parts      [2][]byte
	isReleased bool
}

var errReleased = errors.New("the request is over")

func (u *upload) size() int { return len(u.parts[0]) + len(u.parts[1]) }

// open returns a reader from the beginning.
func (u *upload) open() (io.ReadCloser, error) { return &uploadReader{upload: u}, nil }

// release ends all reads, so that the memory belongs to the caller again.
func (u *upload) release() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.isReleased, u.parts = true, [2][]byte{}
}

type uploadReader struct {
	upload *upload
	part   int
	at     int // in the part
}

// Read implements io.Reader. It returns io.EOF with the last bytes, so that both are in one HTTP/2 frame.
func (r *uploadReader) Read(p []byte) (n int, err error) {
	u := r.upload
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.isReleased {
		return 0, errReleased
	}
	for r.part < len(u.parts) {
		k := copy(p[n:], u.parts[r.part][r.at:])
		n, r.at = n+k, r.at+k
		if r.at < len(u.parts[r.part]) {
			return n, nil
		}
		r.part, r.at = r.part+1, 0
	}
	return n, io.EOF
}

func (r *uploadReader) Close() error { return nil }
