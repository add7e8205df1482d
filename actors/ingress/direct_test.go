package ingress

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestDirect: only plain URLs go over the own client.
func TestDirect(t *testing.T) {
	for s, want := range map[string]bool{
		"http://127.0.0.1:8000/v1/x": true, "http://[::1]:8000/": true, "http://engine/": true,
		"https://engine/": false, "http://[fe80::1%25eth0]:1/": false, "http://b\u00fccher/": false,
	} {
		u, err := url.Parse(s)
		require.NoError(t, err)
		assert.Equal(t, want, direct(u), s)
	}
}

// TestLegsBySize: small bodies use the own client, large ones the transport, and both keep their connections.
func TestLegsBySize(t *testing.T) {
	seen := make(chan string, 8)
	g := newRig(t, options{engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
		seen <- r.RemoteAddr
		replies(200, wholeAnswer)(w, r)
	}}})
	large := strings.Replace(chatBody, "hi", strings.Repeat("x", maxDirect), 1)
	addrs := map[string]bool{}
	for _, body := range []string{chatBody, large, chatBody, large} {
		a := g.post("/v1/chat/completions", body)
		require.Equal(t, 200, a.status)
		addrs[<-seen] = true
	}
	assert.Len(t, addrs, 2)
	assert.Len(t, g.in.legs.owned.clients, 1)
}

// TestForgottenClients: engines that are gone leave no client behind once another one comes.
func TestForgottenClients(t *testing.T) {
	l := newLegs(Timers{}.withDefaults(), nil)
	defer l.close()
	for _, host := range []string{"a:1", "b:1", "c:1"} {
		first := l.owned.client(host)
		assert.Same(t, first, l.owned.client(host))
		assert.Len(t, l.owned.clients, 1)
	}
}
