package noderpc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/enginehttp"
	"github.com/dpserve/dpserve/internal/rankleg"
)

// DataTransport is the way to a node's data port: nodeport.Transport.
type DataTransport interface {
	// Send posts a request and returns when the head of the answer is here. It reads nothing afterwards.
	Send(ctx context.Context, path string, header http.Header, body []byte, g enginehttp.Guard,
	) (*http.Response, error)
	// Cut ends all requests.
	Cut()
}

// DataClient sends requests to the ranks of other nodes. Safe for concurrent use.
type DataClient struct {
	transport func(node string) (DataTransport, error)
	bodies    sync.Pool // *[]byte

	mu     sync.Mutex
	silent map[string]*time.Timer // by node: it runs out when the node's stream is silent
}

var _ rankleg.Asker = (*DataClient)(nil)

// NewDataClient makes a client. transport returns the way to a node's data port without waiting for the node:
// the same one until the node moves.
func NewDataClient(transport func(node string) (DataTransport, error)) *DataClient {
	c := &DataClient{transport: transport, silent: map[string]*time.Timer{}}
	c.bodies.New = func() any { return new([]byte) }
	return c
}

// nodeSilence is how long the stream of a node's ranks may be silent until the requests to the node end. It
// is longer than the time after which the ranks are out of routing, so that a node that is slow or frozen for
// a moment gets its streams back.
const nodeSilence = 8 * time.Second

// Heard notes that the stream of a node's ranks has brought something, by which the client knows that the
// node lives: HTTP/1.1 has no pings.
func (c *DataClient) Heard(node string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t := c.silent[node]; t != nil {
		t.Reset(nodeSilence)
		return
	}
	c.silent[node] = time.AfterFunc(nodeSilence, func() {
		c.mu.Lock()
		delete(c.silent, node)
		c.mu.Unlock()
		if t, err := c.transport(node); err == nil {
			t.Cut()
		}
	})
}

// Ask implements rankleg.Asker. If ctx ends before the answer has begun, the data port returns the ticket.
func (c *DataClient) Ask(ctx context.Context, q *rankleg.Request) (*http.Response, msg.AdmitReply, error) {
	if err := q.Guard.Send(); err != nil {
		return nil, msg.AdmitReply{}, err
	}
	path := q.Route.Path()
	switch {
	case q.Reset:
		path = resetPath
	case q.Target != "":
		path = targetPathOf(q.Route)
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
	mem, _ := c.bodies.Get().(*[]byte)
	defer c.keepBody(mem)
	body, guard := (*mem)[:0], enginehttp.Guard{}
	if q.Admit != nil {
		body = appendBlocks(body, q.Admit.Blocks)
	}
	if large := q.Body; len(large) > maxCopied || q.Rest != nil {
		guard = restOf(large, q.Rest)
	} else {
		body = append(body, large...)
	}
	*mem = body
	header := writeHead(q, path == holdPath, time.Now())
	if resp, err = transport.Send(ctx, path, header, body, guard); err != nil {
		return nil, reply, nodeUnreachable(q.Rank.Node, err)
	}
	return readAnswer(ctx, q, resp)
}

// maxCopied is the size of a body that is sent in one piece with its hashes. It is copied for that.
const maxCopied = 256 << 10

// restOf sends a large body, and what follows it, behind the hashes and without a copy.
func restOf(body []byte, rest rankleg.Rest) enginehttp.Guard {
	g := enginehttp.Guard{Rest: bytes.NewReader(body), RestSize: int64(len(body)), EndRest: func() {}}
	if rest != nil {
		g.Rest, g.EndRest = io.MultiReader(g.Rest, rest), rest.End
		g.RestSize += rest.Size()
	}
	return g
}

func (c *DataClient) keepBody(mem *[]byte) {
	if cap(*mem) <= 2*maxCopied {
		c.bodies.Put(mem)
	}
}

func nodeUnreachable(node string, err error) error {
	return fmt.Errorf("node %s: %w: %w", node, rankleg.ErrUnreachable, err)
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
	case causeBadAnswer:
		return fmt.Errorf("node %s: %w", node, rankleg.ErrMalformed)
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

// answerBody tells an engine that broke off, which the data port reports by a trailer, from a lost
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
	return n, nodeUnreachable(b.node, err)
}

func (b *answerBody) Close() error { return b.inner.Close() }
