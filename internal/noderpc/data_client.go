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
	"github.com/dpserve/dpserve/internal/rankleg"
)

// dataHost fills the host of the URL: the transport already has the node.
const dataHost = "data.dpserve"

// DataClient sends requests to the ranks of other nodes. Safe for concurrent use.
type DataClient struct {
	transport func(node string) (http.RoundTripper, error)
	hashes    sync.Pool // *[]byte
}

var _ rankleg.Asker = (*DataClient)(nil)

// NewDataClient makes a client. transport returns the way to a node's data port without waiting
// for the node: the same one until the node moves.
func NewDataClient(transport func(node string) (http.RoundTripper, error)) *DataClient {
	c := &DataClient{transport: transport}
	c.hashes.New = func() any { return new([]byte) }
	return c
}

// Ask implements rankleg.Asker. If ctx ends before the answer has begun, the data port returns the ticket.
func (c *DataClient) Ask(ctx context.Context, q *rankleg.Request) (*http.Response, msg.AdmitReply, error) {
	if err := q.Guard.Send(); err != nil {
		return nil, msg.AdmitReply{}, err
	}
	path := q.Route.Path()
	if q.Reset {
		path = resetPath
	}
	resp, reply, err := c.roundTrip(ctx, q, path)
	if reply.Ticket.ID != 0 {
		q.OnTicket(&reply.Ticket)
	}
	return resp, reply, err
}

// Reserve implements rankleg.Asker. The ticket lives as long as the stream of the request to the data port.
func (c *DataClient) Reserve(ctx context.Context, q *rankleg.Request) (msg.AdmitReply, error) {
	life, cancel := context.WithCancel(q.Admit.Ctx)
	stop := context.AfterFunc(ctx, cancel)
	resp, reply, err := c.roundTrip(life, q, holdPath) //nolint:contextcheck // the ticket outlives ctx
	isInTime := stop()
	if err == nil && reply.Refusal == msg.Granted && isInTime {
		context.AfterFunc(life, func() { closeAnswer(resp) }) //nolint:contextcheck // as above
		q.OnTicket(&reply.Ticket)
		return reply, nil
	}
	cancel()
	if resp != nil {
		closeAnswer(resp)
		err = context.Cause(ctx)
	}
	return reply, err
}

// roundTrip sends the request to the rank's node. When it returns, q's memory belongs to the caller again.
func (c *DataClient) roundTrip(
	ctx context.Context, q *rankleg.Request, path string,
) (resp *http.Response, reply msg.AdmitReply, err error) {
	transport, err := c.transport(q.Rank.Node)
	if err != nil {
		return nil, reply, nodeUnreachable(q.Rank.Node, err)
	}
	u, mem := c.newUpload(q)
	resp, err = transport.RoundTrip(u.newRequest(ctx, q, path, servesHTTP1(transport)))
	u.release()
	c.hashes.Put(mem)
	if err != nil {
		return nil, reply, nodeUnreachable(q.Rank.Node, err)
	}
	return readAnswer(ctx, q, resp)
}

func (c *DataClient) newUpload(q *rankleg.Request) (u *upload, mem *[]byte) {
	mem, _ = c.hashes.Get().(*[]byte)
	*mem = (*mem)[:0]
	if q.Admit != nil {
		*mem = appendBlocks(*mem, q.Admit.Blocks)
	}
	return &upload{parts: [2][]byte{*mem, q.Body}}, mem
}

func nodeUnreachable(node string, err error) error {
	return fmt.Errorf("node %s: %w: %w", node, rankleg.ErrUnreachable, err)
}

// servesHTTP1 reports that the node is known to serve HTTP/1.1, and so to read dataFields.
func servesHTTP1(transport http.RoundTripper) bool {
	t, ok := transport.(interface{ ServesHTTP1() bool })
	return ok && t.ServesHTTP1()
}

func (u *upload) newRequest(
	ctx context.Context, q *rankleg.Request, path string, isPacked bool,
) *http.Request {
	r := &http.Request{
		Method: http.MethodPost, URL: &url.URL{Scheme: "http", Host: dataHost, Path: path}, Host: dataHost,
		Proto: "HTTP/2.0", ProtoMajor: 2, Header: writeHead(q, path == holdPath, isPacked, time.Now()),
		ContentLength: int64(u.size()), Body: http.NoBody,
	}
	if u.size() > 0 {
		r.Body, _ = u.open()
		r.GetBody = u.open // for a connection that was closing: the node has read nothing of the request
	}
	if q.Rest != nil {
		r.Body, r.GetBody = io.NopCloser(io.MultiReader(r.Body, q.Rest)), nil
		r.ContentLength += q.Rest.Size()
	}
	return r.WithContext(ctx)
}

// readAnswer reads the answer of a data port.
func readAnswer(
	ctx context.Context, q *rankleg.Request, resp *http.Response,
) (*http.Response, msg.AdmitReply, error) {
	h := resp.Header
	rep, refused := readReply(q, h)
	cause := h[dataCause]
	q.Resent = len(h[dataResent]) > 0
	if !refused && len(cause) == 0 && (rep.Ticket.ID != 0 || q.Admit == nil) {
		if err := setEngineHeader(resp); err != nil {
			closeAnswer(resp)
			return nil, rep, nodeUnreachable(q.Rank.Node, err)
		}
		resp.Body = &answerBody{ctx: ctx, resp: resp, inner: resp.Body, node: q.Rank.Node}
		return resp, rep, nil
	}
	if err := resp.Body.Close(); err != nil || refused {
		return nil, rep, nil //nolint:nilerr // the body is empty
	}
	if len(h[dataMalformed]) > 0 {
		return nil, rep, fmt.Errorf("node %s: %w", q.Rank.Node, rankleg.ErrMalformed)
	}
	return nil, rep, causeError(q.Rank.Node, resp.StatusCode, cause)
}

// setEngineHeader gives an answer the header that the engine sent. That of the data port is not changed,
// because answers may share it.
func setEngineHeader(resp *http.Response) (err error) {
	h := make(http.Header, len(resp.Header))
	for name, values := range resp.Header {
		if !strings.HasPrefix(name, dataPrefix) {
			h[name] = values
		}
	}
	if length := resp.Header[dataLength]; len(length) > 0 {
		h["Content-Length"] = length
		resp.ContentLength, err = strconv.ParseInt(length[0], 10, 64)
	}
	resp.Header = h
	return err
}

func causeError(node string, status int, cause []string) error {
	if len(cause) == 0 {
		return nodeUnreachable(node, fmt.Errorf("status %d, and no ticket", status))
	}
	switch cause[0] {
	case causeRefused:
		return fmt.Errorf("node %s: %w", node, rankleg.ErrEngineRefused)
	case causeNoFiles:
		return fmt.Errorf("node %s: %w", node, rankleg.ErrNoFiles)
	case causeReset:
		return fmt.Errorf("node %s: the engine broke off before it answered", node)
	case causeFirstToken:
		return fmt.Errorf("node %s: %w", node, rankleg.ErrFirstToken)
	case causeTooLate:
		return fmt.Errorf("node %s: %w", node, rankleg.ErrTooLate)
	case causeNotResent:
		return fmt.Errorf("node %s: %w", node, rankleg.ErrNotResent)
	default:
		return nodeUnreachable(node, fmt.Errorf("status %d, %q", status, cause[0]))
	}
}

// readReply reads a ticket, or a refusal, from the header of an answer.
func readReply(q *rankleg.Request, h http.Header) (rep msg.AdmitReply, refused bool) {
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
		ID: number(dataTicket), Epoch: rep.Epoch, Incarnation: number(dataInc), Seq: rep.Seq, Rank: q.Rank.ID,
	}
	return rep, false
}

// answerBody tells an engine that broke off, which the data port reports by a reset or a trailer, from a lost
// connection.
type answerBody struct {
	ctx   context.Context //nolint:containedctx // of the request: its end is not an error of the connection
	resp  *http.Response
	inner io.ReadCloser
	node  string
}

var errBrokeOff = errors.New("the engine broke off")

func (b *answerBody) Read(p []byte) (int, error) {
	n, err := b.inner.Read(p)
	switch {
	case err == nil:
		return n, nil
	case errors.Is(err, io.EOF):
		if len(b.resp.Trailer[dataBroken]) > 0 {
			return n, errBrokeOff
		}
		return n, err
	case b.ctx.Err() != nil:
		return n, context.Cause(b.ctx)
	}
	if _, isReset := errors.AsType[http2.StreamError](err); !isReset {
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

// Read implements io.Reader. It returns io.EOF with the last bytes, so that both are in one frame of HTTP/2.
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
