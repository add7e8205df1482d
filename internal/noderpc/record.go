package noderpc

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing"
)

// The packed form of the records of a node's ranks. Each record is
//
//	length (uvarint) · kind (byte) · slot (uvarint) · fields
//
// A slot is a number that the sending process gives to one incarnation of a rank, and never again. A snapshot
// names the rank of its slot, and so does the end of a rank, which may reach a reader before the snapshot.
// Every other record names its rank by the slot, in one or two bytes. Numbers are uvarints, hashes and random
// numbers are 8 bytes little endian, and a text follows its length. New fields are only added at the end of a
// record: a reader skips fields and kinds that it does not know.

// wireKind is a record's kind on the wire. The numbers are fixed; a test pins them.
type wireKind byte

// A record of msg has its own number plus 1 on the wire. These kinds exist on the wire only.
const (
	wireMore   wireKind = 64 // open requests that did not fit into the snapshot before
	wireRoster wireKind = 65 // every rank of the node; a rank that is missing has ended
	lastRecord          = wireKind(msg.RecKVEnd) + 1
)

func wireOf(k msg.RecordKind) wireKind { return wireKind(k) + 1 }

// Bounds of packed records; the reader refuses larger values.
const (
	maxString       = 4 << 10  // bytes of a text
	maxHashes       = 4 << 10  // of one record
	maxOpenRequests = 1 << 20  // open requests of a snapshot
	maxRanks        = 1 << 16  // of a node
	maxCount        = 1 << 40  // of tokens and the like
	maxAt           = 1 << 50  // microseconds on a rank's clock: 35 years
	partBytes       = 32 << 10 // of a snapshot, before it is cut
	openBytes       = 64       // of an open request, beside its ingress's name, at most
	prefixBytes     = 4        // of a length, at most: no record is longer than 256 MiB
)

// Flags of a record.
const (
	flagAccepting byte = 1 << iota // RecSnapshot, RecState
	flagTaking                     // RecSnapshot: Snapshot.Accepting
	flagCachingOff
	flagOwned
	flagMore // of a snapshot: a wireMore follows
	flagFenced
	flagDraining
	flagUsage // RecStatus: HasKVUsage
)

// flagTripped of RecSnapshot and RecState is a bit that they did not use.
const flagTripped = flagUsage

// identity names one incarnation of a rank.
type identity struct {
	app, unit          string
	rank               routing.RankID
	epoch, incarnation uint64
}

func identityOf(rec *msg.Record) identity {
	return identity{rec.App, rec.Unit, rec.Rank, rec.Epoch, rec.Incarnation}
}

// setIn is the inverse of identityOf.
func (id *identity) setIn(rec *msg.Record) {
	rec.App, rec.Unit, rec.Rank = id.app, id.unit, id.rank
	rec.Epoch, rec.Incarnation = id.epoch, id.incarnation
}

// packer packs records. Its result is valid until its next use; in the steady state it allocates nothing.
type packer struct {
	buf  []byte
	ends []int // of the records in buf
}

// pack packs a record in one or more parts, one after the other: buf[:ends[0]], buf[ends[0]:ends[1]] … A
// record over a bound has no part: its reader detects a gap, and asks for a snapshot.
func (p *packer) pack(slot uint64, rec *msg.Record) {
	p.buf, p.ends = p.buf[:0], p.ends[:0]
	switch rec.Kind {
	case msg.RecSnapshot:
		p.snapshot(slot, rec)
	case msg.RecAdmitted, msg.RecFirstToken, msg.RecProgress, msg.RecDone:
		p.begin(wireOf(rec.Kind), slot)
		p.u64(rec.Seq)
		p.request(rec.ReqID, rec.Ingress, rec.Tokens, rec.Hit, rec.Out)
		p.text(rec.Cause)
		p.optionalFields(rec)
		p.end()
	case msg.RecState:
		p.begin(wireOf(rec.Kind), slot)
		p.u64(rec.Seq)
		p.buf = append(p.buf, flag(rec.Accepting, flagAccepting)|flag(rec.Fenced,
			flagFenced)|flag(rec.Draining, flagDraining)|flag(rec.Tripped, flagTripped))
		p.text(rec.Cause)
		p.turn(rec.Turn)
		p.end()
	case msg.RecGone:
		p.begin(wireOf(rec.Kind), slot)
		p.u64(rec.Seq)
		p.identity(identityOf(rec))
		p.end()
	case msg.RecStatus:
		p.status(slot, rec)
	case msg.RecKVBegin, msg.RecKV, msg.RecKVEnd:
		p.kv(slot, rec)
	case msg.RecSilent: // only a reader makes it
	}
}

// optionalFields packs the optional fields of a record about a request. The reader knows a field by its
// position, so the fields before it are packed too, even if empty. A record without optional fields is packed
// as in older versions.
func (p *packer) optionalFields(rec *msg.Record) {
	hasAt := rec.At > 0
	switch {
	case rec.Kind == msg.RecAdmitted && (hasAt || rec.Session != 0):
		p.fixed(rec.Session)
	case rec.Kind == msg.RecDone && (hasAt || rec.Turn != ""):
		p.text(rec.Turn)
	}
	if hasAt {
		p.u64(toMicros(rec.At))
	}
}

// toMicros is a rank's time on the wire, rounded up: a known time is never 0 there.
func toMicros(at time.Duration) uint64 {
	at = min(at, maxAt*time.Microsecond)
	return uint64((at + time.Microsecond - 1) / time.Microsecond) //nolint:gosec // at is positive
}

// turn packs the ingress that has room; a record without one is packed as in older versions.
func (p *packer) turn(ingress string) {
	if ingress != "" {
		p.text(ingress)
	}
}

func (p *packer) status(slot uint64, rec *msg.Record) {
	s := &rec.Status
	p.begin(wireOf(rec.Kind), slot)
	p.u64(rec.Seq)
	p.buf = append(p.buf, flag(s.HasKVUsage, flagUsage))
	p.fixed(math.Float64bits(s.KVUsage))
	p.count(s.Capacity)
	p.count(int64(s.BlockSize))
	if s.LateReads > 0 { // a record without is packed as in older versions
		p.count(s.LateReads)
	}
	p.end()
}

func (p *packer) kv(slot uint64, rec *msg.Record) {
	kv := &rec.KV
	if len(kv.Delta.Hashes) > maxHashes {
		return
	}
	p.begin(wireOf(rec.Kind), slot)
	p.u64(rec.Seq)
	p.buf = append(p.buf, byte(kv.Tier))
	switch rec.Kind {
	case msg.RecKVBegin:
		p.count(int64(kv.BlockSize))
	case msg.RecKVEnd:
		p.count(int64(kv.Len))
		p.fixed(kv.Sum)
	default:
		p.buf = append(p.buf, byte(kv.Delta.Change))
		p.fixed(kv.Delta.Parent)
		p.count(int64(len(kv.Delta.Hashes)))
		for _, h := range kv.Delta.Hashes {
			p.fixed(h)
		}
	}
	p.end()
}

// snapshot packs a snapshot in as many parts as it needs.
func (p *packer) snapshot(slot uint64, rec *msg.Record) {
	s := rec.Snapshot
	n := countFitting(s.Open)
	p.begin(wireOf(rec.Kind), slot)
	p.buf = append(p.buf, flag(rec.Accepting, flagAccepting)|flag(s.Accepting, flagTaking)|flag(s.CachingOff,
		flagCachingOff)|
		flag(s.Target.Owned, flagOwned)|flag(n < len(s.Open), flagMore)|flag(s.Tripped, flagTripped))
	p.u64(rec.Seq)
	p.identity(identityOf(rec))
	p.count(int64(s.MaxOngoing))
	p.count(s.Capacity)
	p.count(int64(s.BlockSize))
	p.text(s.Node)
	p.text(s.Target.URL)
	p.text(s.Target.Addressing)
	p.count(int64(s.Target.Selector))
	p.open(s.Open[:n])
	if s.MaxModelLen > 0 {
		p.count(int64(s.MaxModelLen))
	}
	p.end()
	for rest := s.Open[n:]; len(rest) > 0; rest = rest[n:] {
		n = countFitting(rest)
		p.begin(wireMore, slot)
		p.buf = append(p.buf, flag(n < len(rest), flagMore))
		p.open(rest[:n])
		p.end()
	}
}

// countFitting is how many open requests fit into one part.
func countFitting(open []msg.OpenRequest) (n int) {
	for size := 0; n < len(open) && size < partBytes; n++ {
		size += openBytes + len(open[n].Ingress)
	}
	return n
}

func (p *packer) open(list []msg.OpenRequest) {
	p.count(int64(len(list)))
	for i := range list {
		o := &list[i]
		p.request(o.ReqID, o.Ingress, o.Tokens, o.Hit, o.Out)
		p.buf = append(p.buf, flag(o.Decoding, 1))
	}
}

// roster packs the list of all ranks of a node, by slot.
func (p *packer) roster(n int, each func(yield func(slot uint64, id identity))) {
	p.buf, p.ends = p.buf[:0], p.ends[:0]
	p.begin(wireRoster, 0)
	p.count(int64(n))
	each(func(slot uint64, id identity) {
		p.u64(slot)
		p.identity(id)
	})
	p.end()
}

func (p *packer) identity(id identity) {
	p.text(id.app)
	p.text(id.unit)
	p.u64(uint64(id.rank))
	p.u64(id.epoch)
	p.fixed(id.incarnation)
}

func (p *packer) request(id uint64, ingress string, tokens, hit, out int) {
	p.fixed(id)
	p.text(ingress)
	p.count(int64(tokens))
	p.count(int64(hit))
	p.count(int64(out))
}

// begin leaves one byte for the length: nearly every record is that short.
func (p *packer) begin(kind wireKind, slot uint64) {
	p.buf = append(p.buf, 0, byte(kind))
	p.u64(slot)
}

func (p *packer) end() {
	start := 0
	if n := len(p.ends); n > 0 {
		start = p.ends[n-1]
	}
	size := len(p.buf) - start - 1
	var prefix [prefixBytes + 1]byte
	n := binary.PutUvarint(prefix[:], uint64(size)) //nolint:gosec // a length
	if n > 1 {
		p.buf = append(p.buf, prefix[:n-1]...)
		copy(p.buf[start+n:], p.buf[start+1:start+1+size])
	}
	copy(p.buf[start:], prefix[:n])
	p.ends = append(p.ends, len(p.buf))
}

func (p *packer) u64(v uint64) { p.buf = binary.AppendUvarint(p.buf, v) }

// count packs a number that is not negative; a number that readers would refuse becomes the nearest that they
// accept.
func (p *packer) count(v int64) { p.u64(uint64(min(max(v, 0), maxCount))) }

func (p *packer) fixed(v uint64) { p.buf = binary.LittleEndian.AppendUint64(p.buf, v) }

func (p *packer) text(s string) {
	s = s[:min(len(s), maxString)]
	p.u64(uint64(len(s)))
	p.buf = append(p.buf, s...)
}

func flag(on bool, bit byte) byte {
	if on {
		return bit
	}
	return 0
}
