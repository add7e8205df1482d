package sim

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
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
	// sideRegister: send the last count blocks of the request of this key when it has ended.
	sideRegister = "register"
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
	sideTooFewBlocks = "too few blocks"
	sideBusy         = "too many connections"
)

// sideMessage is a question or an answer.
type sideMessage struct {
	Op      string   `json:"op,omitempty"`
	Engine  string   `json:"engine,omitempty"` // of the prefill engine
	Compat  string   `json:"compat,omitempty"`
	Request string   `json:"request,omitempty"` // read, heartbeat, free: the lease; register: the key
	Blocks  []int32  `json:"blocks,omitempty"`  // as in parameters: from 1 on
	Count   int      `json:"count,omitempty"`   // register: how many blocks are wanted
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
	frame = binary.BigEndian.AppendUint32(frame, uint32(len(body))) //nolint:gosec // bounded
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
	if len(m.KV)%kvNumbers != 0 || m.Count < 0 {
		return m, fmt.Errorf("%w: %d numbers, count %d", errSideFrame, len(m.KV), m.Count)
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
			Sum: k[0], Tokens: uint32(k[1]), //nolint:gosec // what does not fit matches nothing
			PromptSum: k[2], PromptTokens: uint32(k[3]), //nolint:gosec // likewise
		})
	}
	return out
}

// toldBlocks are the numbers by which parameters name blocks of the pool; nil for none.
func toldBlocks(blocks []int32) []int32 {
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
