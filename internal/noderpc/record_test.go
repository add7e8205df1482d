package noderpc

import (
	"encoding/binary"
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
	rosters [][]identity
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

func (h *recordCollector) roster(list []identity) { h.rosters = append(h.rosters, slices.Clone(list)) }

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
		Accepting: rapid.Bool().Draw(t, "accepting"), Tripped: rapid.Bool().Draw(t, "tripped"),
		CachingOff: rapid.Bool().Draw(t, "off"), MaxOngoing: drawCount(t, "max"),
		Capacity: int64(drawCount(t, "capacity")), BlockSize: drawCount(t, "block"),
		Node: drawText(t, "node"), MaxModelLen: drawCount(t, "length"),
		Target: msg.Target{
			URL: drawText(t, "url"), Addressing: drawText(t, "addr"),
			Selector: drawCount(t, "sel"), Owned: rapid.Bool().Draw(t, "own"),
		},
	}
	for range rapid.SampledFrom([]int{0, 1, 3, 600, 2000}).Draw(t, "open") {
		s.Open = append(s.Open, msg.OpenRequest{
			ReqID: uint64(len(s.Open)) * 7919, Ingress: "n2",
			Tokens: len(s.Open), Hit: 3, Out: 5, Decoding: len(s.Open)%2 == 1,
		})
	}
	return s
}

func drawRecord(t *rapid.T) msg.Record {
	kind := rapid.SampledFrom([]msg.RecordKind{
		msg.RecSnapshot, msg.RecAdmitted, msg.RecFirstToken, msg.RecProgress, msg.RecDone, msg.RecState,
		msg.RecStatus, msg.RecKVBegin, msg.RecKV, msg.RecKVEnd,
	}).Draw(t, "kind")
	r := delta(kind, rapid.Uint64().Draw(t, "seq"))
	switch kind {
	case msg.RecSnapshot:
		r.Accepting, r.Snapshot = rapid.Bool().Draw(t, "taking"), drawSnapshot(t)
	case msg.RecState:
		r.Accepting, r.Fenced, r.Draining = rapid.Bool().Draw(t, "a"), rapid.Bool().Draw(t, "f"),
			rapid.Bool().Draw(t, "d")
		r.Cause, r.Tripped, r.Turn = drawText(t, "cause"), rapid.Bool().Draw(t, "tripped"),
			drawText(t, "turn")
	case msg.RecStatus:
		r.Status = msg.Status{
			KVUsage:    rapid.Float64().Draw(t, "usage"),
			HasKVUsage: rapid.Bool().Draw(t, "has"), Capacity: 4096, BlockSize: drawCount(t, "bs"),
			LateReads: int64(drawCount(t, "late")),
		}
	case msg.RecKVBegin:
		r.KV = msg.KV{Tier: kvindex.CPU, BlockSize: drawCount(t, "bs")}
	case msg.RecKVEnd:
		r.KV = msg.KV{Tier: kvindex.Sent, Len: drawCount(t, "len"), Sum: rapid.Uint64().Draw(t, "sum")}
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
			r.Turn = drawText(t, "turn")
		}
	}
	return r
}

// TestRecordsComeBackEqual: unpacking returns the packed records, wherever the messages are split.
func TestRecordsComeBackEqual(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := []msg.Record{firstRecord()}
		for range rapid.IntRange(0, 12).Draw(t, "n") {
			want = append(want, drawRecord(t))
		}
		h, skipped := &recordCollector{}, &unpackStats{}
		in := newUnpacker(skipped)
		var p packer
		for i := range want {
			p.pack(7, &want[i])
			start := 0
			for _, end := range p.ends { // each part alone
				require.NoError(t, in.unpack(p.buf[start:end], h))
				require.LessOrEqual(t, end-start, chunkBytes)
				start = end
			}
		}
		require.Equal(t, want, h.records)
		assert.Zero(t, skipped.malformed.Load()+skipped.kinds.Load()+
			skipped.fields.Load()+skipped.strays.Load())
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
func (discard) roster([]identity)               {}

// TestNumbersOnTheWire pins the numbers that other versions rely on.
func TestNumbersOnTheWire(t *testing.T) {
	assert.Equal(t, []wireKind{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, []wireKind{
		wireOf(msg.RecSnapshot), wireOf(msg.RecAdmitted), wireOf(msg.RecFirstToken), wireOf(msg.RecProgress),
		wireOf(msg.RecDone), wireOf(msg.RecState),
		wireOf(msg.RecGone), wireOf(msg.RecStatus), wireOf(msg.RecKVBegin), wireOf(msg.RecKV),
		wireOf(msg.RecKVEnd),
	})
	state := delta(msg.RecState, 300)
	state.Fenced, state.Cause = true, "x"
	assert.Equal(t, []byte{7, 6, 7, 0xac, 2, flagFenced, 1, 'x'}, packed(state))
	admitted := delta(msg.RecAdmitted, 1)
	assert.Equal(t, append([]byte{16, 2, 7, 1}, make([]byte, 13)...), packed(admitted),
		"without a session as before there were any")
	admitted.Session = 0x0102
	assert.Equal(t, append(append([]byte{24, 2, 7, 1}, make([]byte, 13)...), 2, 1, 0, 0, 0, 0, 0, 0),
		packed(admitted))
	status := delta(msg.RecStatus, 1)
	status.Status = msg.Status{HasKVUsage: true, Capacity: 1, BlockSize: 2}
	assert.Equal(t, []byte{14, 8, 7, 1, flagUsage, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2}, packed(status))
	status.Status.LateReads = 3
	assert.Equal(t, []byte{15, 8, 7, 1, flagUsage, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3}, packed(status))
}

// goldenTimes are records of requests with and without a time, as they are on the wire.
var goldenTimes = []struct {
	name string
	rec  func(r *msg.Record)
	kind msg.RecordKind
	wire []byte
}{
	{
		"admitted", nil, msg.RecAdmitted,
		[]byte{19, 2, 7, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 'n', '1', 9, 4, 0, 1, 'c'},
	},
	{
		"admitted, session", func(r *msg.Record) { r.Session = 0x0102 }, msg.RecAdmitted,
		[]byte{27, 2, 7, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 'n', '1', 9, 4, 0, 1, 'c', 2, 1, 0, 0, 0, 0, 0, 0},
	},
	{
		"admitted, time", func(r *msg.Record) { r.At = 300 * time.Microsecond }, msg.RecAdmitted,
		[]byte{
			29, 2, 7, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 'n', '1', 9, 4, 0, 1, 'c', 0, 0, 0, 0, 0, 0, 0, 0,
			0xac, 2,
		},
	},
	{
		"admitted, session, time", func(r *msg.Record) { r.Session, r.At = 0x0102, time.Microsecond },
		msg.RecAdmitted,
		[]byte{28, 2, 7, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 'n', '1', 9, 4, 0, 1, 'c', 2, 1, 0, 0, 0, 0, 0, 0, 1},
	},
	{
		"first token", nil, msg.RecFirstToken,
		[]byte{19, 3, 7, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 'n', '1', 9, 4, 0, 1, 'c'},
	},
	{
		"first token, time", func(r *msg.Record) { r.At = 300 * time.Microsecond }, msg.RecFirstToken,
		[]byte{21, 3, 7, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 'n', '1', 9, 4, 0, 1, 'c', 0xac, 2},
	},
	{
		"progress, time", func(r *msg.Record) { r.Out, r.At = 5, 300*time.Microsecond }, msg.RecProgress,
		[]byte{21, 4, 7, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 'n', '1', 9, 4, 5, 1, 'c', 0xac, 2},
	},
	{
		"done", func(r *msg.Record) { r.Out = 5 }, msg.RecDone,
		[]byte{19, 5, 7, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 'n', '1', 9, 4, 5, 1, 'c'},
	},
	{
		"done, turn", func(r *msg.Record) { r.Turn = "n2" }, msg.RecDone,
		[]byte{22, 5, 7, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 'n', '1', 9, 4, 0, 1, 'c', 2, 'n', '2'},
	},
	{
		"done, time", func(r *msg.Record) { r.At = 300 * time.Microsecond }, msg.RecDone,
		[]byte{22, 5, 7, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 'n', '1', 9, 4, 0, 1, 'c', 0, 0xac, 2},
	},
	{
		"done, turn, time", func(r *msg.Record) { r.Turn, r.At = "n2", 300*time.Microsecond }, msg.RecDone,
		[]byte{24, 5, 7, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 'n', '1', 9, 4, 0, 1, 'c', 2, 'n', '2', 0xac, 2},
	},
}

// readWithoutTime reads a record of a request as older versions did, which know no time: the fields they
// read, and how many bytes they skip.
func readWithoutTime(t *testing.T, wire []byte) (rec msg.Record, skipped int) {
	size, n := binary.Uvarint(wire)
	require.Len(t, wire[n:], int(size))
	c := &cursor{b: wire[n+1:]}
	require.EqualValues(t, 7, c.u64(), "slot")
	rec = delta(msg.RecordKind(wire[n]-1), c.u64())
	rec.ReqID, rec.Ingress, rec.Tokens, rec.Hit, rec.Out = c.request()
	rec.Cause = c.text()
	if rec.Kind == msg.RecAdmitted && len(c.b) > 0 {
		rec.Session = c.fixed()
	}
	if rec.Kind == msg.RecDone {
		rec.Turn = c.turn()
	}
	require.False(t, c.bad)
	return rec, len(c.b)
}

// TestTimesOnTheWire pins how a record of a request holds its time. A record without a time has the older
// form; a reader that knows no times reads the other fields as before.
func TestTimesOnTheWire(t *testing.T) {
	for _, g := range goldenTimes {
		t.Run(g.name, func(t *testing.T) {
			want := delta(g.kind, 1)
			want.ReqID, want.Ingress, want.Tokens, want.Hit, want.Cause = 1, "n1", 9, 4, "c"
			if g.rec != nil {
				g.rec(&want)
			}
			assert.Equal(t, g.wire, packed(want))
			h, skipped := unpacked(t, append(packed(firstRecord()), g.wire...))
			require.Len(t, h.records, 2)
			assert.Equal(t, want, h.records[1])
			assert.Zero(t, skipped.fields.Load()+skipped.malformed.Load())

			old, rest := readWithoutTime(t, g.wire)
			assert.Equal(t, want.At > 0, rest > 0)
			want.At = 0
			assert.Equal(t, want, old)
		})
	}
}

// TestTimesThatNoClockShows: the wire rounds a time up to microseconds, so that a time never becomes 0. The
// reader ignores an absurd time and keeps the record; a cut one makes the record malformed.
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
	with := func(tail ...byte) []byte {
		return slices.Concat(packed(firstRecord()), []byte{plain[0] + byte(len(tail))}, plain[1:], tail)
	}
	h, skipped := unpacked(t, with(binary.AppendUvarint(nil, maxAt+1)...))
	require.Len(t, h.records, 2)
	assert.Equal(t, delta(msg.RecFirstToken, 42), h.records[1])
	assert.Zero(t, skipped.malformed.Load())
	h, skipped = unpacked(t, with(0x80))
	assert.Len(t, h.records, 1)
	assert.EqualValues(t, 1, skipped.malformed.Load())
}

// TestMB6UnknownKindsAndFields: additions of a later version are skipped and counted, and the rest is read.
func TestMB6UnknownKindsAndFields(t *testing.T) {
	raw := packed(firstRecord())
	raw = append(raw, 3, 99, 7, 1) // a kind that is not known
	turn := delta(msg.RecState, 42)
	turn.Turn = "n1"
	longer := packed(turn)                                // a field behind the known ones
	raw = append(append(raw, longer[0]+2), longer[1:]...) // its length
	raw = append(append(raw, 0xff, 0xff), packed(delta(msg.RecDone, 43))...)
	h, skipped := unpacked(t, raw)
	require.Len(t, h.records, 3)
	assert.Equal(t, turn, h.records[1])
	assert.Equal(t, delta(msg.RecDone, 43), h.records[2])
	assert.EqualValues(t, 1, skipped.kinds.Load())
	assert.EqualValues(t, 1, skipped.fields.Load())
	assert.Zero(t, skipped.malformed.Load())
}

// TestMalformedRecordsAreLeftOut: the other records of the message are read.
func TestMalformedRecordsAreLeftOut(t *testing.T) {
	big := delta(msg.RecKV, 42)
	big.KV.Delta.Hashes = make([]uint64, maxHashes+1)
	assert.Empty(t, packed(big), "its reader sees a gap")

	hashes := append([]byte{0, byte(wireOf(msg.RecKV)), 7, 1, 0, byte(kvindex.Stored)}, make([]byte, 8)...)
	hashes = binary.AppendUvarint(hashes, maxHashes+1)
	longText := binary.AppendUvarint([]byte{0, byte(wireOf(msg.RecState)), 7, 1, 0}, maxString+1)
	longText = append(longText, strings.Repeat("x", maxString+1)...)
	for name, body := range map[string][]byte{
		"ends early": {0, byte(wireOf(msg.RecDone)), 7, 1, 2, 3}, "hashes": hashes, "text": longText,
		"count": binary.AppendUvarint([]byte{0, byte(wireOf(msg.RecKVBegin)), 7, 1, 0}, maxCount+1),
	} {
		raw := binary.AppendUvarint(packed(firstRecord()), uint64(len(body)-1))
		raw = append(append(raw, body[1:]...), packed(delta(msg.RecDone, 43))...)
		h, skipped := unpacked(t, raw)
		assert.Len(t, h.records, 2, name)
		assert.EqualValues(t, 1, skipped.malformed.Load(), name)
	}
}

func TestFramingThatBreaksEndsTheStream(t *testing.T) {
	for _, raw := range [][]byte{
		{5, 1},
		{0},
		{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1},
		{0x80},
	} {
		require.ErrorIs(t, newUnpacker(&unpackStats{}).unpack(raw, discard{}), errFraming)
	}
}

// TestASnapshotWithoutItsEndIsNoSnapshot: another record in between, or a malformed part.
func TestASnapshotWithoutItsEndIsNoSnapshot(t *testing.T) {
	rec := firstRecord()
	for range 1500 {
		rec.Snapshot.Open = append(rec.Snapshot.Open, msg.OpenRequest{Ingress: "n2", Tokens: 4})
	}
	var p packer
	p.pack(7, &rec)
	require.Len(t, p.ends, 4)
	first, last := p.buf[:p.ends[0]], p.buf[p.ends[2]:]
	h, skipped := unpacked(t, slices.Concat(first, packed(delta(msg.RecDone, 42)), last))
	assert.Empty(t, h.records)
	assert.EqualValues(t, 2, skipped.strays.Load())
	h, _ = unpacked(t, slices.Concat(first, p.buf))
	require.Len(t, h.records, 1, "a whole one behind a broken one")
	assert.Equal(t, rec, h.records[0])
}

// TestSlots: a rank's next incarnation has another slot, and records of the one before are dropped.
func TestSlots(t *testing.T) {
	var p packer
	h, skipped := &recordCollector{}, &unpackStats{}
	in := newUnpacker(skipped)
	give := func(slot uint64, rec msg.Record) {
		p.pack(slot, &rec)
		require.NoError(t, in.unpack(p.buf, h))
	}
	next := firstRecord()
	next.Incarnation++
	give(1, firstRecord())
	give(2, next)
	give(1, delta(msg.RecDone, 42))
	assert.EqualValues(t, 1, skipped.strays.Load())
	end := delta(msg.RecGone, 42)
	end.Incarnation = next.Incarnation
	give(2, end)
	give(2, delta(msg.RecDone, 43))
	require.Len(t, h.records, 3)
	assert.Equal(t, next.Incarnation, h.records[2].Incarnation)
	assert.EqualValues(t, 2, skipped.strays.Load())
	assert.Empty(t, in.slots)
	assert.Empty(t, in.ranks)
}

func TestRosterComesBackEqual(t *testing.T) {
	var p packer
	a, b := firstRecord(), firstRecord()
	b.Rank++
	want := []identity{identityOf(&a), identityOf(&b)}
	p.roster(2, func(yield func(uint64, identity)) {
		yield(1, want[0])
		yield(2, want[1])
	})
	h, skipped := unpacked(t, p.buf)
	assert.Equal(t, [][]identity{want}, h.rosters)
	assert.Zero(t, skipped.fields.Load())
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
	f.Add([]byte{3, byte(wireRoster), 0, 9})
	timed := packed(firstRecord())
	for _, g := range goldenTimes {
		timed = append(timed, g.wire...)
	}
	f.Add(timed)
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
