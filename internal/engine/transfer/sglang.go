package transfer

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"

	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
)

// sglang is SGLang's transfer: both legs get the same body at once and meet in a room, a number that the
// body names. A prompt list gets one room per prompt. The engines refuse a request without a room.
type sglang struct{}

// sglangTraits do not split n > 1: released engines give all choices of a prompt the same room, and a room
// that is there twice ends the schedulers of both sides.
var sglangTraits = Traits{
	Name: SGLangName, Order: dispatch.Together,
	moveLists: true,
}

// maxRoom is the largest room: engines keep rooms in signed 64 bits.
const maxRoom = 1<<63 - 1

func (sglang) Traits() *Traits { return &sglangTraits }

// Begin implements Transfer. The rank that a leg is for stands in its address (header or body), which is
// written where each leg is sent. disagg_prefill_dp_rank stands in both bodies: the decode engine finds the
// prefill rank by it, and newer prefill engines skip their own check of the room then.
func (sglang) Begin(q *Request, id string, p Peer, draw func(n uint64) uint64) (Attempt, error) {
	switch {
	case p.Host == "" || p.Port <= 0 || p.Port > maxPort:
		return Attempt{}, incomplete(SGLangName, "bootstrap")
	case p.DPSize <= 0 || p.Rank < 0 || p.Rank >= p.DPSize:
		return Attempt{}, incomplete(SGLangName, "rank and dp_size, which its bootstrap server tells")
	}
	rooms := drawRooms(q.Prompts, p.DPSize, p.Rank, draw)
	b := make([]byte, 0, 128+len(rooms)*(32+len(p.Host)))
	b = append(b, `"bootstrap_host":`...)
	b = appendEach(b, rooms, func(b []byte, _ uint64) []byte { return openai.AppendString(b, p.Host) })
	b = append(b, `,"bootstrap_port":`...)
	b = appendEach(b, rooms, func(b []byte, _ uint64) []byte {
		return strconv.AppendInt(b, int64(p.Port), 10)
	})
	b = append(b, `,"bootstrap_room":`...)
	b = appendEach(b, rooms, func(b []byte, room uint64) []byte { return strconv.AppendUint(b, room, 10) })
	if p.DPSize > 1 {
		b = append(b, `,"disagg_prefill_dp_rank":`...)
		b = strconv.AppendInt(b, int64(p.Rank), 10)
	}
	return Attempt{ID: id, prefill: b, decode: b}, nil
}

// appendEach appends a list with one value per room, or the value alone if there is one room.
func appendEach(b []byte, rooms []uint64, value func(b []byte, room uint64) []byte) []byte {
	if len(rooms) == 1 {
		return value(b, rooms[0])
	}
	b = append(b, '[')
	for i, room := range rooms {
		if i > 0 {
			b = append(b, ',')
		}
		b = value(b, room)
	}
	return append(b, ']')
}

// drawRooms returns count rooms, no two equal. Each is q × dpSize + rank with a uniform q, so that room mod
// dpSize is the prefill rank: every version of the engine agrees with that.
func drawRooms(count, dpSize, rank int, draw func(n uint64) uint64) []uint64 {
	size, first := uint64(dpSize), uint64(rank)
	choices := (maxRoom-first)/size + 1
	rooms := make([]uint64, 0, count)
	for range count {
		q := draw(choices)
		for slices.Contains(rooms, q*size+first) {
			q = (q + 1) % choices
		}
		rooms = append(rooms, q*size+first)
	}
	return rooms
}

// Check implements Transfer. The prefill leg's answer is drained and holds nothing that is needed.
func (sglang) Check(*Answer) Failure { return NoFailure }

// Query implements Bootstrapper. The server answers 503 until all ranks of the group have registered, so an
// answer also says that the group is ready.
func (sglang) Query(address string) (Query, error) {
	return bootstrapQuery(SGLangName, address,
		"/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1")
}

func (sglang) ReadPeer(address string, rank, status int, answer []byte) (Peer, error) {
	server, port, err := bootstrapURL(SGLangName, address)
	if err != nil {
		return Peer{}, err
	}
	if err := checkStatus(status, answer); err != nil {
		return Peer{}, err
	}
	var in struct {
		DPSize int `json:"dp_size"`
	}
	if err := json.Unmarshal(answer, &in); err != nil {
		return Peer{}, fmt.Errorf("%w: %w", ErrBootstrap, err)
	}
	if in.DPSize <= 0 || rank < 0 || rank >= in.DPSize {
		return Peer{}, fmt.Errorf("%w: rank %d of dp_size %d", ErrBootstrap, rank, in.DPSize)
	}
	return Peer{Host: server.Hostname(), Port: port, Rank: rank, DPSize: in.DPSize}, nil
}
