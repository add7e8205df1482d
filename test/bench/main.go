//go:build linux

package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

func main() {
	runtime.LockOSThread() // children die with this thread
	role := flag.String("role", "bench", "bench | policies | policy-cpu | pd | pd-cpu | engine | "+
		"proxy (the last two are children of the others)")
	listen := flag.String("listen", "", "address of a child")
	engines := flag.String("engines", "", "engines of a proxy child")
	bin := flag.String("dpserve", "bin/dpserve",
		"the binary to measure, or several with commas between: they stand side by side")
	rounds := flag.Int("rounds", 3, "interleaved rounds per shape")
	slice := flag.Duration("slice", 1500*time.Millisecond, "length of one slice")
	only := flag.String("only", "", "run only the shapes whose name contains this")
	var p policyFlags
	flag.StringVar(&p.policies, "policies", "",
		"policies, policy-cpu and pd: rows to run, with commas between; empty = all")
	flag.StringVar(&p.traffic, "traffic", "",
		"policies and pd: traffics to run, with commas between; empty = all")
	flag.DurationVar(&p.duration, "duration", 30*time.Second, "policies and pd: length of the measurement")
	flag.Float64Var(&p.load, "load", 1, "policies and pd: factor on every rate")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	switch *role {
	case "engine":
		runtime.GOMAXPROCS(1)
		err = runEngine(ctx, *listen)
	case "proxy":
		err = runReverseProxy(*listen, strings.Split(*engines, ","))
	case "policies":
		err = p.compare(ctx, *bin, *rounds)
	case "pd":
		err = p.comparePools(ctx, *bin, *rounds)
	case "pd-cpu":
		err = pdCost(ctx, *bin, *rounds, *slice, *only)
	case "policy-cpu":
		err = p.cpu(ctx, *bin, *rounds, *slice, *only)
	default:
		err = bench(ctx, *bin, *rounds, *slice, *only)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1) //nolint:gocritic // stop was called
	}
}

func bench(ctx context.Context, bin string, rounds int, slice time.Duration, only string) error {
	dir, err := os.MkdirTemp("", "dpserve-bench-")
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
	eng, err := startEngines(ctx, self, 4)
	if err != nil {
		return err
	}
	ts := []target{{name: "direct", addrs: eng}}
	if n, ok, err := startNginx(ctx, dir, eng); err != nil {
		return err
	} else if ok {
		ts = append(ts, n)
	}
	rp, err := startReverseProxy(ctx, self, eng)
	if err != nil {
		return err
	}
	ts = append(ts, rp)
	var own []target
	for i, b := range strings.Split(bin, ",") {
		dp, err := startDpserve(ctx, b, filepath.Join(dir, strconv.Itoa(i)), eng, routed{})
		if err != nil {
			return err
		}
		own = append(own, dp)
	}
	ts = append(ts, own...)
	fmt.Printf("%d CPUs, %s, engines: 4 mocks, each slice %s\n", runtime.NumCPU(), runtime.Version(), slice)
	for _, dp := range own {
		fmt.Printf("idle: %s %.1f MB RSS\n", dp.name, rss(dp.pids[0]))
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, sh := range shapes() {
		if strings.Contains(sh.name, only) && ctx.Err() == nil {
			sh.measure(ctx, ts, rounds, slice, rnd)
		}
	}
	fmt.Println()
	for _, dp := range own {
		fmt.Printf("after the load: %s %.1f MB RSS\n", dp.name, rss(dp.pids[0]))
	}
	return nil
}

func shapes() []shape {
	ms := func(x time.Duration) float64 { return float64(x) / float64(time.Millisecond) }
	added := func(p float64) func(s, direct sample) float64 {
		return func(s, direct sample) float64 {
			return ms(percentile(s.first, p) - percentile(direct.first, p))
		}
	}
	perRequest := func(s, _ sample) float64 {
		return float64(s.cpu.Microseconds()) / float64(max(s.requests, 1))
	}
	perChunk := func(s, _ sample) float64 { return float64(s.cpu.Microseconds()) / float64(max(s.chunks, 1)) }
	rps := func(s, _ sample) float64 { return float64(s.requests) / s.wall.Seconds() }
	cps := func(s, _ sample) float64 { return float64(s.chunks) / s.wall.Seconds() }
	latency := []column{{"added p50 ms", added(.5)}, {"added p99 ms", added(.99)}}
	cpuReq := column{"CPU us/request", perRequest}
	paced := payload(64, 25, 20*time.Millisecond, true, false)
	big, escaped := payload(400<<10, 1, 0, true, false), payload(400<<10, 1, 0, true, true)
	small := payload(64, 1, 0, false, false)
	return []shape{
		{"first token, 1 client, 20 ms per chunk, open loop", load{req: payload(64, 2, 20*time.Millisecond,
			true, false), conns: 4, rate: 12}, latency},
		{
			"first token, about 64 clients, 20 ms per chunk, open loop",
			load{req: paced, conns: 256, rate: 128},
			append(latency, column{"CPU us/chunk", perChunk}),
		},
		{
			"first token, 64 streams on used connections, 10 ms per chunk, closed loop",
			load{
				req: payload(64, 32, 10*time.Millisecond, true, false), conns: 64,
				stagger: 300 * time.Millisecond,
			},
			append(latency, column{"CPU us/chunk", perChunk}),
		},
		{"first token, 64 new connections at once", load{req: payload(64, 2, 20*time.Millisecond, true,
			false), conns: 64, burst: true}, append(latency, cpuReq)},
		{
			"first token, 64 new connections at once after 6 s of silence",
			load{
				req: payload(64, 2, 20*time.Millisecond, true, false), conns: 64, burst: true,
				silence: keepAlive + time.Second,
			},
			latency,
		},
		{"paced, 64 streams, 10 ms per chunk", load{
			req:   payload(64, 100, 10*time.Millisecond, true, false),
			conns: 64, stagger: 100 * time.Millisecond,
		}, []column{
			{"CPU us/chunk", perChunk},
			{"chunks/s", cps},
		}},
		{
			"small requests, 64 clients, closed loop",
			load{req: small, conns: 64},
			[]column{cpuReq, {"requests/s", rps}},
		},
		{"400 KB body, 1 client", load{req: big, conns: 1}, append(latency, cpuReq)},
		{
			"400 KB body, an escape every 11 bytes, 1 client",
			load{req: escaped, conns: 1},
			append(latency, cpuReq),
		},
		{
			"chunks flat out, 64 streams",
			load{req: payload(64, 2000, 0, true, false), conns: 64},
			[]column{{"chunks/s", cps}, {"CPU us/chunk", perChunk}},
		},
	}
}
