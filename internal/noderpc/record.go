package noderpc

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing"
)

// The packed form of the records of a node's ranks. Each record is
//
//	length (uvarint) · kind (byte) · slot (uvarint) · number (uvarint) · fields
//
// A slot is a number that the sending process gives to one incarnation of a rank, and never again. A snapshot
// names the rank of its slot, and so does the end of a rank, which may reach a reader before the snapshot.
// Every other record names its rank by the slot, in one or two bytes. Numbers are uvarints, hashes and random
// numbers are 8 bytes little endian, and a text follows its length. New fields are only added at the end of a
// record: a reader skips fields and kinds that it does not know.

// wireKind is a record's kind on the wire. The numbers are fixed; a test pins them.
type wireKind byte

// A record of msg has its own number plus 1 on the wire. The others exist on the wire only, and have slot 0.
const (
	wireListed    wireKind = 64 + iota // every rank of the node is listed, and one that is not has ended
	wireEnd                            // the stream ends; its number says why: an index of endReasons
	wireHeartbeat                      // nothing has changed

	lastRecord = wireKind(msg.RecAdapters) + 1
)

// Reasons why a node ends a stream.
var (
	errEnded    = errors.New("the node has ended the stream")
	errShutDown = errors.New("the node is shutting down")
	// errRestarts makes the silence that follows an expected one (link.onStreamEnd).
	errRestarts = errors.New("dpserve restarts on this node")
	// errBehind has the reader list the ranks again; it is no sign that the node is in trouble.
	errBehind   = errors.New("the stream is too slow for this node's ranks")
	errReplaced = errors.New("the ingress has opened another stream")

	endReasons = []error{errEnded, errShutDown, errRestarts, errBehind, errReplaced}

	heartbeat = []byte{3, byte(wireHeartbeat), 0, 0}
)

// packEnd is the last record of a stream.
func packEnd(why error) []byte {
	return []byte{3, byte(wireEnd), 0, byte(max(slices.Index(endReasons, why), 0))}
}

// isEnd reports whether records begin with the last one.
func isEnd(packed []byte) bool { return len(packed) == len(packEnd(nil)) && packed[1] == byte(wireEnd) }

func wireOf(k msg.RecordKind) wireKind { return wireKind(k) + 1 }

// Bounds of packed records; the reader refuses larger values.
const (
	maxString       = 4 << 10 // bytes of a text
	maxHashes       = 4 << 10 // of one record
	maxOpenRequests = 1 << 20 // open requests of a snapshot
	maxRanks        = 1 << 16 // of a node
	maxCount        = 1 << 40 // of tokens and the like
	maxAt           = 1 << 50 // microseconds on a rank's clock: 35 years
	maxRecord       = 1 << 27 // bytes: a snapshot with so many requests
)

// Flags of a record.
const (
	flagAccepting byte = 1 << iota // RecSnapshot, RecState
	flagTaking                     // RecSnapshot: Snapshot.Accepting
	flagCachingOff
	flagOwned
	flagFenced
	flagDraining
	flagUsage // RecStatus: HasKVUsage
)

// flagEjected of RecSnapshot and RecState is a bit that they did not use.
const flagEjected = flagUsage

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
type packer struct{ buf []byte }

// pack packs a record into buf.
func (p *packer) pack(slot uint64, rec *msg.Record) {
	p.buf = p.buf[:0]
	switch rec.Kind {
	case msg.RecSnapshot:
		p.snapshot(slot, rec)
	case msg.RecAdmitted, msg.RecFirstToken, msg.RecProgress, msg.RecDone:
		p.begin(slot, rec)
		p.request(rec.ReqID, rec.Ingress, rec.Tokens, rec.Hit, rec.Out)
		p.text(rec.Cause)
		p.u64(toMicros(rec.At))
		switch rec.Kind {
		case msg.RecAdmitted:
			p.u64(rec.Session)
		case msg.RecDone:
			p.text(rec.OfferedTo)
		default:
		}
		p.end()
	case msg.RecState:
		p.begin(slot, rec)
		p.buf = append(p.buf, flag(rec.Accepting, flagAccepting)|flag(rec.Fenced,
			flagFenced)|flag(rec.Draining, flagDraining)|flag(rec.Ejected, flagEjected))
		p.text(rec.Cause)
		p.text(rec.OfferedTo)
		p.end()
	case msg.RecGone:
		p.begin(slot, rec)
		p.identity(identityOf(rec))
		p.end()
	case msg.RecStatus:
		p.status(slot, rec)
	case msg.RecAdapters:
		p.begin(slot, rec)
		p.list(rec.Adapters)
		p.end()
	case msg.RecKVBegin, msg.RecKV, msg.RecKVEnd:
		p.kv(slot, rec)
	case msg.RecSilent: // only a reader makes it
	}
}

// toMicros is a rank's time on the wire, rounded up: a known time is never 0 there, and 0 is none.
func toMicros(at time.Duration) uint64 {
	at = min(at, maxAt*time.Microsecond)
	return uint64((at + time.Microsecond - 1) / time.Microsecond)
}

func (p *packer) status(slot uint64, rec *msg.Record) {
	s := &rec.Status
	p.begin(slot, rec)
	p.buf = append(p.buf, flag(s.HasKVUsage, flagUsage))
	p.fixed(math.Float64bits(s.KVUsage))
	p.count(s.Capacity)
	p.count(int64(s.BlockSize))
	p.count(s.LateReads)
	p.end()
}

func (p *packer) kv(slot uint64, rec *msg.Record) {
	kv := &rec.KV
	p.begin(slot, rec)
	p.buf = append(p.buf, byte(kv.Tier))
	switch rec.Kind {
	case msg.RecKVBegin:
		p.count(int64(kv.BlockSize))
	case msg.RecKV:
		p.buf = append(p.buf, byte(kv.Delta.Change))
		p.fixed(kv.Delta.Parent)
		p.count(int64(len(kv.Delta.Hashes)))
		for _, h := range kv.Delta.Hashes {
			p.fixed(h)
		}
	default:
	}
	p.end()
}

func (p *packer) snapshot(slot uint64, rec *msg.Record) {
	s := rec.Snapshot
	p.begin(slot, rec)
	p.buf = append(p.buf, flag(rec.Accepting, flagAccepting)|flag(s.Accepting, flagTaking)|
		flag(s.CachingOff, flagCachingOff)|flag(s.Target.Owned, flagOwned)|flag(s.Ejected, flagEjected))
	p.identity(identityOf(rec))
	p.text(rec.Cause)
	p.count(int64(s.MaxOngoing))
	p.count(s.Capacity)
	p.count(int64(s.BlockSize))
	p.count(int64(s.MaxModelLen))
	p.text(s.Node)
	p.text(s.Target.URL)
	p.text(s.Target.Addressing)
	p.count(int64(s.Target.Selector))
	p.count(int64(len(s.Open)))
	for i := range s.Open {
		o := &s.Open[i]
		p.request(o.ReqID, o.Ingress, o.Tokens, o.Hit, o.Out)
		p.buf = append(p.buf, flag(o.Decoding, 1))
	}
	p.list(s.Adapters)
	p.end()
}

// listed packs the end of a list.
func (p *packer) listed() {
	p.buf = append(p.buf[:0], 3, byte(wireListed), 0, 0)
}

// list packs the names of adapters.
func (p *packer) list(names []string) {
	names = names[:min(len(names), msg.MaxAdapters)]
	p.count(int64(len(names)))
	for _, name := range names {
		p.text(name)
	}
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
func (p *packer) begin(slot uint64, rec *msg.Record) {
	p.buf = append(p.buf, 0, byte(wireOf(rec.Kind)))
	p.u64(slot)
	p.u64(rec.Seq)
}

func (p *packer) end() {
	size := len(p.buf) - 1
	var prefix [binary.MaxVarintLen64]byte
	n := binary.PutUvarint(prefix[:], uint64(size))
	if n > 1 {
		p.buf = append(p.buf, prefix[:n-1]...)
		copy(p.buf[n:], p.buf[1:1+size])
	}
	copy(p.buf, prefix[:n])
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
