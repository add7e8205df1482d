package ingress

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// BenchmarkRemote compares a rank of another node with one of this node, in turn and in one run: time to the
// first byte of a stream for one client at a time, and CPU of the whole process per request and per chunk.
// Both nodes are this process, the wire is loopback without TLS.
func BenchmarkRemote(b *testing.B) {
	const chunks = 100
	engine := benchEngine(b, chunks, 2*time.Millisecond)
	whole, quick := benchEngine(b, 0, 0), benchEngine(b, 1, time.Microsecond)
	ways := map[string][3]string{}
	for way, far := range map[string]bool{"near": false, "far": true} {
		ways[way] = [3]string{
			benchIngress(b, engine, far), benchIngress(b, whole, far), benchIngress(b, quick, far),
		}
	}
	first := map[string][]time.Duration{}
	perChunk, perRequest := map[string]time.Duration{}, map[string]time.Duration{}
	client := &http.Client{Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 256}}
	defer client.CloseIdleConnections()
	rounds := max(b.N/100, 3)
	b.ResetTimer()
	for range rounds {
		for way, at := range ways {
			for range 40 {
				first[way] = append(first[way], firstByte(b, client, at[2]))
			}
			perChunk[way] += load(b, at[0]+chatPath, streamBody, 32, 32)
			perRequest[way] += load(b, at[1]+chatPath, chatBody, 500, 8)
		}
	}
	b.StopTimer()
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }
	for way, all := range first {
		slices.Sort(all)
		b.ReportMetric(us(all[len(all)/2]), "us-first-p50-"+way)
		b.ReportMetric(us(all[len(all)*99/100]), "us-first-p99-"+way)
		b.ReportMetric(us(perChunk[way])/float64(rounds*chunks), "us-cpu/chunk-"+way)
		b.ReportMetric(us(perRequest[way])/float64(rounds), "us-cpu/request-"+way)
	}
	b.ReportMetric(us(first["far"][len(first["far"])/2]-first["near"][len(first["near"])/2]), "us-added-p50")
	b.ReportMetric(float64(perChunk["far"])/float64(perChunk["near"]), "chunk-ratio")
	b.ReportMetric(float64(perRequest["far"])/float64(perRequest["near"]), "request-ratio")
	b.ReportMetric(0, "ns/op") // says nothing here
}

// firstByte is the time to the first byte of a stream's body; the request is then cancelled.
func firstByte(b *testing.B, client *http.Client, target string) time.Duration {
	b.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target+"/v1/chat/completions",
		strings.NewReader(streamBody))
	require.NoError(b, err)
	began := time.Now()
	resp, err := client.Do(req)
	require.NoError(b, err)
	_, err = io.ReadFull(resp.Body, make([]byte, 1))
	took := time.Since(began)
	require.NoError(b, err)
	cancel()
	require.NoError(b, resp.Body.Close())
	return took
}
