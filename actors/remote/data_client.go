package remote

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

// dataHost stands where HTTP wants a host: the transport knows whom it talks to.
const dataHost = "data.dpserve"

// DataClient sends requests to the ranks of other nodes. Safe for concurrent use.
type DataClient struct {
	transport func(node string) (http.RoundTripper, error)
	hashes    sync.Pool // *[]byte
}

// NewDataClient makes a client. transport gives the way to a node's data port, over HTTP/2: the same one as long as the node is
// where it was, without waiting for it.
func NewDataClient(transport func(node string) (http.RoundTripper, error)) *DataClient {
	c := &DataClient{transport: transport}
	c.hashes.New = func() any { return new([]byte) }
	return c
}

// Send asks for a ticket and, with it, for an answer: it returns when the engine's header is there. d's memory is the caller's
// again then. Without an error either reply refuses, or it holds the ticket and resp is the engine's answer, whose body the caller
// closes. With an error there is no answer; if reply holds a ticket, it is the caller's to give back. Errors: those of msg.Dispatch;
// others are an engine that broke off. A body that ends with msg.ErrUnreachable lost its node, not its engine.
//
// A request that is given up (ctx) before its answer has begun leaves no ticket behind: the other side gives it back.
func (c *DataClient) Send(ctx context.Context, d *msg.Dispatch) (resp *http.Response, reply msg.AdmitReply, err error) {
	way, err := c.transport(d.Node)
	if err != nil {
		return nil, reply, unreachable(d.Node, err)
	}
	u, mem := c.upload(d)
	resp, err = way.RoundTrip(u.request(ctx, d))
	u.release()
	c.hashes.Put(mem)
	if err != nil {
		return nil, reply, unreachable(d.Node, err)
	}
	return answered(ctx, d, resp)
}

func (c *DataClient) upload(d *msg.Dispatch) (u *upload, mem *[]byte) {
	mem, _ = c.hashes.Get().(*[]byte)
	*mem = (*mem)[:0]
	if d.Admit != nil {
		*mem = appendBlocks(*mem, d.Admit.Blocks)
	}
	return &upload{parts: [2][]byte{*mem, d.Body}}, mem
}

func unreachable(node string, err error) error {
	return fmt.Errorf("node %s: %w: %w", node, msg.ErrUnreachable, err)
}

func (u *upload) request(ctx context.Context, d *msg.Dispatch) *http.Request {
	path := d.Path
	if path == "" {
		path = holdPath
	}
	r := &http.Request{
		Method: http.MethodPost, URL: &url.URL{Scheme: "http", Host: dataHost, Path: path}, Host: dataHost,
		Proto: "HTTP/2.0", ProtoMajor: 2, Header: writeHead(d, time.Now()), ContentLength: int64(u.size()), Body: http.NoBody,
	}
	if u.size() > 0 {
		r.Body, _ = u.open()
		r.GetBody = u.open // for a connection that was closing: nothing of the request was looked at
	}
	return r.WithContext(ctx)
}

// answered reads what a data port said.
func answered(ctx context.Context, d *msg.Dispatch, resp *http.Response) (*http.Response, msg.AdmitReply, error) {
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
		return nil, rep, nil //nolint:nilerr // it has no body that anybody wants
	}
	if len(h[dataMalformed]) > 0 {
		return nil, rep, fmt.Errorf("node %s: %w", d.Node, msg.ErrMalformed)
	}
	return nil, rep, causeError(d.Node, resp.StatusCode, cause)
}

func causeError(node string, status int, cause []string) error {
	if len(cause) == 0 {
		return unreachable(node, fmt.Errorf("status %d, and no ticket", status))
	}
	switch cause[0] {
	case causeRefused:
		return fmt.Errorf("node %s: %w", node, msg.ErrEngineRefused)
	case causeReset:
		return fmt.Errorf("node %s: the engine broke off before it answered", node)
	case causeFirstToken:
		return fmt.Errorf("node %s: %w", node, msg.ErrFirstToken)
	default:
		return unreachable(node, fmt.Errorf("status %d, %q", status, cause[0]))
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
		rep.RetryAfter = time.Duration(min(number(dataRetryAfter), uint64(time.Hour/time.Millisecond))) * time.Millisecond
		return rep, true
	}
	rep.Ticket = msg.Ticket{ID: number(dataTicket), Epoch: rep.Epoch, Incarnation: number(dataInc), Seq: rep.Seq, Rank: d.Rank}
	return rep, false
}

// answerBody tells an engine that broke off, which the other side says by a reset, from a connection that was lost.
type answerBody struct {
	ctx   context.Context //nolint:containedctx // of the request: its end is no fault of the connection
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
		err = unreachable(b.node, err)
	}
	return n, err
}

func (b *answerBody) Close() error { return b.inner.Close() }
