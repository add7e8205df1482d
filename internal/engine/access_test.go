package engine

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
)

// TestAccess asks an engine behind a path of an https address, with a CA and an API key of its own. A key
// file that changes is read again.
func TestAccess(t *testing.T) {
	want := "one"
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Authorization") != "Bearer "+want:
			w.WriteHeader(http.StatusUnauthorized)
		case r.URL.Path != "/serve/llm/v1/models":
			w.WriteHeader(http.StatusNotFound)
		default:
			_, _ = w.Write([]byte(`{"data": [{"id": "m"}]}`))
		}
	}))
	defer srv.Close()
	dir := t.TempDir()
	ca, key := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "key")
	block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
	require.NoError(t, os.WriteFile(ca, block, 0o600))
	require.NoError(t, os.WriteFile(key, []byte("one\n"), 0o600))
	rt := NewTransport()
	defer rt.CloseIdleConnections()
	ask := func(access Credentials) error {
		_, err := NewClient(srv.URL+"/serve/llm/", Addressing{}, access, rt).Models(t.Context())
		return err
	}
	a := &app.Application{Engine: app.Engine{APIKeyFile: key, TLS: &app.EngineTLS{CA: ca}}}
	access, err := AccessTo(a)
	require.NoError(t, err)
	require.NoError(t, ask(access))
	assert.Equal(t, "one", access.ClientKey())

	require.NoError(t, os.WriteFile(key, []byte(""), 0o600)) // it is being written
	access.looked = time.Time{}
	assert.Equal(t, "one", access.Key())
	require.NoError(t, os.WriteFile(key, []byte("two,longer"), 0o600))
	want = "two,longer"
	access.looked = time.Time{}
	require.NoError(t, ask(access))

	rt.CloseIdleConnections()
	for name, want := range map[string]string{"example.com": "", "other.test": "not other.test"} {
		rt.CloseIdleConnections()
		named, err := AccessTo(a)
		require.NoError(t, err)
		named.Expect(name)
		if err = ask(named); want == "" {
			require.NoError(t, err, "the certificate is for this name")
		} else {
			require.ErrorContains(t, err, want)
		}
	}
	rt.CloseIdleConnections()
	a.Engine.TLS = nil
	strict, err := AccessTo(a)
	require.NoError(t, err)
	require.ErrorContains(t, ask(strict), "certificate")
	a.Engine.TLS = &app.EngineTLS{InsecureSkipVerify: true}
	lax, err := AccessTo(a)
	require.NoError(t, err)
	require.NoError(t, ask(lax))
}

// TestNoAccess names the key of app.yaml that is at fault, and never the API key.
func TestNoAccess(t *testing.T) {
	dir := t.TempDir()
	two := filepath.Join(dir, "two")
	require.NoError(t, os.WriteFile(two, []byte("secret\nsecond"), 0o600))
	t.Setenv("DPSERVE_TEST_KEY", "has blanks")
	for want, e := range map[string]app.Engine{
		"engine.api_key_file: open":                  {APIKeyFile: filepath.Join(dir, "none")},
		"has more than one line":                     {APIKeyFile: two},
		"engine.api_key_env: DPSERVE_TEST_KEY is":    {APIKeyEnv: "DPSERVE_TEST_KEY"},
		"engine.api_key_env: DPSERVE_TEST_NONE is":   {APIKeyEnv: "DPSERVE_TEST_NONE"},
		"engine.tls.ca: open":                        {TLS: &app.EngineTLS{CA: filepath.Join(dir, "none")}},
		"engine.tls.ca: " + two + " has no certific": {TLS: &app.EngineTLS{CA: two}},
	} {
		_, err := AccessTo(&app.Application{Engine: e})
		require.ErrorContains(t, err, want)
		assert.NotContains(t, err.Error(), "secret")
	}
	launched := app.Application{Engine: app.Engine{Args: app.Args{{Name: "api-key", Value: []any{"k", "l"}}}}}
	access, err := AccessTo(&launched)
	require.NoError(t, err)
	assert.Equal(t, "k", access.Key())
	assert.Empty(t, access.ClientKey(), "its clients bring it")
}
