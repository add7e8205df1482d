package rankleg

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/routing"
)

type access struct {
	key   string
	trust *tls.Config
}

func (a access) Key() string       { return a.key }
func (a access) ClientKey() string { return a.key }
func (a access) TLS() *tls.Config  { return a.trust }

// TestAccessOfClients: they reach an engine behind a path, over TLS with a CA of its own, with the engine's
// key in place of what the client has sent; without a key of the application the client's stays.
func TestAccessOfClients(t *testing.T) {
	seen := make(chan string, 1)
	srv := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		seen <- r.URL.Path + " " + r.Header.Get("Authorization")
	}))
	defer srv.Close()
	own := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: x509.NewCertPool()}
	own.RootCAs.AddCert(srv.Certificate())
	n := NewNear(Timers{Dial: 5 * time.Second, IdleOwned: time.Minute, IdleAttached: time.Second}, nil, nil)
	defer n.Close()
	ask := func(a msg.Access) error {
		rank, err := NewRank(&msg.Record{Rank: routing.ID(0, 0), Snapshot: &msg.Snapshot{
			Target: msg.Target{URL: srv.URL + "/openai/", Access: a},
		}})
		require.NoError(t, err)
		h := http.Header{"Authorization": {"Bearer client"}}
		q := &Request{Rank: rank, Route: openai.Chat, Header: h, Body: []byte("{}")}
		resp, _, err := n.Ask(t.Context(), q)
		if err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			require.NoError(t, resp.Body.Close())
		}
		assert.Equal(t, "Bearer client", h.Get("Authorization"), "other attempts read the header")
		return err
	}
	require.NoError(t, ask(access{key: "engine", trust: own}))
	assert.Equal(t, "/openai/v1/chat/completions Bearer engine", <-seen)
	require.NoError(t, ask(access{trust: own}))
	assert.Equal(t, "/openai/v1/chat/completions Bearer client", <-seen)
	require.Error(t, ask(nil), "the machine does not know the CA")
}
