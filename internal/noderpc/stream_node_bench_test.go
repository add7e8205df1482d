package noderpc

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/internal/state"
)

// The load of BenchmarkNode: 64 ingresses of 1,000 requests/s each, on 64 ranks of so many nodes; a request
// is an admission, a first token, an end, and while it runs a report every 250 ms.
const (
	benchIngresses = 64
	benchRanks     = 64
	benchRequests  = 1000 // per s and ingress
	benchReports   = 1    // of progress, per request
	benchFor       = 3 * time.Second
	benchAddress   = "DPSERVE_TEST_STREAMS_OF"
)

// BenchmarkNode is the CPU of one node's process for the streams of its ranks; the readers run in another
// process.
func BenchmarkNode(b *testing.B) {
	for _, nodes := range []int{8, 64} {
		b.Run(fmt.Sprintf("nodes=%d", nodes), func(b *testing.B) { benchNode(b, nodes) })
	}
}

func benchNode(b *testing.B, nodes int) {
	h := &fakeHub{}
	streams, err := NewStreamServer(StreamServerConfig{Feed: h, Log: slog.New(slog.DiscardHandler)})
	require.NoError(b, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{selfSigned(b)}, MinVersion: tls.VersionTLS13,
	})), grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(1<<20))
	dpservev1.RegisterReplicaServer(server, streams)
	go func() { _ = server.Serve(l) }()
	w := &workerNode{id: "n1", hub: h}
	var ranks []*fakeRank
	for i := range benchRanks / nodes {
		ranks = append(ranks, w.rank(i, uint64(100+i)))
	}
	child := exec.CommandContext(b.Context(), os.Args[0], "-test.run", "^TestReadersOfABenchmark$")
	child.Env = append(os.Environ(), benchAddress+"="+l.Addr().String()+"/"+strconv.Itoa(nodes))
	child.Stdout, child.Stderr = os.Stderr, os.Stderr
	require.NoError(b, child.Start())
	for streams.Stats().Streams < benchIngresses {
		time.Sleep(10 * time.Millisecond)
	}
	time.Sleep(time.Second)
	idle := cpuTime(b)
	time.Sleep(time.Second)
	idle = cpuTime(b) - idle
	began, cpu, posts := time.Now(), cpuTime(b), streams.Stats().Posts
	sent := runRanks(ranks, benchIngresses*benchRequests/benchRanks)
	took := time.Since(began)
	b.ReportMetric(100*float64(idle)/float64(time.Second), "%core-idle")
	b.ReportMetric(100*float64(cpuTime(b)-cpu)/float64(took), "%core")
	b.ReportMetric(float64(sent)/took.Seconds(), "records/s")
	b.ReportMetric(float64(streams.Stats().Posts-posts)/took.Seconds(), "posts/s")
	b.ReportMetric(float64(streams.Stats().Gaps), "gaps")
	require.NoError(b, child.Process.Kill())
	_ = child.Wait()
	server.Stop()
	streams.Close()
	for _, r := range ranks {
		r.stop()
	}
}

// runRanks lets the ranks emit the records of so many requests per second.
func runRanks(ranks []*fakeRank, perSecond int) (sent int) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	recs := benchRecords(0)[1:]
	for began := time.Now(); time.Since(began) < benchFor; <-tick.C {
		due := int(time.Since(began).Seconds() * float64(perSecond*(3+benchReports)))
		for n := due - sent/len(ranks); n > 0; n-- {
			for _, r := range ranks {
				rec := recs[n%len(recs)]
				r.post(func() { r.got = nil; r.emit(rec) })
				sent++
			}
		}
	}
	return sent
}

// mailboxes is a sink that keeps the mailboxes of the ranks.
type mailboxes struct{ found chan msg.Mailbox }

func (m mailboxes) Deliver(rec *msg.Record) {
	if rec.Kind == msg.RecSnapshot {
		select {
		case m.found <- rec.Snapshot.Mailbox:
		default:
		}
	}
}

// TestReadersOfABenchmark is the other process of BenchmarkNode: every ingress's feed, and its posts.
func TestReadersOfABenchmark(t *testing.T) {
	at := os.Getenv(benchAddress)
	if at == "" {
		t.Skip("part of BenchmarkNode")
	}
	var addr string
	var nodes int
	_, err := fmt.Sscanf(at, "127.0.0.1:%s", &addr)
	require.NoError(t, err)
	var port int
	_, err = fmt.Sscanf(addr, "%d/%d", &port, &nodes)
	require.NoError(t, err)
	b := newNodeStore()
	b.change(func(all map[string]*state.Node) {
		for i := range benchIngresses {
			id := fmt.Sprintf("i%d", i)
			all[id] = &state.Node{ID: id, Roles: []state.Role{state.RoleIngress}}
		}
		all["n1"] = &state.Node{
			ID: "n1", Address: fmt.Sprintf("127.0.0.1:%d", port),
			Roles: []state.Role{state.RoleWorker},
		}
	})
	for i := range benchIngresses {
		go benchIngress(t, b, fmt.Sprintf("i%d", i), benchRequests/nodes*(2+benchReports))
	}
	select {}
}

func benchIngress(t *testing.T, b *nodeStore, id string, posts int) {
	f, err := NewFeed(FeedConfig{
		Self: id, Store: b, Log: slog.New(slog.DiscardHandler),
		Open: func(ctx context.Context, n state.Node) (StreamClient, error) {
			cc, err := grpc.NewClient(n.Address,
				grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})),
				grpc.WithInitialWindowSize(1<<20), grpc.WithInitialConnWindowSize(1<<20))
			if err != nil {
				return nil, err
			}
			return dpservev1.NewReplicaClient(cc).Subscribe(ctx)
		},
	})
	if err != nil {
		t.Error(err)
		return
	}
	m := mailboxes{make(chan msg.Mailbox, 1)}
	f.Subscribe(m)
	box := <-m.found
	time.Sleep(2 * time.Second)
	sent := 0
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		for ; sent < int(time.Since(began).Seconds()*float64(posts)); sent++ {
			box.Send(&msg.Progress{TicketID: uint64(sent), Out: sent})
		}
	}
}
