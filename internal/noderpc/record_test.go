package noderpc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// recordCollector keeps copies of the records that an unpacker passes on.
type recordCollector struct {
	records []msg.Record
	lists   int // that have ended
}

func (h *recordCollector) record(_ *remoteRank, rec *msg.Record) {
	c := *rec
	if rec.Snapshot != nil {
		s := *rec.Snapshot
		s.Open = append([]msg.OpenRequest(nil), s.Open...)
		c.Snapshot = &s
	}
	c.KV.Delta.Hashes = append([]uint64(nil), rec.KV.Delta.Hashes...)
	h.records = append(h.records, c)
}

func (h *recordCollector) listed() { h.lists++ }

// packed is the packed form of records, all of slot 7.
func packed(recs ...msg.Record) []byte {
	var p packer
	var out []byte
	for i := range recs {
		p.pack(7, &recs[i])
		out = append(out, p.buf...)
	}
	return out
}

func unpacked(t require.TestingT, raw []byte) (*recordCollector, *unpackStats) {
	h, skipped := &recordCollector{}, &unpackStats{}
	require.NoError(t, newUnpacker(skipped).unpack(raw, h))
	return h, skipped
}

func firstRecord() msg.Record {
	return msg.Record{
		App: "chat", Unit: "chat/3/1", Rank: routing.ID(3, 1), Epoch: 9, Incarnation: 1 << 63, Seq: 41,
		Kind:     msg.RecSnapshot,
		Snapshot: &msg.Snapshot{},
	}
}

// delta is a record of the same rank.
func delta(kind msg.RecordKind, seq uint64) msg.Record {
	r := firstRecord()
	return msg.Record{
		App: r.App, Unit: r.Unit, Rank: r.Rank, Epoch: r.Epoch, Incarnation: r.Incarnation,
		Seq: seq, Kind: kind,
	}
}

func drawText(t *rapid.T, label string) string {
	return rapid.OneOf(rapid.SampledFrom([]string{
		"", "n1", "node-12", "engine_busy",
		"http://127.0.0.1:8001",
	}), rapid.StringN(0, 40, 200)).Draw(t, label)
}

func drawCount(t *rapid.T, label string) int {
	return rapid.OneOf(rapid.IntRange(0, 300), rapid.IntRange(0, maxCount)).Draw(t, label)
}

// drawAt is no time, or one in whole microseconds, as on the wire.
func drawAt(t *rapid.T) time.Duration {
	return time.Duration(rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(1, maxAt)).Draw(t,
		"at")) * time.Microsecond
}

func drawSnapshot(t *rapid.T) *msg.Snapshot {
	s := &msg.Snapshot{
		Accepting: rapid.Bool().Draw(t, "accepting"), Ejected: rapid.Bool().Draw(t, "ejected"),
		CachingOff: rapid.Bool().Draw(t, "off"), MaxOngoing: drawCount(t, "max"),
		Capacity: int64(drawCount(t, "capacity")), BlockSize: drawCount(t, "block"),
		Node: drawText(t, "node"), MaxModelLen: drawCount(t, "length"),
		Target: msg.Target{
			URL: drawText(t, "url"), Addressing: drawText(t, "addr"),
			Selector: drawCount(t, "sel"), Owned: rapid.Bool().Draw(t, "own"),
		},
	}
	s.Adapters = drawAdapters(t)
	for range rapid.SampledFrom([]int{0, 1, 3, 600, 2000}).Draw(t, "open") {
		s.Open = append(s.Open, msg.OpenRequest{
			ReqID: uint64(len(s.Open)) * 7919, Ingress: "n2",
			Tokens: len(s.Open), Hit: 3, Out: 5, Decoding: len(s.Open)%2 == 1,
		})
	}
	return s
}

func drawAdapters(t *rapid.T) (names []string) {
	for i := range rapid.SampledFrom([]int{0, 1, 3, msg.MaxAdapters}).Draw(t, "adapters") {
		names = append(names, fmt.Sprintf("adapter-%04d", i))
	}
	return names
}

func drawRecord(t *rapid.T, seq uint64) msg.Record {
	kind := rapid.SampledFrom([]msg.RecordKind{
		msg.RecSnapshot, msg.RecAdmitted, msg.RecFirstToken, msg.RecProgress, msg.RecDone, msg.RecState,
		msg.RecStatus, msg.RecKVBegin, msg.RecKV, msg.RecKVEnd, msg.RecAdapters,
	}).Draw(t, "kind")
	r := delta(kind, seq)
	switch kind {
	case msg.RecSnapshot:
		r.Accepting, r.Cause = rapid.Bool().Draw(t, "taking"), drawText(t, "cause")
		r.Snapshot = drawSnapshot(t)
	case msg.RecState:
		r.Accepting, r.Fenced, r.Draining = rapid.Bool().Draw(t, "a"), rapid.Bool().Draw(t, "f"),
			rapid.Bool().Draw(t, "d")
		r.Cause, r.Ejected, r.OfferedTo = drawText(t, "cause"), rapid.Bool().Draw(t, "ejected"),
			drawText(t, "offered to")
	case msg.RecStatus:
		r.Status = msg.Status{
			KVUsage:    rapid.Float64().Draw(t, "usage"),
			HasKVUsage: rapid.Bool().Draw(t, "has"), Capacity: 4096, BlockSize: drawCount(t, "bs"),
			LateReads: int64(drawCount(t, "late")),
		}
	case msg.RecAdapters:
		r.Adapters = drawAdapters(t)
	case msg.RecKVBegin:
		r.KV = msg.KV{Tier: kvindex.CPU, BlockSize: drawCount(t, "bs")}
	case msg.RecKVEnd:
		r.KV = msg.KV{Tier: kvindex.Sent}
	case msg.RecKV:
		n := rapid.SampledFrom([]int{0, 1, 15, 17, maxHashes}).Draw(t, "n")
		r.KV.Delta = kvindex.Delta{Change: kvindex.Stored, Parent: rapid.Uint64().Draw(t, "parent")}
		for i := range n {
			r.KV.Delta.Hashes = append(r.KV.Delta.Hashes, uint64(i)*0x9e3779b97f4a7c15)
		}
	default:
		r.ReqID, r.Ingress, r.Cause = rapid.Uint64().Draw(t, "req"), drawText(t, "ingress"),
			drawText(t, "cause")
		r.Tokens, r.Hit, r.Out = drawCount(t, "tokens"), drawCount(t, "hit"), drawCount(t, "out")
		r.At = drawAt(t)
		if kind == msg.RecAdmitted {
			r.Session = rapid.OneOf(rapid.Just(uint64(0)), rapid.Uint64()).Draw(t, "session")
		}
		if kind == msg.RecDone {
			r.OfferedTo = drawText(t, "offered to")
		}
	}
	return r
}

// RA5: unpacking returns the packed records, wherever the messages are cut.
func TestRecordsComeBackEqual(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := []msg.Record{firstRecord()}
		for range rapid.IntRange(0, 12).Draw(t, "n") {
			seq := want[len(want)-1].Seq
			want = append(want, drawRecord(t, seq+uint64(rapid.IntRange(0, 1).Draw(t, "next"))))
		}
		h, skipped := &recordCollector{}, &unpackStats{}
		in := newUnpacker(skipped)
		raw := packed(want...)
		for cut := rapid.IntRange(1, 64<<10).Draw(t, "cut"); len(raw) > 0; {
			n := min(cut, len(raw))
			require.NoError(t, in.unpack(raw[:n], h))
			raw = raw[n:]
		}
		require.Equal(t, want, h.records)
		assert.Empty(t, in.rest)
		assert.Zero(t, skipped.malformed.Load()+skipped.kinds.Load())
	})
}

// TestPackingAllocatesNothing: neither the packer nor the unpacker, in the steady state.
func TestPackingAllocatesNothing(t *testing.T) {
	var p packer
	snap, rec := firstRecord(), delta(msg.RecDone, 42)
	rec.ReqID, rec.Ingress, rec.Tokens, rec.Cause, rec.At = 1<<60, "node-12", 800, "ok", 9*time.Hour
	in := newUnpacker(&unpackStats{})
	sink := discard{}
	p.pack(1, &snap)
	require.NoError(t, in.unpack(p.buf, sink))
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		p.pack(1, &rec)
		if in.unpack(p.buf, sink) != nil {
			t.Fail()
		}
	}))
	assert.Less(t, len(p.buf), 40, "bytes of a record about a request")
}

type discard struct{}

func (discard) record(*remoteRank, *msg.Record) {}
func (discard) listed()                         {}

// RA5: TestNumbersOnTheWire pins the numbers that other versions rely on.
func TestNumbersOnTheWire(t *testing.T) {
	assert.Equal(t, []wireKind{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, []wireKind{
		wireOf(msg.RecSnapshot), wireOf(msg.RecAdmitted), wireOf(msg.RecFirstToken), wireOf(msg.RecProgress),
		wireOf(msg.RecDone), wireOf(msg.RecState),
		wireOf(msg.RecGone), wireOf(msg.RecStatus), wireOf(msg.RecKVBegin), wireOf(msg.RecKV),
		wireOf(msg.RecKVEnd),
	})
	assert.Equal(t, []wireKind{64, 65, 66}, []wireKind{wireListed, wireEnd, wireHeartbeat})
	for number, why := range []error{errEnded, errShutDown, errRestarts, errBehind, errReplaced} {
		assert.Equal(t, []byte{3, 65, 0, byte(number)}, packEnd(why))
	}
	state := delta(msg.RecState, 300)
	state.Fenced, state.Cause, state.OfferedTo = true, "x", "n1"
	assert.Equal(t, []byte{10, 6, 7, 0xac, 2, flagFenced, 1, 'x', 2, 'n', '1'}, packed(state))
	done := delta(msg.RecDone, 1)
	done.ReqID, done.Ingress, done.Tokens, done.Hit, done.Out, done.Cause = 1, "n1", 9, 4, 5, "c"
	done.At, done.OfferedTo = 300*time.Microsecond, "n2"
	assert.Equal(t, []byte{
		24, 5, 7, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 'n', '1', 9, 4, 5, 1, 'c', 0xac, 2, 2, 'n', '2',
	}, packed(done))
}

// TestTimesThatNoClockShows: the wire rounds a time up to microseconds, so that a time never becomes 0. The
// reader ignores an absurd time and keeps the record.
func TestTimesThatNoClockShows(t *testing.T) {
	for at, want := range map[time.Duration]time.Duration{
		1: time.Microsecond, 1001: 2 * time.Microsecond, time.Hour: time.Hour, -1: 0,
		maxAt * time.Microsecond: maxAt * time.Microsecond,
		math.MaxInt64:            maxAt * time.Microsecond,
	} {
		rec := delta(msg.RecDone, 42)
		rec.At = at
		h, _ := unpacked(t, append(packed(firstRecord()), packed(rec)...))
		require.Len(t, h.records, 2)
		assert.Equal(t, want, h.records[1].At, "of %d ns", at)
	}
	plain := packed(delta(msg.RecFirstToken, 42))
	absurd := binary.AppendUvarint(plain[1:len(plain)-1], maxAt+1)
	h, _ := unpacked(t, slices.Concat(packed(firstRecord()), []byte{byte(len(absurd))}, absurd))
	require.Len(t, h.records, 2)
	assert.Equal(t, delta(msg.RecFirstToken, 42), h.records[1])
}

// TestMB6UnknownKindsAndFields: additions of a later version are skipped, and the rest is read.
func TestMB6UnknownKindsAndFields(t *testing.T) {
	raw := packed(firstRecord())
	offer := delta(msg.RecState, 42)
	offer.OfferedTo = "n1"
	longer := packed(offer)                               // two bytes behind the known fields
	raw = append(append(raw, longer[0]+2), longer[1:]...) // its length
	raw = append(raw, 0xff, 0xff)
	raw = append(raw, 4, 99, 7, 43, 1) // a kind that is not known
	raw = append(raw, packed(delta(msg.RecDone, 44))...)
	h, skipped := unpacked(t, raw)
	require.Len(t, h.records, 3)
	assert.Equal(t, offer, h.records[1])
	assert.Equal(t, delta(msg.RecDone, 44), h.records[2])
	assert.EqualValues(t, 1, skipped.kinds.Load())
}

// TestMalformedRecordsEndTheStream, and so does a missing one.
func TestMalformedRecordsEndTheStream(t *testing.T) {
	hashes := append([]byte{byte(wireOf(msg.RecKV)), 7, 42, 0, byte(kvindex.Stored)}, make([]byte, 8)...)
	hashes = binary.AppendUvarint(hashes, maxHashes+1)
	longText := binary.AppendUvarint([]byte{byte(wireOf(msg.RecState)), 7, 42, 0}, maxString+1)
	longText = append(longText, strings.Repeat("x", maxString+1)...)
	withLength := func(body []byte) []byte {
		return append(binary.AppendUvarint(nil, uint64(len(body))), body...)
	}
	count := binary.AppendUvarint([]byte{byte(wireOf(msg.RecKVBegin)), 7, 42, 0}, maxCount+1)
	for name, raw := range map[string][]byte{
		"ends early": withLength([]byte{byte(wireOf(msg.RecDone)), 7, 42, 2, 3}),
		"hashes":     withLength(hashes), "text": withLength(longText),
		"count":      withLength(count),
		"no length":  {0},
		"too long":   {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1},
		"over bound": binary.AppendUvarint(nil, maxRecord+1),
		"a gap":      packed(delta(msg.RecDone, 43)),
	} {
		h, skipped := &recordCollector{}, &unpackStats{}
		err := newUnpacker(skipped).unpack(append(packed(firstRecord()), raw...), h)
		require.Error(t, err, name)
		assert.True(t, isRelist(err), name)
		assert.Len(t, h.records, 1, name)
		assert.EqualValues(t, 1, skipped.malformed.Load(), name)
	}
}

// TestSlots: a rank's next incarnation has another slot, and records of the one before are dropped.
func TestSlots(t *testing.T) {
	var p packer
	h := &recordCollector{}
	in := newUnpacker(&unpackStats{})
	give := func(slot uint64, rec msg.Record) {
		p.pack(slot, &rec)
		require.NoError(t, in.unpack(p.buf, h))
	}
	next := firstRecord()
	next.Incarnation++
	give(1, firstRecord())
	give(2, next)
	give(1, delta(msg.RecDone, 42))
	end := delta(msg.RecGone, 42)
	end.Incarnation = next.Incarnation
	give(2, end)
	give(2, delta(msg.RecDone, 43))
	require.Len(t, h.records, 3)
	assert.Equal(t, next.Incarnation, h.records[2].Incarnation)
	assert.Empty(t, in.slots)
	assert.Empty(t, in.ranks)
	p.listed()
	require.NoError(t, in.unpack(append(p.buf, heartbeat...), h))
	assert.Equal(t, 1, h.lists)
	assert.Len(t, h.records, 3)
}

// TestEndOfAStream: its last record says why, and no later record is read.
func TestEndOfAStream(t *testing.T) {
	for _, why := range endReasons {
		h, skipped := &recordCollector{}, &unpackStats{}
		raw := append(packed(firstRecord()), packEnd(why)...)
		err := newUnpacker(skipped).unpack(append(raw, packed(delta(msg.RecDone, 42))...), h)
		require.ErrorIs(t, err, why)
		assert.Len(t, h.records, 1)
		assert.Zero(t, skipped.malformed.Load())
		assert.Equal(t, errors.Is(why, errBehind), isRelist(why))
		assert.True(t, isEnd(packEnd(why)))
		assert.False(t, isEnd(raw))
	}
	h := &recordCollector{}
	later := []byte{3, byte(wireEnd), 0, 100}
	require.ErrorIs(t, newUnpacker(&unpackStats{}).unpack(later, h), errEnded, "a later version's reason")
	require.ErrorIs(t, newUnpacker(&unpackStats{}).unpack(packEnd(io.EOF), h), errEnded)
}

// FuzzUnpack: any bytes are read without a panic and within bounds, and the records passed on are valid.
func FuzzUnpack(f *testing.F) {
	f.Add(packed(firstRecord(), delta(msg.RecState, 42), delta(msg.RecDone, 43), delta(msg.RecGone, 44)))
	kv := delta(msg.RecKV, 42)
	kv.KV.Delta = kvindex.Delta{Change: kvindex.Removed, Hashes: []uint64{1, 2, 3}}
	f.Add(packed(firstRecord(), delta(msg.RecKVBegin, 42), kv, delta(msg.RecKVEnd, 43)))
	long := firstRecord()
	long.Snapshot.Open = make([]msg.OpenRequest, 700)
	f.Add(packed(long, delta(msg.RecStatus, 42)))
	f.Add([]byte{3, byte(wireListed), 0, 0})
	f.Fuzz(func(t *testing.T, raw []byte) {
		h := &recordCollector{}
		in := newUnpacker(&unpackStats{})
		if in.unpack(raw, h) != nil {
			return
		}
		for i := range h.records {
			r := &h.records[i]
			assert.LessOrEqual(t, len(r.KV.Delta.Hashes), len(raw))
			assert.LessOrEqual(t, len(r.Cause), maxString)
			assert.True(t, r.Tokens >= 0 && r.Tokens <= maxCount)
			assert.True(t, r.At >= 0 && r.At <= maxAt*time.Microsecond)
			assert.Equal(t, r.Kind == msg.RecSnapshot, r.Snapshot != nil)
		}
		assert.LessOrEqual(t, len(in.texts), maxTexts+1)
		again := packed(h.records...)
		assert.NotNil(t, append(again, 0))
	})
}
