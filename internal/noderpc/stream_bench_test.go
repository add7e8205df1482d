package noderpc

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/dpserve/dpserve/actors/msg"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/routing"
)

// discardAll is a feed, a sink and a mailbox that do nothing.
type discardAll struct{}

func (discardAll) Subscribe(msg.Sink) (cancel func()) { return func() {} }
func (discardAll) Deliver(*msg.Record)                {}
func (discardAll) TrySend(any) error                  { return nil }
func (discardAll) Send(any)                           {}
func (discardAll) Stopped() <-chan struct{}           { return nil }

func benchServer(tb testing.TB, streams int) (*StreamServer, *broadcastSink) {
	s, err := NewStreamServer(StreamServerConfig{Feed: discardAll{}, Log: slog.New(slog.DiscardHandler)})
	require.NoError(tb, err)
	for i := range streams {
		_, err := s.addStream(fmt.Sprintf("node-%d", i))
		require.NoError(tb, err)
	}
	return s, &broadcastSink{s}
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
			_, tap := benchServer(b, streams)
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
	f := &Feed{}
	f.subscribers.Store(&feedSubscribers{list: []*feedSubscriber{{sink: discardAll{}}}})
	l := &link{feed: f, ranks: map[appRank]*remoteRank{}}
	in := newUnpacker(&f.skipped)
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
	s, tap := benchServer(b, 1)
	recs := benchRecords(0)
	tap.Deliver(&recs[0])
	p := toPost(&msg.Done{TicketID: 7, Cause: "ok", CompletionTokens: 120})
	p.Unit, p.Rank, p.Epoch, p.Incarnation = recs[0].Unit, uint32(recs[0].Rank), recs[0].Epoch,
		recs[0].Incarnation
	sub := s.streams["node-0"]
	b.ReportAllocs()
	for b.Loop() {
		s.deliverPost(sub, p)
	}
}

// BenchmarkMessage is a message over TLS on the loopback, CPU of both ends.
func BenchmarkMessage(b *testing.B) {
	for _, size := range []int{1 << 10, 16 << 10} {
		b.Run(fmt.Sprintf("bytes=%d", size), func(b *testing.B) {
			client, server := benchStream(b)
			packed := make([]byte, size)
			began := cpuTime(b)
			for b.Loop() {
				if err := server.Send(&dpservev1.Records{Packed: packed}); err != nil {
					b.Fatal(err)
				}
				if _, err := client.Recv(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(cpuTime(b)-began)/float64(b.N), "cpu-ns/op")
		})
	}
}

func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

type handOver struct {
	dpservev1.UnimplementedReplicaServer
	streams chan dpservev1.Replica_SubscribeServer
}

func (h *handOver) Subscribe(
	s grpc.BidiStreamingServer[dpservev1.SubscribeRequest, dpservev1.Records],
) error {
	h.streams <- s
	<-s.Context().Done()
	return nil
}

func benchStream(b *testing.B) (StreamClient, dpservev1.Replica_SubscribeServer) {
	cert := selfSigned(b)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	h := &handOver{streams: make(chan dpservev1.Replica_SubscribeServer, 1)}
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{cert},
		MinVersion:   tls.VersionTLS13,
	})))
	dpservev1.RegisterReplicaServer(server, h)
	go func() { _ = server.Serve(l) }()
	cc, err := grpc.NewClient(l.Addr().String(),
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})))
	require.NoError(b, err)
	b.Cleanup(func() { _ = cc.Close(); server.Stop() })
	client, err := dpservev1.NewReplicaClient(cc).Subscribe(b.Context())
	require.NoError(b, err)
	require.NoError(b, client.Send(&dpservev1.SubscribeRequest{}))
	return client, <-h.streams
}

func selfSigned(b *testing.B) tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(b, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(b, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
