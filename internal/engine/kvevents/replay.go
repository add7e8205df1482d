package kvevents

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/dpserve/dpserve/internal/engine/kvevents/zmtp"
)

// Limits of replays.
const (
	maxReplays    = 8                // at a time, per Replays
	replayStall   = 2 * time.Second  // without an answer, first or next
	replayTotal   = 20 * time.Second // of one attempt: a ring of 10,000 batches takes a while
	replayBacklog = 64               // batches between the reader and the tracker
)

// errReplay is the reason of a replay that failed.
var errReplay = errors.New("replay answer is malformed")

// Replays bounds how many replays run at a time, for all subscriptions that share it. Nil-safe: nil bounds
// nothing.
type Replays struct{ slots chan struct{} }

// NewReplays allows maxReplays at a time.
func NewReplays() *Replays { return &Replays{slots: make(chan struct{}, maxReplays)} }

func (r *Replays) enter(ctx context.Context) error {
	if r == nil {
		return nil
	}
	select {
	case r.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (r *Replays) leave() {
	if r != nil {
		<-r.slots
	}
}

// answer is one step of a replay: a batch, or its end.
type answer struct {
	id  uint64
	msg message
	end bool
	err error
}

// replay asks the engine for its batches from a.from on and passes them to out, then the end. Each replay has
// its own DEALER and closes it, so no answer of one replay can reach the next. It ends with ctx at the
// latest; the caller reads out until then.
func (s *Subscriber) replay(ctx context.Context, a ask, out chan<- answer) {
	err := s.cfg.Replays.enter(ctx)
	if err == nil {
		err = s.runReplay(ctx, a, out)
		s.cfg.Replays.leave()
	}
	if err != nil {
		s.log.Debug("kv event replay failed", "from", a.from, "error", err.Error())
	}
	select {
	case out <- answer{id: a.id, end: true, err: err}:
	case <-ctx.Done():
	}
}

func (s *Subscriber) runReplay(ctx context.Context, a ask, out chan<- answer) error {
	ctx, cancel := context.WithTimeout(ctx, replayTotal)
	defer cancel()
	c, err := s.openReplay(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	if err := c.Send(nil, binary.BigEndian.AppendUint64(nil, a.from)); err != nil {
		return fmt.Errorf("ask for a replay: %w", err)
	}
	for {
		if err := c.SetReadDeadline(time.Now().Add(replayStall)); err != nil {
			return err
		}
		frames, err := c.Recv()
		if err != nil {
			return fmt.Errorf("wait for a replay: %w", err)
		}
		m, end, err := replayReply(frames)
		if err != nil || end {
			return err
		}
		select {
		case out <- answer{id: a.id, msg: m}:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *Subscriber) openReplay(ctx context.Context) (*zmtp.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, replayStall)
	defer cancel()
	c, err := zmtp.Dial(ctx, s.cfg.Dial, s.addr.replay, zmtp.Dealer, zmtp.DefaultLimits())
	if err != nil {
		return nil, fmt.Errorf("reach the replay endpoint: %w", err)
	}
	return c, nil
}

// replayReply reads one reply, of either age: ["", topic, seq, payload] or ["", seq, payload]; −1 ends.
func replayReply(frames [][]byte) (m message, end bool, err error) {
	if len(frames) != 3 && len(frames) != 4 {
		return message{}, false, fmt.Errorf("%w: %d frames", errReplay, len(frames))
	}
	seq, ok := seqOf(frames[len(frames)-2])
	if !ok || !bytes.Equal(frames[0], nil) {
		return message{}, false, fmt.Errorf("%w: no sequence number", errReplay)
	}
	if seq == seqReset {
		return message{}, true, nil
	}
	return message{seq: seq, payload: frames[len(frames)-1]}, false, nil
}
