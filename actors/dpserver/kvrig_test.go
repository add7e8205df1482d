package dpserver

import (
	"context"
	"encoding/binary"
	"math"
	"net"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/kvevents/zmtp"
	"github.com/dpserve/dpserve/routing/kvindex"
	"github.com/dpserve/dpserve/test/memnet"
)

// testHasher has no secret, as the Factory of newRig.
var testHasher = kvindex.NewHasher(nil)

// prompt is the chain hashes of ids in blocks of 4, as an ingress makes them.
func prompt(ids ...uint32) []uint64 { return salted(kvindex.Salt{}, ids...) }

func salted(salt kvindex.Salt, ids ...uint32) []uint64 {
	salt.Unit, salt.BlockSize, salt.Model = kvindex.Tokens, 4, "demo"
	return testHasher.Tokens(nil, testHasher.Root(salt), ids, 4, nil)
}

// ids is n token ids that start at from.
func ids(from uint32, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = from + uint32(i)
	}
	return out
}

// reader rebuilds a rank's block sets from its stream alone, as an ingress does; it never asks for a
// snapshot.
type reader struct {
	t     require.TestingT
	ix    *kvindex.Index
	sets  [tiers]*kvindex.BlockSet
	whole [tiers]bool // RecKVEnd was there
	size  [tiers]int
	ends  int // RecKVEnd with blocks
	seq   uint64
}

// applyInOrder is apply of a reader that gets every record, and drops one with an unexpected number.
func (f *reader) applyInOrder(rec *msg.Record) {
	switch {
	case rec.Kind == msg.RecSnapshot:
	case rec.Seq == f.seq && rec.Kind >= msg.RecKVBegin: // of a list
	default:
		require.Equal(f.t, f.seq+1, rec.Seq)
	}
	f.seq = rec.Seq
	f.apply(rec)
}

func newReader(t require.TestingT) *reader {
	ix, err := kvindex.New(kvindex.Config{Bytes: 8 << 20})
	require.NoError(t, err)
	return &reader{t: t, ix: ix}
}

func (f *reader) apply(rec *msg.Record) {
	kv := &rec.KV
	switch rec.Kind {
	case msg.RecSnapshot, msg.RecGone: // block sets that are not in the snapshot are gone
		for t, c := range f.sets {
			if c != nil {
				c.Close()
			}
			f.sets[t] = nil
		}
	case msg.RecKVBegin:
		c, err := f.ix.Open(kvindex.Owner{
			Rank: uint32(rec.Rank), Tier: kv.Tier, Epoch: rec.Epoch,
			Incarnation: rec.Incarnation,
		}, kvindex.Options{Feed: kvindex.FromDeltas, Shown: true})
		require.NoError(f.t, err)
		f.sets[kv.Tier], f.whole[kv.Tier], f.size[kv.Tier] = c, false, kv.BlockSize
	case msg.RecKV:
		require.NotNil(f.t, f.sets[kv.Tier], "a block set that was never begun")
		require.LessOrEqual(f.t, len(kv.Delta.Hashes), partBlocks)
		f.sets[kv.Tier].Apply(kv.Delta)
	case msg.RecKVEnd:
		f.whole[kv.Tier] = true
		if f.sets[kv.Tier].Len() > 0 {
			f.ends++
		}
	default:
	}
}

// blockSums is equal in readers that hold the same blocks.
func (f *reader) blockSums() map[kvindex.Tier][2]uint64 {
	out := map[kvindex.Tier][2]uint64{}
	for t, c := range f.sets {
		if c != nil && c.Len() > 0 {
			require.True(f.t, f.whole[t])
			sum := uint64(0)
			c.Snapshot(c.Len(), func(d kvindex.Delta) {
				for _, h := range d.Hashes {
					sum += h
				}
			})
			out[kvindex.Tier(t)] = [2]uint64{uint64(c.Len()), sum}
		}
	}
	return out
}

// hit is how many leading blocks a tier holds.
func (f *reader) hit(tier kvindex.Tier, blocks []uint64) int {
	for _, h := range f.ix.Match(blocks, nil) {
		if h.Tier == tier {
			return int(h.Blocks)
		}
	}
	return 0
}

// follow applies the rig's new records.
func (f *reader) follow(r *testRig) {
	synctest.Wait()
	for _, rec := range r.tape.take() {
		f.apply(&rec)
	}
}

// newSubscriber is a reader that subscribes now.
func (r *testRig) newSubscriber(t require.TestingT) *reader {
	late := &recordingSink{}
	cancel := r.hub.Subscribe(late)
	synctest.Wait()
	f := newReader(t)
	for _, rec := range late.take() {
		f.apply(&rec)
	}
	cancel()
	return f
}

// notifyRecorder tells the recorder that events wait.
func (r *testRig) notifyRecorder(in *eventQueue) { r.recorder.box.Send(eventsQueued{in}) }

// queued is notifyRecorder, and waits.
func (r *testRig) queued(in *eventQueue) {
	r.notifyRecorder(in)
	synctest.Wait()
}

// sendPrompt admits a prompt of which the sender's index expects hitBlocks blocks, and returns its ticket.
func (r *testRig) sendPrompt(blocks []uint64, hitBlocks int) uint64 {
	rep := r.ask(func(a *msg.Admit) {
		a.Tokens, a.Blocks, a.Hit, a.HitBlocks = 4*len(blocks), append([]uint64(nil), blocks...), 4*hitBlocks,
			hitBlocks
	})
	require.Equal(r.t, msg.Granted, rep.Refusal)
	return rep.Ticket.ID
}

type list = []any

// storedBlocks is a BlockStored of blocks of 4 tokens, named 1000·salt + their first token.
func storedBlocks(salt int, parent any, tokens []uint32, more ...any) list {
	hashes := list{}
	for i := 0; i < len(tokens); i += 4 {
		hashes = append(hashes, 1000*salt+int(tokens[i]))
	}
	return append(list{"BlockStored", hashes, parent, tokens, 4}, more...)
}

func removedBlocks(names ...int) list {
	hashes := list{}
	for _, n := range names {
		hashes = append(hashes, n)
	}
	return list{"BlockRemoved", hashes}
}

// publisher is an engine's event sockets in memory. It binds, or dials if the rank listens.
type publisher struct {
	t      *testing.T
	net    *memnet.Network
	pub    *zmtp.Server
	router *zmtp.Server

	mu    sync.Mutex
	subs  []*zmtp.Conn
	ring  [][]byte
	first int // number of ring[0]
	asked []uint64
	clock float64
}

const pubAddr, replayAddr = "127.0.0.1:5557", "127.0.0.1:5558"

func newPublisher(t *testing.T, network *memnet.Network) *publisher {
	p := &publisher{t: t, net: network}
	p.pub = p.bind(pubAddr, zmtp.Pub, p.subscriber)
	p.router = p.bind(replayAddr, zmtp.Router, p.replay)
	return p
}

func (p *publisher) bind(addr string, role zmtp.Role, handle func(*zmtp.Conn)) *zmtp.Server {
	l, err := p.net.Listen(addr)
	require.NoError(p.t, err)
	s := zmtp.NewServer(l, role, zmtp.DefaultLimits(), 8, nil, handle)
	s.Start()
	return s
}

func (p *publisher) close() {
	assert.NoError(p.t, p.pub.Close())
	assert.NoError(p.t, p.router.Close())
}

// subscriber is one connection of a subscriber.
func (p *publisher) subscriber(c *zmtp.Conn) {
	if _, err := c.Recv(); err != nil {
		return
	}
	p.mu.Lock()
	p.subs = append(p.subs, c)
	p.mu.Unlock()
	_, _ = c.Recv()
}

func (p *publisher) replay(c *zmtp.Conn) {
	m, err := c.Recv()
	if err != nil || len(m) != 2 || len(m[1]) != 8 {
		return
	}
	from := binary.BigEndian.Uint64(m[1])
	p.mu.Lock()
	p.asked = append(p.asked, from)
	ring, first := p.ring, p.first
	p.mu.Unlock()
	for i, payload := range ring {
		if n := uint64(first + i); n >= from {
			_ = c.Send(nil, nil, number(n), payload)
		}
	}
	_ = c.Send(nil, nil, number(math.MaxUint64), nil)
	_, _ = c.Recv()
}

func number(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// batch makes the next batch and keeps it for replays.
func (p *publisher) batch(events ...any) (seq uint64, payload []byte) {
	p.clock++
	payload, err := msgpack.Marshal(list{p.clock, events, 0})
	require.NoError(p.t, err)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ring = append(p.ring, payload)
	return uint64(p.first + len(p.ring) - 1), payload
}

// publish sends one batch to the newest subscriber.
func (p *publisher) publish(events ...any) {
	p.raw(p.batch(events...))
}

func (p *publisher) raw(seq uint64, payload []byte) {
	p.mu.Lock()
	c := p.subs[len(p.subs)-1]
	p.mu.Unlock()
	require.NoError(p.t, c.Send(nil, number(seq), payload))
	synctest.Wait()
}

// restart replaces the process behind the sockets: its ring is empty, its numbers begin at 0.
func (p *publisher) restart() {
	p.mu.Lock()
	p.ring, p.first = nil, 0
	p.mu.Unlock()
	p.pub.DropAll()
	synctest.Wait()
}

// withPublisher runs a test with a rank that follows a publisher by connecting, with replay or without, for
// identity tokens.
func withPublisher(
	t *testing.T, owned, replay bool, f func(t *testing.T, r *testRig, p *publisher),
	change ...func(f *Factory, spec *msg.ReplicaSpec),
) {
	synctest.Test(t, func(t *testing.T) {
		network := &memnet.Network{}
		p := newPublisher(t, network)
		src := &msg.EventSource{Connect: "tcp://" + pubAddr}
		if replay {
			src.Replay = "tcp://" + replayAddr
		}
		r := newRig(t, owned, func(f *Factory, spec *msg.ReplicaSpec) {
			overNetwork(network)(f, spec)
			spec.Events = src
			for _, c := range change {
				c(f, spec)
			}
		})
		t.Cleanup(p.close)
		synctest.Wait()
		require.NoError(t, r.Ready(t.Context(),
			msg.Facts{Incarnation: 7, MaxOngoing: 99, BlockSize: 4, Blocks: 1000}))
		synctest.Wait()
		f(t, r, p)
	})
}

// overNetwork sends KV events over network, for an app with identity tokens.
func overNetwork(network *memnet.Network) func(f *Factory, spec *msg.ReplicaSpec) {
	return func(f *Factory, spec *msg.ReplicaSpec) {
		f.DialEvents = func(ctx context.Context, addr string) (net.Conn,
			error,
		) {
			return network.DialContext(ctx, "tcp", addr)
		}
		f.ListenEvents = func(_ context.Context, addr string) (net.Listener,
			error,
		) {
			return network.Listen(addr)
		}
		spec.App.Routing.Identity = app.IdentityTokens
	}
}
