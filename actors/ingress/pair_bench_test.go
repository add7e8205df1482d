package ingress

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/routing"
)

// benchPairEngine is an engine for both sides, as cheap as benchEngine.
func benchPairEngine(b *testing.B) string {
	b.Helper()
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	require.NoError(b, err)
	const prefill = `{"id":"p","choices":[{"index":0,"text":"x","finish_reason":"length"}],` +
		`"usage":{"prompt_tokens":5,"total_tokens":6,"completion_tokens":1},"kv_transfer_params":{` +
		`"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"p",` +
		`"remote_request_id":"r","remote_host":"h","remote_port":5600,"remote_num_tokens":5}}`
	srv := &http.Server{
		ReadHeaderTimeout: time.Minute,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			w.Header().Set("Content-Type", "application/json")
			if bytes.Contains(body, []byte(`"do_remote_decode":true`)) {
				_, _ = io.WriteString(w, prefill)
				return
			}
			_, _ = io.WriteString(w, wholeAnswer)
		}),
	}
	go func() { _ = srv.Serve(l) }()
	b.Cleanup(func() { _ = srv.Close() })
	return "http://" + l.Addr().String()
}

// benchPair is an ingress with a prefill rank and a decode rank that have met.
func benchPair(b *testing.B, engine string) string {
	b.Helper()
	g := newPairRig(b, options{
		prefills: 1, decodes: 1, max: 1024, cold: true, level: slog.LevelError,
		wrap: func(http.Handler) string { return engine },
		change: func(p, d *app.Application) {
			p.Routing.Policy, d.Routing.Policy = "power-of-two", "power-of-two"
		},
	})
	g.in.findPair("demo").router.Update(func(t *routing.PairTable) {
		t.SetMet(g.prefills[0].ref(), g.decodes[0].ref())
	})
	return g.url
}

// BenchmarkSplitRequest compares CPU per request: of a request over a prefill rank and a decode rank, and of
// a plain one, on the same engines in one run. The engines' own cost is in both.
func BenchmarkSplitRequest(b *testing.B) {
	const conc = 8
	engine := benchPairEngine(b)
	targets := []string{engine, benchIngress(b, engine, false), benchPair(b, engine)}
	var total [3]time.Duration
	n := max(b.N, conc) / 2
	for _, t := range targets {
		load(b, t+chatPath, chatBody, conc, conc) // warm
	}
	b.ResetTimer()
	for range 2 {
		for i, t := range targets {
			total[i] += load(b, t+chatPath, chatBody, max(n, conc), conc)
		}
	}
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 2000 }
	b.ReportMetric(us(total[0]), "us-direct")
	b.ReportMetric(us(total[1]), "us-plain")
	b.ReportMetric(us(total[2]), "us-split")
	b.ReportMetric(us(total[2])/us(total[1]), "ratio")
	b.ReportMetric((us(total[2])-2*us(total[0]))/(us(total[1])-us(total[0])), "ratio-own")
}
