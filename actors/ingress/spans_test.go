package ingress

import (
	"encoding/hex"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/dpserve/dpserve/internal/tracing"
)

// spanCollector is an OTLP collector.
type spanCollector struct {
	mu    sync.Mutex
	spans map[string]*tracepb.Span // by name, and by number where there are several
	texts string                   // everything that it got
}

func (c *spanCollector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var request collector.ExportTraceServiceRequest
	if err != nil || r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &request) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.texts += request.String()
	for _, resource := range request.ResourceSpans {
		for _, scope := range resource.ScopeSpans {
			for _, s := range scope.Spans {
				name := s.Name
				for c.spans[name] != nil {
					name += "+"
				}
				c.spans[name] = s
			}
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// attributesOf are the texts and numbers of a span's attributes.
func attributesOf(s *tracepb.Span) map[string]any {
	out := map[string]any{}
	for _, a := range s.Attributes {
		if out[a.Key] = a.Value.GetStringValue(); out[a.Key] == "" {
			out[a.Key] = a.Value.GetIntValue()
		}
	}
	return out
}

// LG68: A collector gets the spans of a request whose first engine dies: one for the request below the
// client's, and one for each leg, of which the engines hear. No span has a word of the prompt, the answer or
// the key.
func TestTraceOfARequest(t *testing.T) {
	spans := &spanCollector{spans: map[string]*tracepb.Span{}}
	server := httptest.NewServer(spans)
	defer server.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.URL)
	t.Setenv("OTEL_SERVICE_NAME", "gateway")
	counts := map[string]int{}
	tracer := tracing.FromEnvironment(t.Context(), tracing.Config{
		Node: "n1", Count: func(result string, n int) { counts[result] += n },
		Log: slog.New(slog.DiscardHandler),
	})
	require.NotNil(t, tracer)
	var parents []string // of the engines' spans
	text := strings.Replace(textChunk, `"a"`, `"secret"`, 1)
	answer := sends(roleChunk, text, stopChunk, usageChunk, doneEvent)
	engine := func(w http.ResponseWriter, r *http.Request) {
		spans.mu.Lock()
		parents = append(parents, r.Header.Get("Traceparent"))
		isFirst := len(parents) == 1
		spans.mu.Unlock()
		if isFirst {
			resets(w, r)
			return
		}
		answer(w, r)
	}
	g := newRig(t, options{engines: []http.HandlerFunc{engine, engine}, tracer: tracer})
	const trace, client = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	prompt := strings.Replace(streamBody, "hi", "the secret prompt", 1)
	got := g.post("/v1/chat/completions", prompt, "Traceparent", "00-"+trace+"-"+client+"-01",
		"Authorization", "Bearer sk-secret", "X-Request-Id", "r-1")
	require.Equal(t, http.StatusOK, got.status, got.body)
	eventually(t, func() bool { return g.in.inflight.Load() == 0 }, "the request is over")
	require.NoError(t, tracer.Close(t.Context()))
	assert.Equal(t, map[string]int{tracing.Exported: 3}, counts)

	root, first, second := spans.spans["chat"], spans.spans["leg"], spans.spans["leg+"]
	require.NotNil(t, root, spans.texts)
	require.NotNil(t, second, spans.texts)
	assert.Equal(t, client, hex.EncodeToString(root.ParentSpanId))
	var legs []string
	for _, leg := range []*tracepb.Span{first, second} {
		assert.Equal(t, root.SpanId, leg.ParentSpanId)
		legs = append(legs, "00-"+trace+"-"+hex.EncodeToString(leg.SpanId)+"-01")
	}
	assert.Equal(t, legs, parents)
	attributes := attributesOf(root)
	assert.Equal(t, int64(http.StatusOK), attributes["http.response.status_code"])
	assert.Equal(t, "demo", attributes["dpserve.app"])
	assert.Equal(t, "r-1", attributes["dpserve.request_id"])
	assert.Equal(t, "reset", attributesOf(first)["dpserve.cause"])
	assert.Equal(t, tracepb.Status_STATUS_CODE_ERROR, first.Status.Code)
	assert.Equal(t, "ok", attributesOf(second)["dpserve.cause"])
	require.Len(t, second.Events, 1)
	assert.Equal(t, "first token", second.Events[0].Name)
	assert.Contains(t, spans.texts, "gateway")
	assert.NotContains(t, spans.texts, "secret")
}
