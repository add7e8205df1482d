package ingress

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// decider does what a request does between its scanned body and its rank: identify the prompt, look it up,
// pick, and undo the pick. 8 ranks hold the first half of every prompt, and each also holds the second half
// of every eighth prompt.
type decider struct {
	router *appRouter
	route  openai.Route
	bodies [][]byte
	scans  []openai.Body
	header http.Header
	p      prompt
	q      routing.Request
	d      routing.Decision
	e      routing.Event
	n      int
}

// deciderBodies are n prompts of 128 blocks.
func deciderBodies(route openai.Route, n int) (out [][]byte) {
	for n := range n {
		if route == openai.Completions {
			ids := strings.Repeat("1234,", 1024) + strings.Repeat(fmt.Sprint(1000+n, ","), 1023) + "7"
			out = append(out, []byte(`{"model":"demo","prompt":[`+ids+`]}`))
			continue
		}
		half := kvindex.TextSpan(128) / 2
		out = append(out, []byte(chat(strings.Repeat("shared word ", half/12)+strings.Repeat(
			fmt.Sprintf("own words%03d", n), half/12))))
	}
	return out
}

func newDecider(tb testing.TB, policy string, route openai.Route, prompts int) *decider {
	tb.Helper()
	g := newKVRig(tb, 8, 1, app.Routing{Policy: policy, Preset: "documented", Identity: app.IdentityText})
	b := &decider{
		router: g.router, route: route, bodies: deciderBodies(route, prompts),
		header: http.Header{headerSessionID: {"a session"}},
	}
	b.scans = make([]openai.Body, len(b.bodies))
	for i, body := range b.bodies {
		require.NoError(tb, b.scans[i].Scan(route, body))
		require.Nil(tb, b.p.fromBody(context.Background(), b.router, route, "", &b.scans[i], body, b.header))
		for k, r := range g.feed.replicas {
			blocks := b.p.blocks
			if k != i%8 {
				blocks = blocks[:len(blocks)/2]
			}
			r.blockSet(tb, kvindex.GPU).Apply(kvindex.Delta{Change: kvindex.Stored, Hashes: blocks})
		}
	}
	for range 3 * len(b.bodies) {
		b.step()
	}
	return b
}

func (b *decider) step() {
	i := b.n % len(b.bodies)
	b.n++
	if b.p.fromBody(context.Background(), b.router, b.route, "", &b.scans[i], b.bodies[i], b.header) != nil {
		panic("refused")
	}
	b.q.ID++
	b.router.describeRequest(&b.q, &b.p)
	router := b.router.router.Load()
	router.Pick(&b.q, &b.d)
	if b.d.Kind == routing.Route {
		b.e = routing.Event{Kind: routing.EvUndo, Rank: b.d.Ranked[0], ReqID: b.q.ID}
		router.Observe(&b.e)
	}
}

// TestDecisionAllocatesNothing: from the scanned body to the rank, under every policy.
func TestDecisionAllocatesNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("fills an index; under the race detector allocations are not what they are")
	}
	for _, policy := range routing.Names() {
		for _, route := range []openai.Route{openai.Chat, openai.Completions} {
			b := newDecider(t, policy, route, 8)
			assert.Zero(t, testing.AllocsPerRun(32, b.step), "%s %s", policy, route)
		}
	}
}

// BenchmarkDecision is identify + look-up + pick at 8 ranks and prompts of 128 blocks: 16 KiB of text, or
// 2,048 token ids.
func BenchmarkDecision(b *testing.B) {
	for _, policy := range routing.Names() {
		for _, route := range []openai.Route{openai.Chat, openai.Completions} {
			b.Run(policy+"/"+route.String(), func(b *testing.B) {
				d := newDecider(b, policy, route, 64)
				b.ReportAllocs()
				for b.Loop() {
					d.step()
				}
			})
		}
	}
}

// BenchmarkTextBlocks is the identity of a text alone.
func BenchmarkTextBlocks(b *testing.B) {
	h := kvindex.NewHasher([]byte("s"))
	for _, size := range []int{100, 16 << 10, 400 << 10} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			text := []byte(strings.Repeat("x", size))
			var dst []uint64
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				dst = h.Text(dst[:0], 1, text)
			}
			b.ReportMetric(float64(len(dst)), "blocks")
		})
	}
}

// routedIngress is an ingress in front of one engine whose replica remembers what it was sent.
func routedIngress(b *testing.B, engine, policy string) string {
	b.Helper()
	g := newRig(b, options{
		urls: []string{engine}, max: 1024, app: withRouting(policy), level: slog.LevelError,
	})
	remembers(b, g.replicas[0])
	return g.url
}

// BenchmarkCacheAwareCost compares the CPU of requests under a policy that reads caches with round-robin, in
// one run, slices interleaved: index, records and look-ups included, direct cost taken off. "fresh" prompts
// are new from their first byte on.
func BenchmarkCacheAwareCost(b *testing.B) {
	large := strings.Repeat("a prompt. ", 40<<10)
	for name, body := range map[string]func(n int) string{
		"small":       func(int) string { return chatBody },
		"400KB":       func(int) string { return chat(large) },
		"400KB_fresh": func(n int) string { return chat(fmt.Sprint(n, large)) },
	} {
		b.Run(name, func(b *testing.B) { compareRouting(b, body) })
	}
}

func compareRouting(b *testing.B, body func(n int) string) {
	engine := benchEngine(b, 0, 0)
	targets := []string{
		engine, routedIngress(b, engine, "round-robin"), routedIngress(b, engine, "scoring"),
		routedIngress(b, engine, "kv"),
	}
	const per = 48 // requests of one body in a slice
	total := make([]time.Duration, len(targets))
	rounds := 0
	for b.Loop() {
		for i, t := range targets {
			total[i] += load(b, t+chatPath, body(rounds), per, 4)
		}
		rounds++
	}
	us := func(i int) float64 { return float64((total[i] - total[0]).Nanoseconds()) / 1000 / float64(rounds) }
	b.ReportMetric(us(1), "us-round-robin")
	b.ReportMetric(us(2), "us-scoring")
	b.ReportMetric(us(2)/us(1), "scoring/round-robin")
	b.ReportMetric(us(3)/us(1), "kv/round-robin")
}
