package sim

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// Engines that move blocks talk over the side channel of the prefill engine: TCP, one question per
// connection, each message a length of 4 bytes (big-endian) and a JSON object. It stands for both channels of
// the real engines, the handshake and the memory transfer. Like theirs it has no authentication.

// What is asked.
const (
	// sideMeet: who are you? The answer holds engine and compat.
	sideMeet = "meet"
	// sideRead: what do these blocks hold? The answer holds their KV; the lease of the request ends with it.
	sideRead = "read"
	// sideBeat: the reader of this request's blocks still waits. No answer.
	sideBeat = "heartbeat"
	// sideFree: this request's blocks are not needed. No answer.
	sideFree = "free"
)

const (
	// maxSideFrame is the largest message: the KV of a prompt of a million tokens takes half of it.
	maxSideFrame  = 16 << 20
	sideIOTimeout = 5 * time.Second
	kvNumbers     = 4 // per block
)

// Reasons why a side channel refuses a question.
const (
	sideOtherEngine  = "another engine"
	sideNoSuchBlocks = "no such blocks"
)

// sideMessage is a question or an answer.
type sideMessage struct {
	Op      string   `json:"op,omitempty"`
	Engine  string   `json:"engine,omitempty"` // of the prefill engine
	Compat  string   `json:"compat,omitempty"`
	Request string   `json:"request,omitempty"` // the lease
	Blocks  []int32  `json:"blocks,omitempty"`  // as in parameters: from 1 on
	KV      []uint64 `json:"kv,omitempty"`      // four numbers per block
	TookS   float64  `json:"took_s,omitempty"`  // how long the transfer took
	Error   string   `json:"error,omitempty"`
}

var errSideFrame = errors.New("no message of a side channel")

// writeSide sends a message.
func writeSide(c net.Conn, m *sideMessage) error {
	body, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(body) > maxSideFrame {
		return fmt.Errorf("%w: %d bytes", errSideFrame, len(body))
	}
	frame := make([]byte, 0, 4+len(body))
	frame = binary.BigEndian.AppendUint32(frame, uint32(len(body)))
	if err := c.SetWriteDeadline(time.Now().Add(sideIOTimeout)); err != nil {
		return err
	}
	_, err = c.Write(append(frame, body...))
	return err
}

// readSide reads one message. Memory grows with what really comes, not with the length that is claimed.
func readSide(r io.Reader) (m sideMessage, err error) {
	var head [4]byte
	if _, err = io.ReadFull(r, head[:]); err != nil {
		return m, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxSideFrame {
		return m, fmt.Errorf("%w: %d bytes", errSideFrame, n)
	}
	var body bytes.Buffer
	if _, err = io.CopyN(&body, r, int64(n)); err != nil {
		return m, err
	}
	if err = json.Unmarshal(body.Bytes(), &m); err != nil {
		return m, fmt.Errorf("%w: %w", errSideFrame, err)
	}
	if len(m.KV)%kvNumbers != 0 {
		return m, fmt.Errorf("%w: %d numbers", errSideFrame, len(m.KV))
	}
	return m, nil
}

// setKV fills the answer of a read.
func (m *sideMessage) setKV(kv []em.BlockKV) {
	m.KV = make([]uint64, 0, kvNumbers*len(kv))
	for _, b := range kv {
		m.KV = append(m.KV, b.Sum, uint64(b.Tokens), b.PromptSum, uint64(b.PromptTokens))
	}
}

// blockKV is the opposite of setKV.
func (m *sideMessage) blockKV() []em.BlockKV {
	out := make([]em.BlockKV, 0, len(m.KV)/kvNumbers)
	for k := m.KV; len(k) >= kvNumbers; k = k[kvNumbers:] {
		out = append(out, em.BlockKV{
			Sum: k[0], Tokens: uint32(k[1]),
			PromptSum: k[2], PromptTokens: uint32(k[3]),
		})
	}
	return out
}

// namedBlocks are the numbers by which parameters name blocks of the pool; nil for none.
func namedBlocks(blocks []int32) []int32 {
	if len(blocks) == 0 {
		return nil
	}
	out := make([]int32, len(blocks))
	for i, b := range blocks {
		out[i] = b + 1
	}
	return out
}

// poolBlocks are the numbers that the engine's pool gives to blocks of parameters. vLLM has no block 0.
func poolBlocks(ids []int32) []int32 {
	out := make([]int32, len(ids))
	for i, id := range ids {
		out[i] = id - 1
	}
	return out
}

// maxSideConns bounds the connections of a side channel.
const maxSideConns = 4096

// sideServer is the side channel of one rank: what other engines ask of it. close ends it.
type sideServer struct {
	ex   *exchange
	ln   net.Listener
	quit chan struct{}

	mu    sync.Mutex
	conns map[net.Conn]struct{}
	ended bool
	wg    sync.WaitGroup
}

// openSide listens, and answers until close.
func openSide(ctx context.Context, ex *exchange) (*sideServer, error) {
	addr := ex.cfg.sideAddr(ex.number)
	ln, err := ex.cfg.listen(ctx, addr)
	if err != nil {
		return nil, fmt.Errorf("open the side channel on %s: %w", addr, err)
	}
	s := &sideServer{ex: ex, ln: ln, quit: make(chan struct{}), conns: map[net.Conn]struct{}{}}
	s.wg.Go(s.accept)
	return s, nil
}

// port is where it listens.
func (s *sideServer) port() int { return portOf(s.ln.Addr().String()) }

func (s *sideServer) close() {
	s.mu.Lock()
	if !s.ended {
		s.ended = true
		close(s.quit)
		_ = s.ln.Close()
		for c := range s.conns {
			_ = c.Close()
		}
	}
	s.mu.Unlock()
	s.wg.Wait()
}

func (s *sideServer) accept() {
	for {
		c, err := s.ln.Accept()
		if err != nil {
			return
		}
		if !s.enter(c) {
			_ = c.Close()
			continue
		}
		s.wg.Go(func() {
			defer s.leave(c)
			s.serve(c)
		})
	}
}

func (s *sideServer) enter(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || len(s.conns) >= maxSideConns {
		return false
	}
	s.conns[c] = struct{}{}
	return true
}

func (s *sideServer) leave(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	_ = c.Close()
}

// serve answers the one question of a connection.
func (s *sideServer) serve(c net.Conn) {
	_ = c.SetReadDeadline(time.Now().Add(sideIOTimeout))
	m, err := readSide(c)
	if err != nil || s.ex.rank.isDead() { // the socket is the engine core's
		return
	}
	_ = c.SetReadDeadline(time.Time{})
	gone := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() { // nothing follows a question, so a byte or an end both end the connection
		defer close(gone)
		var b [1]byte
		_, _ = c.Read(b[:])
	})
	defer watch.Wait()
	defer func() { _ = c.Close() }()
	answer := s.answer(&m, gone)
	if answer == nil || writeSide(c, answer) != nil {
		return
	}
	if answer.Error == "" && answer.Request != "" {
		s.ex.rank.submit(em.Input{Kind: em.InputLeaseRead, Name: answer.Request})
	}
}

// answer is what a question gets; nil = none. The lease that it names ends when the answer was written.
func (s *sideServer) answer(m *sideMessage, gone <-chan struct{}) *sideMessage {
	if m.Op != sideMeet && m.Engine != s.ex.id {
		return &sideMessage{Error: sideOtherEngine, Engine: s.ex.id}
	}
	switch m.Op {
	case sideMeet:
		if s.ex.faults.hit(ModeTransferMeet) != nil {
			s.outlast(gone)
			return nil
		}
		return &sideMessage{Engine: s.ex.id, Compat: s.ex.cfg.compat()}
	case sideBeat:
		s.ex.rank.submit(em.Input{Kind: em.InputLeaseExtend, Name: m.Request})
	case sideFree:
		s.ex.rank.submit(em.Input{Kind: em.InputLeaseRead, Name: m.Request})
	case sideRead:
		return s.send(m.Request, poolBlocks(m.Blocks), gone)
	}
	return nil
}

// outlast waits for the end of the connection or of the server.
func (s *sideServer) outlast(gone <-chan struct{}) {
	select {
	case <-gone:
	case <-s.quit:
	}
}

// send gives what the blocks hold at the end of the transfer, whoever owns them by then.
func (s *sideServer) send(lease string, blocks []int32, gone <-chan struct{}) *sideMessage {
	if _, ok := s.ex.rank.readBlocks(blocks); !ok {
		return &sideMessage{Error: sideNoSuchBlocks}
	}
	if s.ex.faults.hit(ModeTransferFail) != nil {
		return &sideMessage{Error: msgInjected}
	}
	took, ok := s.transfer(len(blocks), gone)
	if !ok {
		return nil
	}
	kv, _ := s.ex.rank.readBlocks(blocks)
	answer := &sideMessage{Request: lease, TookS: took.Seconds()}
	answer.setKV(kv)
	return answer
}

// transfer waits as long as the blocks need: the transfers of a rank have its bandwidth one after the other.
func (s *sideServer) transfer(blocks int, gone <-chan struct{}) (took time.Duration, ok bool) {
	begun := time.Now()
	timer := time.NewTimer(s.ex.reserve(begun, blocks))
	defer timer.Stop()
	select {
	case <-timer.C:
		return time.Since(begun), true
	case <-gone:
	case <-s.quit:
	}
	return 0, false
}
