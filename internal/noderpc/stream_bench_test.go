package noderpc

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/rawconn"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

// discardAll is a feed, a sink and a mailbox that do nothing.
type discardAll struct{}

func (discardAll) Subscribe(msg.Sink) (cancel func()) { return func() {} }
func (discardAll) List(msg.Sink)                      {}
func (discardAll) Deliver(*msg.Record)                {}
func (discardAll) TrySend(any) error                  { return nil }
func (discardAll) Send(any)                           {}
func (discardAll) Stopped() <-chan struct{}           { return nil }

func benchServer(tb testing.TB, streams int) *StreamServer {
	s := NewStreamServer(StreamServerConfig{
		Feed: discardAll{}, Peer: peerOfConn, Log: slog.New(slog.DiscardHandler),
	})
	for i := range streams {
		sub := newSubscriber(s, namedConn{peer: fmt.Sprintf("node-%d", i)})
		s.streams[sub.name] = sub
	}
	return s
}

// benchRecords are the records of one request on one of several ranks.
func benchRecords(rank int) []msg.Record {
	var out []msg.Record
	for i, kind := range []msg.RecordKind{
		msg.RecSnapshot, msg.RecAdmitted, msg.RecFirstToken,
		msg.RecProgress, msg.RecDone,
	} {
		rec := msg.Record{
			App: "chat", Unit: fmt.Sprintf("chat/0/%d", rank), Rank: routing.ID(0, rank), Epoch: 3,
			Incarnation: 1 << 62, Seq: 100_000 + uint64(i), Kind: kind,
		}
		if kind == msg.RecSnapshot {
			rec.Snapshot = &msg.Snapshot{Node: "node-1", Mailbox: discardAll{}}
		} else {
			rec.ReqID, rec.Ingress, rec.Tokens, rec.Hit, rec.Out, rec.At = 1<<60, "node-12", 800, 640, 120,
				30*time.Hour
		}
		out = append(out, rec)
	}
	return out
}

// BenchmarkRecordIn is adding a record to the log, whatever the number of streams.
func BenchmarkRecordIn(b *testing.B) {
	for _, streams := range []int{1, 64} {
		b.Run(fmt.Sprintf("streams=%d", streams), func(b *testing.B) {
			tap := benchServer(b, streams)
			recs := benchRecords(0)
			tap.Deliver(&recs[0])
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				tap.Deliver(&recs[1+i%4])
			}
		})
	}
}

// BenchmarkRecordOut is the way of a record from a message to a sink.
func BenchmarkRecordOut(b *testing.B) {
	hub := msg.NewHub()
	hub.Subscribe(discardAll{})
	l := &link{links: &RankLinks{config: RankLinksConfig{Hub: hub}}, ranks: map[appRank]*remoteRank{}}
	in := newUnpacker(&l.links.skipped)
	var p packer
	recs := benchRecords(0)
	p.pack(1, &recs[0])
	require.NoError(b, in.unpack(p.buf, l))
	var message []byte
	for i := range 256 {
		p.pack(1, &recs[1+i%4])
		message = append(message, p.buf...)
	}
	b.ReportMetric(float64(len(message))/256, "B/record")
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%256 == 0 {
			if err := in.unpack(message, l); err != nil {
				b.Fatal(err)
			}
		}
	}
}

// BenchmarkPost is the way of a post from a message to a mailbox, without the message.
func BenchmarkPost(b *testing.B) {
	s := benchServer(b, 1)
	recs := benchRecords(0)
	s.Deliver(&recs[0])
	p := toPost(&msg.Done{TicketID: 7, Cause: "ok", CompletionTokens: 120})
	p.Unit, p.Rank, p.Epoch, p.Incarnation = recs[0].Unit, uint32(recs[0].Rank), recs[0].Epoch,
		recs[0].Incarnation
	sub := s.streams["node-0"]
	b.ReportAllocs()
	for b.Loop() {
		s.deliverPost(sub, p)
	}
}

func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func selfSigned(b *testing.B) tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(b, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(b, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// The load of BenchmarkNode: 64 ingresses of 1,000 requests/s each, on 64 ranks of so many nodes; a request
// is an admission, a first token, an end, and while it runs a report every 250 ms.
const (
	benchIngresses = 64
	benchRanks     = 64
	benchRequests  = 1000 // per s and ingress
	benchReports   = 1    // of progress, per request
	benchFor       = 5 * time.Second
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
	h := msg.NewHub()
	streams := NewStreamServer(StreamServerConfig{
		Feed: h, Log: slog.New(slog.DiscardHandler),
		Peer: func(c net.Conn) string { return c.RemoteAddr().String() },
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	secure := tls.NewListener(rawListener{l}, &tls.Config{
		Certificates: []tls.Certificate{selfSigned(b)}, MinVersion: tls.VersionTLS13,
	})
	go func() { _ = streams.Serve(secure) }()
	w := &workerNode{id: "n1", hub: h}
	var ranks []*fakeRank
	for i := range benchRanks / nodes {
		ranks = append(ranks, w.rank(i, uint64(100+i)))
	}
	alone := cpuTime(b)
	runRanks(ranks, benchIngresses*benchRequests/benchRanks)
	alone = cpuTime(b) - alone
	child := exec.CommandContext(b.Context(), os.Args[0], "-test.run", "^TestReadersOfABenchmark$")
	child.Env = append(os.Environ(), benchAddress+"="+l.Addr().String()+"/"+strconv.Itoa(nodes))
	child.Stdout, child.Stderr = os.Stderr, os.Stderr
	require.NoError(b, child.Start())
	waitForPosts := func(of uint64) {
		for streams.Stats().Posts < of {
			time.Sleep(10 * time.Millisecond)
		}
	}
	waitForPosts(benchIngresses)
	idle := cpuTime(b)
	time.Sleep(time.Second)
	idle = cpuTime(b) - idle
	waitForPosts(2 * benchIngresses)
	began, cpu, posts := time.Now(), cpuTime(b), streams.Stats().Posts
	sent := runRanks(ranks, benchIngresses*benchRequests/benchRanks)
	took := time.Since(began)
	b.ReportMetric(100*float64(alone)/float64(benchFor), "%core-without-streams")
	b.ReportMetric(100*float64(idle)/float64(time.Second), "%core-idle")
	b.ReportMetric(100*float64(cpuTime(b)-cpu)/float64(took), "%core")
	b.ReportMetric(float64(sent)/took.Seconds(), "records/s")
	b.ReportMetric(float64(streams.Stats().Posts-posts)/took.Seconds(), "posts/s")
	b.ReportMetric(float64(streams.Stats().Gaps), "gaps")
	require.NoError(b, child.Process.Kill())
	_ = child.Wait()
	require.NoError(b, l.Close())
	streams.Close()
	for _, r := range ranks {
		r.stop()
	}
}

// runRanks lets the ranks emit the records of so many requests per second.
func runRanks(ranks []*fakeRank, perSecond int) (sent int) {
	tick := time.NewTicker(10 * time.Millisecond)
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
		go benchIngress(b, fmt.Sprintf("i%d", i), benchRequests/nodes*(2+benchReports))
	}
	select {}
}

func benchIngress(b *nodeStore, id string, posts int) {
	hub := msg.NewHub()
	NewRankLinks(RankLinksConfig{
		Self: id, Hub: hub, Store: b, Log: slog.New(slog.DiscardHandler),
		Open: func(ctx context.Context, n state.Node) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", n.Address)
			return tls.Client(rawconn.Conn(conn), &tls.Config{InsecureSkipVerify: true}), err
		},
	})
	m := mailboxes{make(chan msg.Mailbox, 1)}
	hub.Subscribe(m)
	box := <-m.found
	box.Send(&msg.Progress{})
	time.Sleep(3 * time.Second)
	sent := 0
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		for ; sent < int(time.Since(began).Seconds()*float64(posts)); sent++ {
			box.Send(&msg.Progress{TicketID: uint64(sent), Out: sent})
		}
	}
}

// rawListener gives connections as the node port does.
type rawListener struct{ net.Listener }

func (l rawListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return rawconn.Conn(c), err
}
