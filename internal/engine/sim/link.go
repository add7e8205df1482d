package sim

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/pause"
)

// The ranks of a lockstep group meet at rank 0 over TCP. Every message is one frame of frameSize bytes: kind,
// a flag, the rank (2 bytes), a count of 4, then 8 bytes of duration or hash; little-endian. Behind the first
// one, the hello, comes the proof that its sender belongs to the group.
const frameSize = 16

// Kinds of frames.
const (
	frameHello   byte = 'H' // member → coordinator: rank, count = size, collective hash
	frameReady   byte = 'R' // coordinator → member: the group is complete
	frameWave    byte = 'W' // member → coordinator: has work
	frameReport  byte = 'S' // member → coordinator: duration of its step, count = tokens, flag = unfinished
	frameBegin   byte = 'B' // coordinator → member: a wave begins
	frameEnd     byte = 'E' // coordinator → member: the step ended, flag = the wave goes on
	frameBroken  byte = 'X' // coordinator → member: a rank is gone
	frameTimeout      = 5 * time.Second
	dialPause         = 50 * time.Millisecond
)

type frame struct {
	kind  byte
	flag  bool
	rank  uint16
	count uint32
	value uint64
}

func (f frame) encode() [frameSize]byte {
	var b [frameSize]byte
	b[0] = f.kind
	if f.flag {
		b[1] = 1
	}
	binary.LittleEndian.PutUint16(b[2:], f.rank)
	binary.LittleEndian.PutUint32(b[4:], f.count)
	binary.LittleEndian.PutUint64(b[8:], f.value)
	return b
}

func decodeFrame(b [frameSize]byte) frame {
	return frame{
		kind: b[0], flag: b[1] == 1, rank: binary.LittleEndian.Uint16(b[2:]),
		count: binary.LittleEndian.Uint32(b[4:]), value: binary.LittleEndian.Uint64(b[8:]),
	}
}

func readFrame(c net.Conn) (frame, error) {
	var b [frameSize]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return frame{}, err
	}
	return decodeFrame(b), nil
}

func writeFrame(c net.Conn, f frame) error {
	b := f.encode()
	if err := c.SetWriteDeadline(time.Now().Add(frameTimeout)); err != nil {
		return err
	}
	_, err := c.Write(b[:])
	return err
}

// link joins this process to its group. Close ends it; the peers notice.
type link struct {
	rank  *rank
	conns []net.Conn // coordinator: by rank, own slot nil; member: the one to rank 0
	wg    sync.WaitGroup
	stop  chan struct{}
	once  sync.Once

	coordinator *coordinator // rank 0 only
}

// errMismatch ends rank 0 alone when the ranks' collectives do not fit.
var errMismatch = errors.New("configuration mismatch")

// join joins the group: it returns when all ranks have joined, at most after HandshakeTimeout.
func join(ctx context.Context, cfg *Config, r *rank) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.HandshakeTimeout)
	defer cancel()
	l := &link{rank: r, stop: make(chan struct{})}
	if cfg.DPRank == 0 {
		return l, l.gather(ctx, cfg)
	}
	return l, l.dial(ctx, cfg)
}

// gather is rank 0's side of join.
func (l *link) gather(ctx context.Context, cfg *Config) error {
	ln, err := cfg.listen(ctx, cfg.RPCAddr)
	if err != nil {
		return fmt.Errorf("open the group's meeting point: %w", err)
	}
	d := newGroupListener(ctx, ln, cfg)
	defer d.close() // no rank can join later: a group never restarts a single rank
	l.conns = make([]net.Conn, cfg.DPSize)
	for missing := cfg.DPSize - 1; missing > 0; {
		g, err := d.next()
		if err != nil {
			l.hangUp()
			return fmt.Errorf("%d of %d ranks came to the group's meeting point: %w", cfg.DPSize-missing,
				cfg.DPSize, errors.Join(context.Cause(ctx), err))
		}
		ok, err := l.welcome(g, cfg)
		if err != nil {
			l.hangUp()
			return err
		}
		if ok {
			missing--
		}
	}
	return l.open(cfg)
}

// welcome accepts a rank of the group; false = the rank has joined already or does not exist.
func (l *link) welcome(g groupCaller, cfg *Config) (bool, error) {
	rank := int(g.hello.rank)
	if int(g.hello.count) != cfg.DPSize || rank == 0 || rank >= cfg.DPSize || l.conns[rank] != nil {
		return false, g.conn.Close()
	}
	l.conns[rank] = g.conn
	if g.hello.value != cfg.collectiveHash() {
		return false, fmt.Errorf("%w detected for engine %d: all ranks of a group need equal sizes, expert "+
			"parallelism and sync interval", errMismatch, rank)
	}
	return true, nil
}

// open tells all ranks that the group is complete and starts the coordinator.
func (l *link) open(cfg *Config) error {
	group, err := em.NewGroup(cfg.groupConfig())
	if err != nil {
		return err
	}
	for _, c := range l.conns[1:] {
		if err := writeFrame(c, frame{kind: frameReady}); err != nil {
			l.hangUp()
			return fmt.Errorf("a rank left while the group was starting: %w", err)
		}
	}
	l.coordinator = newCoordinator(group, l.broadcast)
	l.rank.group = func(in em.GroupInput) { l.coordinator.tell(in) } // own rank is 0
	return nil
}

func (l *link) dial(ctx context.Context, cfg *Config) error {
	for {
		conn, err := l.hello(ctx, cfg)
		if err == nil {
			l.conns = []net.Conn{conn}
			l.rank.group = func(in em.GroupInput) { l.report(cfg.DPRank, in) }
			return nil
		}
		if cause := pause.For(ctx, dialPause); cause != nil {
			return fmt.Errorf("rank %d waited for its group in vain: %w", cfg.DPRank, errors.Join(cause, err))
		}
	}
}

func (l *link) hello(ctx context.Context, cfg *Config) (net.Conn, error) {
	conn, err := cfg.dial(ctx, cfg.RPCAddr)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()

	hello := frame{
		kind: frameHello, rank: uint16(cfg.DPRank), count: uint32(cfg.DPSize),
		value: cfg.collectiveHash(),
	}
	if err := writeHello(conn, hello, cfg.GroupKey); err != nil {
		_ = conn.Close()
		return nil, err
	}
	if f, err := readFrame(conn); err != nil || f.kind != frameReady {
		_ = conn.Close()
		return nil, errors.Join(errors.New("rank 0 did not accept this rank"), err)
	}
	return conn, nil
}

// run begins to listen to the group.
func (l *link) run() {
	if l.coordinator != nil {
		l.wg.Go(l.coordinator.run)
	}
	for i, c := range l.conns {
		if c != nil {
			l.wg.Go(func() { l.read(i, c) })
		}
	}
}

func (l *link) read(from int, c net.Conn) {
	for {
		f, err := readFrame(c)
		if err != nil {
			l.lost(from)
			return
		}
		if l.coordinator != nil {
			l.coordinator.tell(asReport(from, f))
			continue
		}
		l.rank.submit(asInput(f))
	}
}

func (l *link) lost(from int) {
	select {
	case <-l.stop: // we hung up ourselves
		return
	default:
	}
	if l.coordinator != nil {
		l.coordinator.tell(em.GroupInput{Kind: em.GroupLost, Rank: from})
		return
	}
	l.rank.submit(em.Input{Kind: em.InputPeerLost})
}

func asReport(from int, f frame) em.GroupInput {
	if f.kind == frameReport {
		return em.GroupInput{
			Kind: em.GroupReport, Rank: from, Took: time.Duration(f.value),
			Tokens: int(f.count), Unfinished: f.flag,
		}
	}
	return em.GroupInput{Kind: em.GroupWave, Rank: from}
}

func asInput(f frame) em.Input {
	switch f.kind {
	case frameBegin:
		return em.Input{Kind: em.InputGroupBegin}
	case frameEnd:
		return em.Input{Kind: em.InputGroupEnd, Continue: f.flag}
	}
	return em.Input{Kind: em.InputPeerLost}
}

// report sends a member's message to rank 0. After a failed write the reader reports a lost peer.
func (l *link) report(rank int, in em.GroupInput) {
	f := frame{kind: frameWave, rank: uint16(rank)}
	if in.Kind == em.GroupReport {
		f.kind, f.flag, f.count, f.value = frameReport, in.Unfinished, uint32(in.Tokens), uint64(in.Took)
	}
	if err := writeFrame(l.conns[0], f); err != nil {
		_ = l.conns[0].Close()
	}
}

// broadcast sends the coordinator's message to all ranks, the own one included.
func (l *link) broadcast(e em.GroupEffect) {
	f := frame{kind: frameBroken}
	switch e.Kind {
	case em.GroupBegin:
		f.kind = frameBegin
	case em.GroupEnd:
		f.kind, f.flag = frameEnd, e.Continue
	case em.GroupBroken:
	}
	for _, c := range l.conns[1:] {
		if err := writeFrame(c, f); err != nil {
			_ = c.Close() // its reader reports the loss
		}
	}
	l.rank.submit(asInput(f))
}

func (l *link) hangUp() {
	for _, c := range l.conns {
		if c != nil {
			_ = c.Close()
		}
	}
}

// close leaves the group and waits for the readers.
func (l *link) close() {
	l.once.Do(func() {
		close(l.stop)
		l.hangUp()
		if l.coordinator != nil {
			close(l.coordinator.stop)
		}
	})
	l.wg.Wait()
}

// coordinator drives the group's state machine by wall time, in rank 0.
type coordinator struct {
	group *em.Group
	say   func(em.GroupEffect)
	zero  time.Time
	stop  chan struct{}
	kick  chan struct{}

	mu    sync.Mutex
	inbox []em.GroupInput // at most one wave and one report per rank and step
}

func newCoordinator(group *em.Group, say func(em.GroupEffect)) *coordinator {
	return &coordinator{
		group: group, say: say, zero: time.Now(), stop: make(chan struct{}),
		kick: make(chan struct{}, 1),
	}
}

// tell never blocks.
func (c *coordinator) tell(in em.GroupInput) {
	c.mu.Lock()
	c.inbox = append(c.inbox, in)
	c.mu.Unlock()
	kick(c.kick)
}

func (c *coordinator) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		wait := c.turn() - time.Since(c.zero)
		if wait <= 0 {
			select {
			case <-c.stop:
				return
			default:
				continue
			}
		}
		timer.Reset(min(wait, time.Hour))
		select {
		case <-c.kick:
		case <-timer.C:
		case <-c.stop:
			return
		}
	}
}

func (c *coordinator) turn() time.Duration {
	c.mu.Lock()
	in := c.inbox
	c.inbox = nil
	c.mu.Unlock()
	effects, wake := c.group.Step(time.Since(c.zero), in)
	for _, e := range effects {
		c.say(e)
	}
	return wake
}

// maxUnknownCallers bounds the connections to a groupListener that have not sent their hello.
const maxUnknownCallers = 64

// groupListener is rank 0's listener while it waits for the group. Unknown and silent callers do not delay
// the others.
type groupListener struct {
	//nolint:containedctx // it ends with close: the goroutines that listen to callers live as long
	ctx    context.Context
	cancel context.CancelFunc
	ln     net.Listener
	cfg    *Config
	guests chan groupCaller
	work   sync.WaitGroup
	failed chan error // one slot: the listener's end
}

// groupCaller is a caller that has proved to belong to this group.
type groupCaller struct {
	conn  net.Conn
	hello frame
}

func newGroupListener(ctx context.Context, ln net.Listener, cfg *Config) *groupListener {
	d := &groupListener{ln: ln, cfg: cfg, guests: make(chan groupCaller), failed: make(chan error, 1)}
	d.ctx, d.cancel = context.WithCancel(ctx)
	d.work.Go(d.accept)
	return d
}

// next gives the next rank that came, or why none will.
func (d *groupListener) next() (groupCaller, error) {
	select {
	case g := <-d.guests:
		return g, nil
	case err := <-d.failed:
		return groupCaller{}, err
	case <-d.ctx.Done():
		return groupCaller{}, context.Cause(d.ctx)
	}
}

// close closes the listener and all callers that were not accepted.
func (d *groupListener) close() {
	d.cancel()
	_ = d.ln.Close() // nothing is lost with it
	d.work.Wait()
}

func (d *groupListener) accept() {
	slots := make(chan struct{}, maxUnknownCallers)
	for {
		select {
		case slots <- struct{}{}:
		case <-d.ctx.Done():
			return
		}
		conn, err := d.ln.Accept()
		if err != nil {
			d.failed <- err
			return
		}
		d.work.Go(func() {
			d.receive(conn)
			<-slots
		})
	}
}

// receive listens to one caller.
func (d *groupListener) receive(conn net.Conn) {
	stop := context.AfterFunc(d.ctx, func() { _ = conn.Close() })
	hello, ok := readHello(conn, d.cfg.GroupKey)
	// stopped before it is handed on: the end of the meeting must not close what was welcomed
	if !stop() || !ok {
		_ = conn.Close()
		return
	}
	select {
	case d.guests <- groupCaller{conn, hello}:
	case <-d.ctx.Done():
		_ = conn.Close()
	}
}

// proof shows that a hello comes from a rank of the group: only those of the same start know the key.
func proof(hello frame, key string) []byte {
	b := hello.encode()
	h := hmac.New(sha256.New, []byte(key))
	h.Write(b[:])
	return h.Sum(nil)
}

func writeHello(c net.Conn, hello frame, key string) error {
	if err := writeFrame(c, hello); err != nil {
		return err
	}
	_, err := c.Write(proof(hello, key)) // under the deadline of the frame
	return err
}

// readHello reads the caller's hello; false if the caller does not belong to the group.
func readHello(c net.Conn, key string) (frame, bool) {
	deadline := c.SetReadDeadline(time.Now().Add(frameTimeout))
	hello, err := readFrame(c)
	said := make([]byte, sha256.Size)
	_, errProof := io.ReadFull(c, said)
	err = errors.Join(deadline, err, errProof, c.SetReadDeadline(time.Time{}))
	return hello, err == nil && hello.kind == frameHello && hmac.Equal(said, proof(hello, key))
}
