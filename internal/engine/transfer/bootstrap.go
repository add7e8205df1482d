package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/internal/app"
)

// Query is a request that the caller sends to a prefill rank's bootstrap server before the rank gets its
// first pair after each start.
type Query struct {
	Method, URL string
	Timeout     time.Duration
}

// Bootstrapper is a Transfer whose prefill ranks have a bootstrap server.
type Bootstrapper interface {
	// Query is the question to the server at address, scheme://host:port.
	Query(address string) (Query, error)
	// ReadPeer reads the answer for the rank of that number in its group.
	ReadPeer(address string, rank, status int, answer []byte) (Peer, error)
}

// The reasons why a bootstrap server's answer gives no Peer.
var (
	// ErrNotRegistered: not all ranks of the prefill group have registered yet. The caller asks again.
	ErrNotRegistered = errors.New("the prefill group has not registered all its ranks yet")
	// ErrBootstrap: the answer is none of this transfer's.
	ErrBootstrap = errors.New("the bootstrap server's answer cannot be used")
)

const (
	// maxBootstrap is the largest answer of a bootstrap server that is read, in bytes.
	maxBootstrap = 1 << 20
	// bootstrapTimeout is for one query; the servers answer from memory.
	bootstrapTimeout = 5 * time.Second
)

// NewBootstrapClient makes the client for bootstrap servers. They are asked once per start of a prefill rank,
// so it keeps no connection. dial nil is TCP.
func NewBootstrapClient(
	dial func(ctx context.Context, network, address string) (net.Conn, error),
) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext: dial, DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// AskPeer asks the bootstrap server at address for the prefill rank of that number in its group.
func AskPeer(ctx context.Context, c *http.Client, b Bootstrapper, address string, rank int) (
	peer Peer, err error,
) {
	q, err := b.Query(address)
	if err != nil {
		return peer, err
	}
	ctx, cancel := context.WithTimeout(ctx, q.Timeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, q.Method, q.URL, http.NoBody)
	if err != nil {
		return peer, err
	}
	resp, err := c.Do(r)
	if err != nil {
		return peer, fmt.Errorf("bootstrap server: %w", err)
	}
	defer func() { _ = resp.Body.Close() }() // it was read
	answer, err := io.ReadAll(io.LimitReader(resp.Body, MaxAnswer))
	if err != nil {
		return peer, fmt.Errorf("bootstrap server: %w", err)
	}
	return b.ReadPeer(address, rank, resp.StatusCode, answer)
}

// PeerOfFile is what the file says of the pushing engine of an attached prefill rank; ok is false if that is
// not enough.
func PeerOfFile(a *app.Application, group, rank int) (peer Peer, ok bool, err error) {
	r := a.Engine.Rank(group, rank)
	if r == nil || r.PD == nil || r.PD.EngineID == "" || r.PD.SideChannel == "" {
		return peer, false, nil
	}
	host, text, err := net.SplitHostPort(r.PD.SideChannel)
	if err == nil {
		peer = Peer{EngineID: r.PD.EngineID, Host: host, TPSize: max(r.PD.TPSize, 1), PPSize: 1}
		peer.Port, err = strconv.Atoi(text)
	}
	if err != nil {
		return peer, false, fmt.Errorf("side_channel: %w", err)
	}
	return peer, true, nil
}

// bootstrapURL reads the address of a bootstrap server.
func bootstrapURL(transfer, address string) (u *url.URL, port int, err error) {
	if u, err = url.Parse(address); err == nil {
		port, err = strconv.Atoi(u.Port())
	}
	if err != nil || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https" || port <= 0 ||
		port > maxPort || u.Path != "" && u.Path != "/" {
		return nil, 0, fmt.Errorf("%w: write scheme://host:port", incomplete(transfer, "bootstrap"))
	}
	return u, port, nil
}

// bootstrapQuery is a GET of path at the server at address.
func bootstrapQuery(transfer, address, path string) (Query, error) {
	u, _, err := bootstrapURL(transfer, address)
	if err != nil {
		return Query{}, err
	}
	return Query{
		Method: http.MethodGet, URL: u.Scheme + "://" + u.Host + path, Timeout: bootstrapTimeout,
	}, nil
}

// checkStatus is the fault of an answer of another status than 200, or of one that is too large.
func checkStatus(status int, answer []byte) error {
	switch {
	case status == http.StatusServiceUnavailable:
		return ErrNotRegistered
	case status != http.StatusOK:
		return fmt.Errorf("%w: status %d", ErrBootstrap, status)
	case len(answer) > maxBootstrap:
		return fmt.Errorf("%w: more than %d bytes", ErrBootstrap, maxBootstrap)
	}
	return nil
}
