package tracing

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Traces are off unless the environment names a collector, and switches nothing off. Off, they cost nothing.
func TestTracesAreOffUnlessAskedFor(t *testing.T) {
	const endpoint, traces = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
	for _, c := range []struct {
		variables map[string]string
		isOn      bool
	}{
		{nil, false},
		{map[string]string{"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_EXPORTER": "otlp"}, false},
		{map[string]string{endpoint: "http://127.0.0.1:1"}, true},
		{map[string]string{traces: "http://127.0.0.1:1/v1/traces"}, true},
		{map[string]string{endpoint: "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}, false},
		{map[string]string{endpoint: "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "TRUE"}, false},
		{map[string]string{endpoint: "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, false},
	} {
		t.Run("", func(t *testing.T) {
			for name, value := range c.variables {
				t.Setenv(name, value)
			}
			tracer := FromEnvironment(t.Context(), Config{Log: slog.New(slog.DiscardHandler)})
			assert.Equal(t, c.isOn, tracer != nil, c.variables)
			require.NoError(t, tracer.Close(t.Context()))
		})
	}
	header, end, legEnd := http.Header{}, &RequestEnd{}, &LegEnd{}
	assert.Zero(t, testing.AllocsPerRun(10, func() {
		request := (*Tracer)(nil).Begin(header, "chat", time.Time{})
		request.Waited(time.Time{})
		leg := request.BeginLeg("leg", time.Time{})
		leg.Header(header)
		leg.End(legEnd)
		request.End(end)
	}))
}

// stuckExporter holds every batch until it is freed.
type stuckExporter struct{ free chan struct{} }

func (e stuckExporter) ExportSpans(context.Context, []sdktrace.ReadOnlySpan) error {
	<-e.free
	return nil
}

func (stuckExporter) Shutdown(context.Context) error { return nil }

// A collector that does not answer delays nothing: spans beyond the bound are dropped and counted.
func TestSpansThatAreTooManyAreDropped(t *testing.T) {
	var mu sync.Mutex
	counts := map[string]int{}
	exporter := stuckExporter{make(chan struct{})}
	count := func(result string, spans int) {
		mu.Lock()
		defer mu.Unlock()
		counts[result] += spans
	}
	tracer := New(t.Context(), exporter, Config{Log: slog.New(slog.DiscardHandler), Count: count})
	for range maxQueued + 100 {
		tracer.Begin(http.Header{}, "chat", time.Now()).End(&RequestEnd{})
	}
	close(exporter.free)
	require.NoError(t, tracer.Close(t.Context()))
	assert.Equal(t, map[string]int{Exported: maxQueued, Dropped: 100}, counts)
}
