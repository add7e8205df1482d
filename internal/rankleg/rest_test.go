package rankleg

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/enginehttp"
)

// rest is what a client still sends.
type rest struct {
	io.Reader
	size    int64
	isBegun bool
}

func (r *rest) Read(p []byte) (int, error) {
	r.isBegun = true
	return r.Reader.Read(p)
}

func (r *rest) Size() int64   { return r.size }
func (r *rest) IsBegun() bool { return r.isBegun }
func (r *rest) End()          {}

// RP53: it follows the beginning in the same message, over TLS as well; an engine that is told its rank in
// the body hears it in the beginning. The connection is used again only if all of it came.
func TestRestOfABody(t *testing.T) {
	type seen struct {
		length int64
		body   string
		err    error
	}
	got := make(chan seen, 1)
	engine := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		got <- seen{r.ContentLength, string(body), err}
	})
	plain, secure := httptest.NewServer(engine), httptest.NewTLSServer(engine)
	defer plain.Close()
	defer secure.Close()
	l := openEngines(t).attached
	l.trust = &tls.Config{RootCAs: x509.NewCertPool()}
	l.trust.RootCAs.AddCert(secure.Certificate())
	q := &Request{
		Body: []byte(` {"a":1,"b":[`), IsHeld: true, Rest: &rest{}, Header: http.Header{},
		Rank: &Rank{Target: msg.Target{Addressing: "body", Selector: 3}},
	}
	_, head := q.addressed()
	tail := strings.Repeat("1,", 100<<10) + "1]}"
	for _, base := range []string{plain.URL, secure.URL} {
		o := &engineRequest{
			URL: parsed(t, base+"/x"), Header: http.Header{}, Body: head,
			rest: &rest{Reader: iotest.HalfReader(strings.NewReader(tail)), size: int64(len(tail))},
		}
		resp, err := l.send(t.Context(), o)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		want := ` {"routed_dp_rank":3,"a":1,"b":[` + tail
		assert.Equal(t, seen{int64(len(want)), want, nil}, <-got)

		o.Body, o.rest = head, &rest{Reader: iotest.ErrReader(errors.New("client gone")), size: 5}
		_, err = l.send(t.Context(), o)
		require.ErrorContains(t, err, "client gone")
		require.Error(t, (<-got).err, "the engine gets no whole request")
		require.ErrorIs(t, err, enginehttp.ErrRest)
	}
}

// An engine with several ranks hears which of them is meant in a header, in the body, or for SGLang's own
// route in both.
func TestTheRankIsNamed(t *testing.T) {
	for _, test := range []struct {
		by           string
		route        openai.Route
		isPlain      bool
		header, body string
	}{
		{"header", openai.Completions, false, "3", `{"a":1}`},
		{"header", openai.Generate, false, "3", `{"a":1,"routed_dp_rank":3}`},
		{"body", openai.Completions, false, "", `{"a":1,"routed_dp_rank":3}`},
		{"body", openai.Transcriptions, true, "", `{"a":1}`},
		{"url", openai.Generate, false, "", `{"a":1}`},
	} {
		q := &Request{
			Route: test.route, Body: []byte(`{"a":1}`), IsPlain: test.isPlain, Header: http.Header{},
			IsHeld: true, Rank: &Rank{Target: msg.Target{Addressing: test.by, Selector: 3}},
		}
		header, body := q.addressed()
		assert.Equal(t, test.header, header.Get("X-Data-Parallel-Rank"), test)
		assert.Equal(t, test.body, string(body), test)
		assert.Empty(t, q.Header, "other attempts read it")
	}
}
