//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// prefillMember is what a prefill leg has beside the client's body.
const prefillMember = `"kv_transfer_params":{` + keepsBlocks + `,"do_remote_prefill":false,` +
	`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// prefillLeg is the prefill leg of a request.
func prefillLeg(req []byte) []byte {
	_, body, _ := bytes.Cut(req, []byte("\r\n\r\n"))
	body = bytes.Replace(body, []byte(`"stream":true`), []byte(`"stream":false`), 1)
	return withMember(post(string(body)), prefillMember)
}

// withMember is a request with a member behind the others of its body.
func withMember(req []byte, member string) []byte {
	_, body, _ := bytes.Cut(req, []byte("\r\n\r\n"))
	return post(strings.TrimSuffix(string(body), "}") + "," + member + "}")
}

// Sizes of the cost of a split request.
const (
	costPrefills = 2
	costDecodes  = 2
)

// pdCost measures what a request of two legs costs the gateway beside one of one leg, over the same mocks:
// CPU, and the time to the first token beyond that of a client which sends both legs itself. Such a client is
// measured with and without the gateway between.
func pdCost(ctx context.Context, bin string, rounds int, slice time.Duration, only string) error {
	dir, err := os.MkdirTemp("", "dpserve-pd-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	engines, err := startEngines(ctx, self, costPrefills+costDecodes)
	if err != nil {
		return err
	}
	prefills, decodes := engines[:costPrefills], engines[costPrefills:]
	plain, err := startDpserve(ctx, bin, filepath.Join(dir, "plain"), engines, routed{name: "one leg"})
	if err != nil {
		return err
	}
	split, err := startSplit(ctx, bin, filepath.Join(dir, "split"), prefills, decodes)
	if err != nil {
		return err
	}
	fmt.Printf("%d CPUs, %s, engines: %d mocks, each slice %s\n", runtime.NumCPU(), runtime.Version(),
		len(engines), slice)
	rnd := rand.New(rand.NewPCG(1, 2))
	direct := target{name: "both by client", addrs: decodes, prefill: prefills}
	// the gateway takes the parameters off: its engines see two requests of one leg
	twice := target{name: "two of one leg", addrs: plain.addrs, prefill: plain.addrs}
	for _, sh := range firstTokenShapes() {
		if strings.Contains(sh.name, only) && ctx.Err() == nil {
			sh.measure(ctx, []target{direct, twice, split}, rounds, slice, rnd)
		}
	}
	for _, sh := range splitShapes() {
		if strings.Contains(sh.name, only) && ctx.Err() == nil {
			sh.measure(ctx, []target{plain, split}, rounds, slice, rnd)
		}
	}
	ways, err := waysOf(ctx, split.admin)
	if err != nil {
		return err
	}
	fmt.Printf("\nthe prompt was computed: %s\n", ways)
	return nil
}

// startSplit starts a dpserve that splits every request.
func startSplit(ctx context.Context, bin, dir string, prefills, decodes []string) (target, error) {
	var ranks strings.Builder
	for _, e := range prefills {
		fmt.Fprintf(&ranks, "        - {url: \"http://%s\", role: prefill}\n", e)
	}
	for _, e := range decodes {
		fmt.Fprintf(&ranks, "        - {url: \"http://%s\", role: decode}\n", e)
	}
	t, err := startAttached(ctx, bin, dir, "two legs",
		"    disaggregation: {transfer: nixl, decide: always}\n", ranks.String())
	if err != nil {
		return t, err
	}
	return t, waitForPairs(ctx, t.admin, costPrefills*costDecodes)
}

// firstTokenShapes are compared with a client that sends both legs itself.
func firstTokenShapes() []shape {
	ms := func(x time.Duration) float64 { return float64(x) / float64(time.Millisecond) }
	beyond := func(p float64) func(s, direct sample) float64 {
		return func(s, direct sample) float64 {
			return ms(percentile(s.first, p) - percentile(direct.first, p))
		}
	}
	cols := []column{
		{"first token p50 ms", func(s, _ sample) float64 { return ms(percentile(s.first, .5)) }},
		{"beyond both legs p50", beyond(.5)},
		{"p99", beyond(.99)},
	}
	return []shape{
		{"first token, 1 client, 20 ms per chunk, open loop", load{
			req: payload(64, 2, 20*time.Millisecond, true, false), conns: 4, rate: 12,
		}, cols},
		{"first token, about 64 clients, 20 ms per chunk, open loop", load{
			req: payload(64, 25, 20*time.Millisecond, true, false), conns: 256, rate: 128,
		}, cols},
	}
}

// splitShapes are compared with the same gateway and one leg.
func splitShapes() []shape {
	perRequest := func(s sample) float64 {
		return float64(s.cpu.Microseconds()) / float64(max(s.requests, 1))
	}
	cols := []column{
		{"CPU us/request", func(s, _ sample) float64 { return perRequest(s) }},
		{"over one leg", func(s, base sample) float64 { return perRequest(s) / max(perRequest(base), 1e-3) }},
		{"requests/s", func(s, _ sample) float64 { return float64(s.requests) / s.wall.Seconds() }},
	}
	body := func(bytes, tokens int, stream bool) []byte { return payload(bytes, tokens, 0, stream, false) }
	return []shape{
		{"CPU, small request, 16 clients, closed loop", load{req: body(64, 1, false), conns: 16}, cols},
		{"CPU, small request, 64 clients, closed loop", load{req: body(64, 1, false), conns: 64}, cols},
		{"CPU, a stream of 8 chunks, 16 clients", load{req: body(64, 8, true), conns: 16}, cols},
		{"CPU, 4 KB, a new prompt each time, 16 clients", load{
			req: body(4<<10, 1, false), conns: 16, fresh: true,
		}, cols},
		{"CPU, 400 KB body, 1 client", load{req: body(400<<10, 1, true), conns: 1}, cols},
	}
}
