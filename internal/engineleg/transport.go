package engineleg

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptrace"
	"time"
)

// transport is the leg on net/http: for TLS, and for large bodies.
type transport struct{ inner *http.Transport }

// newTransport sets what the defaults of net/http get wrong for a relay: no compression (the transport would
// decode answers on its own), and no proxy from the environment (it would see the prompts).
func newTransport(dial Dialer, patience, idle time.Duration) *transport {
	return &transport{&http.Transport{
		DialContext:            dial,
		DisableCompression:     true,
		Proxy:                  nil,
		IdleConnTimeout:        idle,
		MaxIdleConns:           0,
		MaxIdleConnsPerHost:    maxIdle,
		MaxResponseHeaderBytes: maxHead,
		TLSHandshakeTimeout:    patience,
	}}
}

// send gives the body as a bytes.Reader, which the transport knows: it writes header and body in one piece.
// GetBody stays unset, or the transport would resend by itself, uncounted.
func (t *transport) send(ctx context.Context, o *Request) (*http.Response, error) {
	o.reader = bytes.NewReader(o.Body)
	r := http.Request{
		Method: http.MethodPost, URL: o.URL, Host: o.URL.Host, Header: o.Header,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Body: io.NopCloser(o.reader), ContentLength: int64(len(o.Body)),
	}
	return t.inner.RoundTrip(r.WithContext(httptrace.WithClientTrace(ctx, o.trace())))
}
