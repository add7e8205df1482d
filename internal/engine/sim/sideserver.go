package sim

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// maxSideConns bounds the connections of a side channel; a decode request that waits for a push has one.
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
func (s *sideServer) port() int {
	_, text, err := net.SplitHostPort(s.ln.Addr().String())
	if err != nil {
		return 0
	}
	port, err := strconv.Atoi(text)
	if err != nil {
		return 0
	}
	return port
}

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
	isNamed := m.Op != sideMeet && s.ex.cfg.Transfer.Connector != ConnectorSGLang // whose rooms are enough
	if isNamed && m.Engine != s.ex.id {
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
	case sideRegister:
		return s.push(m, gone)
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

// push waits until the prefill leg of the key has ended, and sends its blocks.
func (s *sideServer) push(m *sideMessage, gone <-chan struct{}) *sideMessage {
	o := s.ex.offers.join(m.Request)
	defer s.ex.offers.quit(m.Request, o)
	forget := time.NewTimer(pushRegistration)
	defer forget.Stop()
	select {
	case <-o.made:
	case <-gone:
		return nil
	case <-s.quit:
		return nil
	case <-forget.C:
		s.outlast(gone) // the registration is forgotten, and the decode engine is not told
		return nil
	}
	lease, blocks := s.ex.offers.take(m.Request)
	switch {
	case lease == "": // its lease ended first
		s.outlast(gone)
		return nil
	case m.Count > len(blocks):
		return &sideMessage{Error: sideTooFewBlocks}
	}
	return s.send(lease, poolBlocks(blocks[len(blocks)-m.Count:]), gone)
}
