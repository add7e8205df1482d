package noderpc

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// fakeRank is a DPServer: an actor with an account, KV block sets and a stream.
type fakeRank struct {
	hub  *msg.Hub
	node string
	id   identity
	work chan func()
	quit chan struct{}
	done chan struct{}

	// below: its own goroutine
	subs      []*msg.Subscription
	seq       uint64
	accepting bool
	open      map[uint64]msg.OpenRequest
	sets      map[kvindex.Tier]map[uint64]bool
	got       []any // posted
	lists     int   // that other nodes have asked for
	ended     bool
}

func startRank(hub *msg.Hub, node string, id identity) *fakeRank {
	r := &fakeRank{
		hub: hub, node: node, id: id, work: make(chan func(), 1<<16), quit: make(chan struct{}),
		done: make(chan struct{}), accepting: true,
		open: map[uint64]msg.OpenRequest{}, sets: map[kvindex.Tier]map[uint64]bool{},
	}
	go func() {
		defer close(r.done)
		for {
			select {
			case f := <-r.work:
				f()
			case <-r.quit:
				return
			}
		}
	}()
	r.post(func() {
		for _, sub := range hub.AddRank(r) {
			r.list(sub)
		}
	})
	return r
}

// List implements msg.Source.
func (r *fakeRank) List(sub *msg.Subscription) { r.post(func() { r.list(sub) }) }

func (r *fakeRank) list(sub *msg.Subscription) {
	if !slices.Contains(r.subs, sub) {
		r.subs = append(r.subs, sub)
	}
	r.snapshot(sub)
}

// Forget implements msg.Source.
func (r *fakeRank) Forget(sub *msg.Subscription) {
	r.post(func() { r.subs = slices.DeleteFunc(r.subs, func(o *msg.Subscription) bool { return o == sub }) })
}

func (r *fakeRank) post(f func()) {
	select {
	case r.work <- f:
	case <-r.done:
	}
}

// do runs f as the actor, and waits.
func (r *fakeRank) do(f func()) {
	done := make(chan struct{})
	r.post(func() { f(); close(done) })
	<-done
}

// stop ends the rank.
func (r *fakeRank) stop() {
	r.hub.Remove(r)
	r.do(func() {
		r.emit(msg.Record{Kind: msg.RecGone})
		r.ended = true
	})
	close(r.quit)
	<-r.done
}

func (r *fakeRank) TrySend(m any) error {
	r.Send(m)
	return nil
}

func (r *fakeRank) Send(m any) {
	r.post(func() {
		if ask, ok := m.(msg.List); ok {
			r.lists++
			r.snapshot(ask.Sink)
			close(ask.Done)
			return
		}
		r.got = append(r.got, m)
	})
}

func (r *fakeRank) Stopped() <-chan struct{} { return r.done }

func (r *fakeRank) stamp(rec *msg.Record) {
	rec.App, rec.Unit, rec.Rank, rec.Epoch, rec.Incarnation, rec.Seq = r.id.app, r.id.unit, r.id.rank,
		r.id.epoch, r.id.incarnation, r.seq
}

func (r *fakeRank) emit(rec msg.Record) {
	r.seq++
	r.stamp(&rec)
	for _, sub := range r.subs {
		sub.Deliver(&rec)
	}
}

// publish sends all sinks the account: a new incarnation, or one after a panic.
func (r *fakeRank) publish() {
	for _, sub := range r.subs {
		r.snapshot(sub)
	}
}

func (r *fakeRank) snapshot(sub msg.Sink) {
	give := func(rec msg.Record) {
		r.stamp(&rec)
		sub.Deliver(&rec)
	}
	state := msg.RankState{Accepting: r.accepting}
	give(msg.Record{Kind: msg.RecSnapshot, RankState: state, Snapshot: &msg.Snapshot{
		Accepting: r.accepting, MaxOngoing: 8, BlockSize: 16, Node: r.node,
		Target:  msg.Target{URL: "http://127.0.0.1:1", Addressing: "url"},
		Mailbox: r, Open: slices.Collect(maps.Values(r.open)),
	}})
	for tier, blockSet := range r.sets {
		give(msg.Record{Kind: msg.RecKVBegin, KV: msg.KV{Tier: tier, BlockSize: 16}})
		hashes := slices.Collect(maps.Keys(blockSet))
		for part := range slices.Chunk(hashes, maxHashes) {
			give(msg.Record{
				Kind: msg.RecKV,
				KV:   msg.KV{Tier: tier, Delta: kvindex.Delta{Change: kvindex.Stored, Hashes: part}},
			})
		}
		give(msg.Record{Kind: msg.RecKVEnd, KV: msg.KV{Tier: tier}})
	}
}

// admit and finish begin and end a request.
func (r *fakeRank) admit(id uint64, ingress string) {
	r.open[id] = msg.OpenRequest{ReqID: id, Ingress: ingress, Tokens: 100}
	r.emit(msg.Record{Kind: msg.RecAdmitted, ReqID: id, Ingress: ingress, Tokens: 100})
}

func (r *fakeRank) finish(id uint64) {
	o := r.open[id]
	delete(r.open, id)
	r.emit(msg.Record{Kind: msg.RecDone, ReqID: id, Ingress: o.Ingress, Tokens: o.Tokens})
}

// store puts blocks into a block set.
func (r *fakeRank) store(tier kvindex.Tier, hashes ...uint64) {
	if r.sets[tier] == nil {
		r.sets[tier] = map[uint64]bool{}
		r.emit(msg.Record{Kind: msg.RecKVBegin, KV: msg.KV{Tier: tier, BlockSize: 16}})
		r.emit(msg.Record{Kind: msg.RecKVEnd, KV: msg.KV{Tier: tier}})
	}
	for _, h := range hashes {
		r.sets[tier][h] = true
	}
	for part := range slices.Chunk(hashes, maxHashes) {
		r.emit(msg.Record{
			Kind: msg.RecKV,
			KV:   msg.KV{Tier: tier, Delta: kvindex.Delta{Change: kvindex.Stored, Hashes: part}},
		})
	}
}

func (r *fakeRank) remove(tier kvindex.Tier, hashes ...uint64) {
	if r.sets[tier] == nil {
		return
	}
	for _, h := range hashes {
		delete(r.sets[tier], h)
	}
	r.emit(msg.Record{
		Kind: msg.RecKV,
		KV:   msg.KV{Tier: tier, Delta: kvindex.Delta{Change: kvindex.Removed, Hashes: hashes}},
	})
}

// rankView is what a reader knows about a rank.
type rankView struct {
	id                identity
	node              string
	seq               uint64
	accepting, fenced bool
	open              map[uint64]msg.OpenRequest
	sets              map[kvindex.Tier]map[uint64]bool
	silent            bool
	box               msg.Mailbox
}

// reader is a sink that keeps a view of every rank, as an ingress does.
type reader struct {
	t  testing.TB
	mu sync.Mutex

	ranks map[appRank]*rankView
	notes []note // silence and ends, with their times
	count int
	gaps  int // records that were missed
}

type note struct {
	rank routing.RankID
	what string
	at   time.Duration
}

func newReader(t testing.TB) *reader { return &reader{t: t, ranks: map[appRank]*rankView{}} }

func (r *reader) Deliver(rec *msg.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count++
	id := identityOf(rec)
	p := r.ranks[id.key()]
	if rec.Kind == msg.RecSnapshot {
		r.begin(p, id, rec)
		return
	}
	switch {
	case p == nil || p.id != id:
		return
	case rec.Kind == msg.RecGone:
		delete(r.ranks, id.key())
		r.note(rec.Rank, "gone")
		return
	case rec.Kind == msg.RecSilent:
		p.silent = rec.Silent
		r.note(rec.Rank, map[bool]string{true: "silent", false: "heard"}[rec.Silent])
		return
	case rec.Seq > p.seq+1:
		r.gaps++
	}
	p.seq = rec.Seq
	p.apply(rec)
}

func (r *reader) begin(p *rankView, id identity, rec *msg.Record) {
	if p != nil && p.id.epoch > id.epoch {
		return
	}
	next := &rankView{
		id: id, node: rec.Snapshot.Node, seq: rec.Seq, accepting: rec.Snapshot.Accepting,
		open: map[uint64]msg.OpenRequest{},
		sets: map[kvindex.Tier]map[uint64]bool{}, box: rec.Snapshot.Mailbox,
	}
	for _, o := range rec.Snapshot.Open {
		next.open[o.ReqID] = o
	}
	r.ranks[id.key()] = next
}

func (p *rankView) apply(rec *msg.Record) {
	switch tier := rec.KV.Tier; rec.Kind {
	case msg.RecAdmitted:
		p.open[rec.ReqID] = msg.OpenRequest{ReqID: rec.ReqID, Ingress: rec.Ingress, Tokens: rec.Tokens}
	case msg.RecDone:
		delete(p.open, rec.ReqID)
	case msg.RecState:
		p.accepting, p.fenced = rec.Accepting, rec.Fenced
	case msg.RecKVBegin:
		p.sets[tier] = map[uint64]bool{}
	case msg.RecKV:
		for _, h := range rec.KV.Delta.Hashes {
			if rec.KV.Delta.Change == kvindex.Stored && p.sets[tier] != nil {
				p.sets[tier][h] = true
			} else {
				delete(p.sets[tier], h)
			}
		}
	default: // not part of the view
	}
}

var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC) // the start of the fake clock

func (r *reader) note(rank routing.RankID, what string) {
	r.notes = append(r.notes, note{rank, what, time.Since(epoch)})
}

// ids are the names of the known ranks.
func (r *reader) ids() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for _, p := range r.ranks {
		out = append(out, fmt.Sprintf("%s#%d.%d", p.id.unit, p.id.epoch, p.id.incarnation))
	}
	slices.Sort(out)
	return out
}

func (r *reader) get(id identity) *rankView {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ranks[id.key()]
}

// takeNotes returns the notes since the last call, with times relative to since.
func (r *reader) takeNotes(since time.Time) (out []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.notes {
		out = append(out, fmt.Sprintf("%s %s %s", n.rank, n.what,
			(n.at-since.Sub(epoch)).Round(10*time.Millisecond)))
	}
	slices.Sort(out)
	r.notes = nil
	return out
}

// assertEqual asserts that the reader's view is the rank's own account.
func (r *reader) assertEqual(t assert.TestingT, rank *fakeRank) {
	rank.do(func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		p := r.ranks[rank.id.key()]
		if !assert.NotNil(t, p, "%s is not known", rank.id.unit) {
			return
		}
		assert.Equal(t, rank.id, p.id)
		assert.Equal(t, rank.node, p.node)
		assert.Equal(t, rank.seq, p.seq)
		assert.Equal(t, rank.accepting, p.accepting)
		assert.Equal(t, rank.open, p.open)
		assert.Equal(t, rank.sets, p.sets)
		assert.False(t, p.silent)
		assert.Zero(t, r.gaps)
	})
}

// nodeStore is a msg.Store of nodes.
type nodeStore struct {
	mu      sync.Mutex
	st      *state.State
	changed chan struct{}
}

func newNodeStore() *nodeStore { return &nodeStore{st: &state.State{}, changed: make(chan struct{})} }

func (b *nodeStore) State() *state.State {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.st
}

func (b *nodeStore) Changed() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.changed
}

func (b *nodeStore) change(f func(nodes map[string]*state.Node)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	nodes := map[string]*state.Node{}
	for id, n := range b.st.Nodes {
		c := *n
		nodes[id] = &c
	}
	f(nodes)
	b.st = &state.State{Nodes: nodes}
	close(b.changed)
	b.changed = make(chan struct{})
}

// streamNet is worker nodes and ingresses over connections in memory.
type streamNet struct {
	t       testing.TB
	book    *nodeStore
	log     *slog.Logger
	mu      sync.Mutex
	workers map[string]*workerNode
	conns   map[string][]*faultyConn // by node
}

func newStreamNet(t testing.TB) *streamNet {
	return &streamNet{
		t: t, book: newNodeStore(), log: slog.New(slog.DiscardHandler), workers: map[string]*workerNode{},
		conns: map[string][]*faultyConn{},
	}
}

// workerNode is a node with ranks.
type workerNode struct {
	c       *streamNet
	id      string
	hub     *msg.Hub
	ranks   []*fakeRank
	streams *StreamServer

	served           []net.Conn // guarded by c.mu
	isDown, isFrozen bool       // as above
}

func (c *streamNet) worker(id string) *workerNode {
	w := &workerNode{c: c, id: id, hub: msg.NewHub()}
	w.listen()
	c.mu.Lock()
	c.workers[id] = w
	c.mu.Unlock()
	c.book.change(func(nodes map[string]*state.Node) {
		nodes[id] = &state.Node{
			ID: id, UID: id + "-uid", Address: id + ":7947",
			Roles: []state.Role{state.RoleWorker},
		}
	})
	return w
}

// namedConn is a served connection whose peer is known.
type namedConn struct {
	net.Conn
	peer string
}

func peerOfConn(c net.Conn) string { return c.(namedConn).peer }

func (w *workerNode) listen() {
	w.streams = NewStreamServer(StreamServerConfig{Feed: w.hub.Near(), Peer: peerOfConn, Log: w.c.log})
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	w.isDown = false
}

// kill ends the node's process: its kernel resets every connection.
func (w *workerNode) kill() {
	w.c.mu.Lock()
	w.isDown = true
	served := w.served
	w.served = nil
	w.c.mu.Unlock()
	for _, conn := range served {
		_ = conn.Close()
	}
	w.streams.Close()
}

// open connects an ingress with a node.
func (c *streamNet) open(ingress string, to *state.Node) (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.workers[to.ID]
	if w.isDown {
		return nil, syscall.ECONNREFUSED
	}
	here, there := net.Pipe()
	w.served = append(w.served, there)
	w.streams.addStream(namedConn{there, ingress})
	f := &faultyConn{Conn: here, frozen: w.isFrozen}
	f.cond = sync.NewCond(&f.mu)
	c.conns[to.ID] = append(c.conns[to.ID], f)
	return f, nil
}

func (w *workerNode) rank(rank int, incarnation uint64) *fakeRank {
	return w.start(identity{
		app: "chat", unit: fmt.Sprintf("chat/0/%d", rank), rank: routing.ID(0, rank), epoch: 1,
		incarnation: incarnation,
	})
}

func (w *workerNode) start(id identity) *fakeRank {
	r := startRank(w.hub, w.id, id)
	w.ranks = append(w.ranks, r)
	return r
}

func (w *workerNode) stopRank(r *fakeRank) {
	w.ranks = slices.DeleteFunc(w.ranks, func(o *fakeRank) bool { return o == r })
	r.stop()
}

func (w *workerNode) stop() {
	for len(w.ranks) > 0 {
		w.stopRank(w.ranks[0])
	}
	w.kill()
}

// ingressNode is a node with an ingress.
type ingressNode struct {
	*reader
	hub    *msg.Hub
	links  *RankLinks
	cancel func()
}

// ingress makes an ingress beside the ranks of hub; nil: it has none.
func (c *streamNet) ingress(id string, hub *msg.Hub) *ingressNode {
	n := &ingressNode{reader: newReader(c.t), hub: hub}
	if hub == nil {
		n.hub = msg.NewHub()
	}
	n.cancel = n.hub.Subscribe(n.reader) // before a stream lists ranks, so that none lists them twice
	n.links = NewRankLinks(RankLinksConfig{
		Self: id, Hub: n.hub, Store: c.book, Log: c.log,
		Open: func(_ context.Context, to state.Node) (net.Conn, error) { return c.open(id, &to) },
	})
	return n
}

func (n *ingressNode) stop() {
	n.cancel()
	n.links.Close()
}

// faultyConn can stop carrying bytes, like a connection to a node without power.
type faultyConn struct {
	net.Conn
	mu     sync.Mutex
	cond   *sync.Cond
	frozen bool
	closed bool
}

func (f *faultyConn) wait() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.frozen && !f.closed {
		f.cond.Wait()
	}
}

func (f *faultyConn) Read(b []byte) (int, error) {
	f.wait()
	n, err := f.Conn.Read(b)
	f.wait()
	return n, err
}

func (f *faultyConn) Write(b []byte) (int, error) {
	f.wait()
	return f.Conn.Write(b)
}

func (f *faultyConn) Close() error {
	f.mu.Lock()
	f.closed = true
	f.cond.Broadcast()
	f.mu.Unlock()
	return f.Conn.Close()
}

// freeze stops or resumes all traffic between a node and the others.
func (c *streamNet) freeze(node string, on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.workers[node].isFrozen = on
	for _, f := range c.conns[node] {
		f.mu.Lock()
		f.frozen = on
		f.cond.Broadcast()
		f.mu.Unlock()
	}
}

// reset breaks all connections to a node, which still listens.
func (c *streamNet) reset(node string) {
	c.mu.Lock()
	list := c.conns[node]
	c.conns[node] = nil
	c.mu.Unlock()
	for _, f := range list {
		_ = f.Close()
	}
}

// settle lets everything that is on its way arrive.
func settle() {
	time.Sleep(100 * time.Millisecond)
	synctest.Wait()
}

// stream opens one by hand.
func (c *streamNet) stream(ingress string) net.Conn {
	conn, err := c.open(ingress, c.book.State().Nodes["n1"])
	require.NoError(c.t, err, ingress)
	return conn
}

// lastWord reads a stream to its end, and returns why it has ended.
func lastWord(conn net.Conn) error {
	defer conn.Close()
	in := newUnpacker(&unpackStats{})
	for buf := make([]byte, readBytes); ; {
		n, err := conn.Read(buf)
		if err = cmp.Or(in.unpack(buf[:n], discardRecords{}), err); err != nil {
			return err
		}
	}
}

// discardRecords is a recordHandler that does nothing.
type discardRecords struct{}

func (discardRecords) record(*remoteRank, *msg.Record) {}
func (discardRecords) listed()                         {}
