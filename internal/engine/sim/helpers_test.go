package sim

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/test/parallel"
)

// asEngine makes the test binary be an engine process: TestMain runs Main instead of the tests.
const asEngine = "SIM_TEST_AS_ENGINE"

func TestMain(m *testing.M) {
	if os.Getenv(asEngine) != "" {
		os.Exit(Main(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
	}
	parallel.AtLeast(8) // most of them wait for timeouts of engines
	goleak.VerifyTestMain(m)
}

// client opens a connection per request, so that no idle one outlives its test.
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 60 * time.Second}

func post(t testing.TB, s *Server, path, body string, headers ...string) *http.Response {
	t.Helper()
	return postURL(t, s.URL()+path, body, headers...)
}

func postURL(t testing.TB, url, body string, headers ...string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := client.Do(req)
	require.NoError(t, err)
	return resp
}

// ask posts and returns status and whole body.
func ask(t testing.TB, s *Server, path, body string, headers ...string) (int, string) {
	t.Helper()
	resp := post(t, s, path, body, headers...)
	defer func() { _ = resp.Body.Close() }()
	b, _ := io.ReadAll(resp.Body) // a cut stream is an error that some tests want
	return resp.StatusCode, string(b)
}

func get(t testing.TB, s *Server, path string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL()+path, nil)
	require.NoError(t, err)
	resp, err := client.Do(req)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(b)
}

func eventually(t testing.TB, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, 30*time.Second, 2*time.Millisecond)
}

// tryAsk is ask for goroutines: the body as far as it came, or the error.
func tryAsk(url, body string) string {
	resp, err := client.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		return err.Error()
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return string(b) + err.Error()
	}
	return string(b)
}

// startServer is New, Listen and Serve in the background. Close it.
func startServer(ctx context.Context, cfg Config) (*Server, error) {
	s, err := New(cfg)
	if err != nil {
		return nil, err
	}
	if err := s.Listen(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	s.wg.Go(func() { _ = s.Serve() })
	return s, nil
}

// startGroup starts n ranks of a lockstep group; cfg.RPCAddr is their meeting point.
func startGroup(ctx context.Context, cfg Config, n int) ([]*Server, error) {
	servers, errs := make([]*Server, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		c := cfg
		c.DPSize, c.DPRank = n, i
		if c.Port != 0 {
			c.Port += i
		}
		wg.Go(func() { servers[i], errs[i] = startServer(ctx, c) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		for _, s := range servers {
			if s != nil {
				err = errors.Join(err, s.Close())
			}
		}
		return nil, err
	}
	return servers, nil
}
