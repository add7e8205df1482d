// Package tracing sends traces of requests to an OpenTelemetry collector, by OTLP over HTTP. The standard
// OTEL_ variables switch it on. While it is off there is no Tracer: a nil *Tracer makes nil *Request and
// *Leg, whose methods do nothing. Spans have names, numbers and causes, and nothing of a prompt, an answer or
// a key.
package tracing

import (
	"context"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Bounds of what waits for the collector.
const (
	maxQueued  = 2048            // spans; those beyond are dropped and counted
	maxBatch   = 512             // spans in one request
	closeLimit = 2 * time.Second // of the last request, when the node ends
)

// Tracer makes the spans of a node's requests. Nil: traces are off.
type Tracer struct {
	tracer   trace.Tracer
	provider *sdktrace.TracerProvider
}

// Config is what a Tracer needs besides the OTEL_ variables.
type Config struct {
	Node, Version string
	Count         func(result string, spans int) // by Exported, Failed and Dropped
	Log           *slog.Logger
}

// What became of spans.
const (
	Exported = "exported"
	Failed   = "failed"  // the collector did not take them
	Dropped  = "dropped" // too many waited for it
)

// FromEnvironment makes the Tracer that the OTEL_ variables ask for, nil if they name no endpoint. A variable
// that dpserve cannot follow is logged: it may be meant for other programs.
func FromEnvironment(ctx context.Context, c Config) *Tracer {
	if !isAskedFor() {
		return nil
	}
	protocol := os.Getenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
	if protocol == "" {
		protocol = os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL")
	}
	if protocol != "" && protocol != "http/protobuf" {
		c.Log.Warn("traces are off: dpserve sends them by http/protobuf alone",
			slog.String("protocol", protocol))
		return nil
	}
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		c.Log.Warn("traces are off: the OTEL_ variables cannot be used", slog.String("err", err.Error()))
		return nil
	}
	return New(ctx, exporter, c)
}

func isAskedFor() bool {
	switch exporter := os.Getenv("OTEL_TRACES_EXPORTER"); {
	case exporter != "" && exporter != "otlp", strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true"):
		return false
	}
	return os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" ||
		os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}

// New makes a Tracer over an exporter. The SDK reads the sampler and the name of the service from the
// environment.
func New(ctx context.Context, exporter sdktrace.SpanExporter, c Config) *Tracer {
	service, _ := resource.New(ctx, // an error is about a malformed variable: what is left is used
		resource.WithAttributes(
			attribute.String("service.name", "dpserve"), attribute.String("service.version", c.Version),
			attribute.String("service.instance.id", c.Node),
		), resource.WithTelemetrySDK(), resource.WithFromEnv())
	counted := &countedExporter{SpanExporter: exporter, config: c}
	batches := sdktrace.NewBatchSpanProcessor(counted, sdktrace.WithMaxQueueSize(maxQueued),
		sdktrace.WithMaxExportBatchSize(maxBatch))
	provider := sdktrace.NewTracerProvider(sdktrace.WithResource(service),
		sdktrace.WithSpanProcessor(boundedProcessor{batches, counted}))
	return &Tracer{tracer: provider.Tracer("dpserve"), provider: provider}
}

// Close sends the spans that wait, also when ctx is over: it takes 2 s at most.
func (t *Tracer) Close(ctx context.Context) error {
	if t == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
	defer cancel()
	return t.provider.Shutdown(ctx)
}

// countedExporter counts what becomes of spans, and logs when the collector begins and ceases to refuse them.
type countedExporter struct {
	sdktrace.SpanExporter
	config  Config
	waiting atomic.Int64 // spans in the processor and in the exporter
	fails   bool         // the last request did; the processor makes one at a time
}

// ExportSpans implements sdktrace.SpanExporter.
func (e *countedExporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	err := e.SpanExporter.ExportSpans(ctx, spans)
	e.waiting.Add(-int64(len(spans)))
	result := Exported
	if err != nil {
		result = Failed
	}
	e.config.Count(result, len(spans))
	switch failed := err != nil; {
	case failed && !e.fails:
		e.config.Log.Warn("the collector takes no traces", slog.String("err", err.Error()))
	case !failed && e.fails:
		e.config.Log.Info("the collector takes traces again")
	}
	e.fails = err != nil
	return nil //nolint:nilerr // it is counted and logged, and the SDK would print it as well
}

// boundedProcessor drops and counts the spans that are too many.
type boundedProcessor struct {
	sdktrace.SpanProcessor
	exporter *countedExporter
}

// OnEnd implements sdktrace.SpanProcessor.
func (p boundedProcessor) OnEnd(s sdktrace.ReadOnlySpan) {
	if !s.SpanContext().IsSampled() {
		return
	}
	if p.exporter.waiting.Add(1) > maxQueued {
		p.exporter.waiting.Add(-1)
		p.exporter.config.Count(Dropped, 1)
		return
	}
	p.SpanProcessor.OnEnd(s)
}

// Request is the trace of one request. Nil: traces are off.
type Request struct {
	tracer trace.Tracer
	ctx    context.Context //nolint:containedctx // the parent of the spans
	span   trace.Span
}

// w3c reads and writes traceparent and tracestate.
var w3c propagation.TraceContext

// Begin begins the span of a request, with the name of its route, for example "chat". A client's traceparent
// is its parent.
func (t *Tracer) Begin(header http.Header, route string, at time.Time) *Request {
	if t == nil {
		return nil
	}
	ctx := w3c.Extract(context.Background(), propagation.HeaderCarrier(header))
	ctx, span := t.tracer.Start(ctx, route, trace.WithSpanKind(trace.SpanKindServer), trace.WithTimestamp(at))
	return &Request{tracer: t.tracer, ctx: ctx, span: span}
}

// RequestEnd is how a request has ended.
type RequestEnd struct {
	ID, App                   string
	Code                      int
	FirstByte                 time.Time // zero: none was sent
	Prompt, Cached, Generated int       // tokens
}

// End ends the span of the request.
func (r *Request) End(e *RequestEnd) {
	if r == nil {
		return
	}
	r.span.SetAttributes(
		attribute.String("dpserve.request_id", e.ID), attribute.String("dpserve.app", e.App),
		attribute.Int("http.response.status_code", e.Code),
		attribute.Int("gen_ai.usage.input_tokens", e.Prompt),
		attribute.Int("dpserve.cached_tokens", e.Cached),
		attribute.Int("gen_ai.usage.output_tokens", e.Generated),
	)
	if !e.FirstByte.IsZero() {
		r.span.AddEvent("first byte", trace.WithTimestamp(e.FirstByte))
	}
	if e.Code >= http.StatusInternalServerError {
		r.span.SetStatus(codes.Error, http.StatusText(e.Code))
	}
	r.span.End()
}

// Waited adds a wait in a queue that has just ended.
func (r *Request) Waited(began time.Time) {
	if r == nil {
		return
	}
	_, span := r.tracer.Start(r.ctx, "queue", trace.WithTimestamp(began))
	span.End()
}

// Broke says what became of a stream that broke after its first byte.
func (r *Request) Broke(cause, result string) {
	if r != nil {
		r.span.AddEvent("stream "+result, trace.WithAttributes(attribute.String("dpserve.cause", cause)))
	}
}

// Leg is one dispatch of a request to a rank. Nil: traces are off.
type Leg struct {
	ctx  context.Context //nolint:containedctx // of its span
	span trace.Span
}

// BeginLeg begins the span of a leg, for example "leg" or "prefill leg".
func (r *Request) BeginLeg(name string, at time.Time) *Leg {
	if r == nil {
		return nil
	}
	ctx, span := r.tracer.Start(r.ctx, name, trace.WithSpanKind(trace.SpanKindClient),
		trace.WithTimestamp(at))
	return &Leg{ctx, span}
}

// Header is the header for the leg's engine: h, and the leg's span as the parent of the engine's spans.
func (l *Leg) Header(h http.Header) http.Header {
	if l == nil {
		return h
	}
	out := make(http.Header, len(h)+2)
	for name, values := range h {
		out[name] = values
	}
	w3c.Inject(l.ctx, propagation.HeaderCarrier(out))
	return out
}

// LegEnd is how a leg has ended.
type LegEnd struct {
	Pool, Unit, Node string
	Group, Rank      int
	Number           int    // of the leg within the request, ascending
	Cause            string // what ended it
	Failed           bool
	FirstToken       time.Time // zero: none came
}

// End ends the span of the leg.
func (l *Leg) End(e *LegEnd) {
	if l == nil {
		return
	}
	l.span.SetAttributes(
		attribute.String("dpserve.pool", e.Pool), attribute.String("dpserve.unit", e.Unit),
		attribute.String("dpserve.node", e.Node), attribute.Int("dpserve.group", e.Group),
		attribute.Int("dpserve.rank", e.Rank), attribute.Int("dpserve.leg", e.Number),
		attribute.String("dpserve.cause", e.Cause),
	)
	if !e.FirstToken.IsZero() {
		l.span.AddEvent("first token", trace.WithTimestamp(e.FirstToken))
	}
	if e.Failed {
		l.span.SetStatus(codes.Error, e.Cause)
	}
	l.span.End()
}
