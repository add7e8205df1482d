package attach_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/internal/engine/attach"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/test/ports"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func engine(t *testing.T, answers map[string]string) string {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a, ok := answers[r.URL.Path]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		_, _ = io.WriteString(w, a)
	}))
	t.Cleanup(srv.Close)
	return srv.URL
}

func TestProbeFindsTheFamily(t *testing.T) {
	cases := []struct {
		name    string
		answers map[string]string
		want    attach.Found
	}{
		{"vllm", map[string]string{
			"/v1/models": `{"data":[{"id":"lora","owned_by":"vllm","parent":"m"},{"id":"m",` +
				`"owned_by":"vllm","parent":null,"max_model_len":2048}]}`,
			"/version": `{"version":"0.32.0"}`,
		}, attach.Found{Family: "vllm", Models: []string{"m"}, Version: "0.32.0"}},
		{"sglang", map[string]string{"/v1/models": `{"data":[{"id":"m","owned_by":"sglang",` +
			`"max_model_len":8}]}`}, attach.Found{Family: "sglang", Models: []string{"m"}, MaxModelLen: 8}},
		{
			"other",
			map[string]string{"/v1/models": `{"data":[{"id":"m","owned_by":"me"}]}`},
			attach.Found{Family: "openai", Models: []string{"m"}},
		},
		{
			"renamed owner",
			map[string]string{
				"/v1/models": `{"data":[{"id":"m"}]}`,
				"/version":   `{"version":"1"}`,
			},
			attach.Found{Family: "vllm", Models: []string{"m"}, Version: "1"},
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			url := engine(t, c.answers)
			got, err := attach.Probe(t.Context(), url, nil)
			require.NoError(t, err)
			c.want.URL = url
			assert.Equal(t, c.want, got)
		})
	}
}

func TestProbeExplainsWhatIsWrong(t *testing.T) {
	ln, err := net.Listen("tcp", ports.TakeAddr(t))
	require.NoError(t, err)
	silent := "http://" + ln.Addr().String()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = attach.Probe(ctx, silent, nil)
	explained(t, err, silent+" does not answer", "curl")
	require.NoError(t, ln.Close())
	_, err = attach.Probe(t.Context(), silent, nil)
	explained(t, err, "nothing listens at "+silent, "start the engine")

	url := engine(t, nil)
	_, err = attach.Probe(t.Context(), url, nil)
	explained(t, err, url+" is no OpenAI-compatible engine: /v1/models answered 404", "ends before /v1")
	url = engine(t, map[string]string{"/v1/models": "hello"})
	_, err = attach.Probe(t.Context(), url, nil)
	explained(t, err, "cannot probe "+url, "curl")
	url = engine(t, map[string]string{"/v1/models": `{"data":[{"id":"lora","parent":"m"}]}`})
	_, err = attach.Probe(t.Context(), url, nil)
	explained(t, err, url+" lists adapters alone", "base model")

	locked := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusUnauthorized)
	}))
	defer locked.Close()
	_, err = attach.Probe(t.Context(), locked.URL, nil)
	explained(t, err, locked.URL+" asks for an API key", "--engine-api-key-env")
}

func explained(t *testing.T, err error, message, hint string) {
	t.Helper()
	var p *problem.Error
	require.ErrorAs(t, err, &p)
	assert.Equal(t, problem.Unavailable, p.Code)
	assert.Contains(t, p.Message, message)
	assert.Contains(t, p.Hint, hint)
}
