package sim

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/dpserve/dpserve/engine/kvevents/zmtp"
)

// Failures of the replay socket.
const (
	kvShortRing = 2               // batches that a short ring still holds
	// in front of each answer of a slow one: longer than any consumer should wait
	kvSlowPause = 3 * time.Second
	kvChunk     = 64              // batches that are copied out of the ring at a time
)

// replays is the life of one connection to the ROUTER: each request of exactly two frames (three with the
// identity that the socket adds) is answered from the ring, others are ignored.
func (p *kvPublisher) replays(c *zmtp.Conn) {
	for {
		frames, err := c.Recv()
		if err != nil {
			return
		}
		if len(frames) != 2 || len(frames[1]) != 8 {
			p.cfg.logger().Error("kv events: invalid replay request", "frames", len(frames))
			continue
		}
		if p.faults.is(ModeKVNoReplay) {
			continue
		}
		if p.answer(c, binary.BigEndian.Uint64(frames[1])) != nil {
			return
		}
	}
}

// answer sends what the ring has from the number from on, then the end marker.
func (p *kvPublisher) answer(c *zmtp.Conn, from uint64) error {
	for {
		batches := p.since(from)
		if len(batches) == 0 {
			break
		}
		for _, b := range batches {
			if err := p.reply(c, p.set.Topic, b.seq, b.payload); err != nil {
				return err
			}
		}
		from = batches[len(batches)-1].seq + 1
	}
	return p.reply(c, "", math.MaxUint64, nil)
}

// since copies the next batches of the ring.
func (p *kvPublisher) since(from uint64) []kvBatch {
	p.mu.Lock()
	defer p.mu.Unlock()
	ring := p.ring[p.head:]
	if p.faults.is(ModeKVShortReplay) {
		ring = ring[max(0, len(ring)-kvShortRing):]
	}
	if len(ring) == 0 || from > ring[len(ring)-1].seq {
		return nil
	}
	if from > ring[0].seq {
		ring = ring[from-ring[0].seq:]
	}
	return append([]kvBatch{}, ring[:min(len(ring), kvChunk)]...)
}

func (p *kvPublisher) reply(c *zmtp.Conn, topic string, seq uint64, payload []byte) error {
	if p.faults.is(ModeKVSlowReplay) {
		select {
		case <-time.After(kvSlowPause):
		case <-p.quit:
		}
	}
	if p.set.Format == KVMap {
		return c.Send(nil, []byte(topic), seqFrame(seq), payload)
	}
	return c.Send(nil, seqFrame(seq), payload)
}
