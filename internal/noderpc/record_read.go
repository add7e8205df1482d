package noderpc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// Reasons to end a stream and to have its ranks listed again.
var (
	errMalformed = errors.New("a record contradicts itself or a bound")
	errGap       = errors.New("a record is missing")
)

// remoteRank is a rank as a stream's reader knows it.
type remoteRank struct {
	identity
	slot    uint64
	seq     uint64              // of its last record
	sinks   []*msg.Subscription // that have its snapshot
	mailbox *remoteMailbox
}

// appRank names a rank without its incarnation.
type appRank struct {
	app  string
	rank routing.RankID
}

func (id *identity) key() appRank { return appRank{id.app, id.rank} }

// recordHandler receives the records that an unpacker reads. rec is valid during the call only.
type recordHandler interface {
	record(src *remoteRank, rec *msg.Record)
	listed() // every rank of the node has had its snapshot
}

// unpackStats counts what an unpacker skipped.
type unpackStats struct {
	kinds     atomic.Uint64 // records of an unknown kind
	malformed atomic.Uint64 // streams that ended with such a record, or with a gap
}

// unpacker reads the packed records of one stream, which may be cut anywhere. Its memory is bounded for any
// input. In the steady state it allocates nothing.
type unpacker struct {
	stats *unpackStats
	slots map[uint64]*remoteRank
	ranks map[appRank]*remoteRank
	texts map[string]string
	rest  []byte // the beginning of a record whose end comes with the next message

	rec    msg.Record // re-used, as all fields below
	snap   msg.Snapshot
	hashes []uint64
}

// maxTexts bounds the texts an unpacker keeps, so that repeated names cost nothing.
const maxTexts = 1024

func newUnpacker(skipped *unpackStats) *unpacker {
	return &unpacker{
		stats: skipped, slots: map[uint64]*remoteRank{}, ranks: map[appRank]*remoteRank{},
		texts: map[string]string{},
	}
}

// unpack passes the records to to, in order. After an error nothing more can be read of this stream.
func (u *unpacker) unpack(packed []byte, to recordHandler) error {
	if len(u.rest) > 0 {
		u.rest = append(u.rest, packed...)
		packed = u.rest
	}
	for {
		size, n := binary.Uvarint(packed)
		if n < 0 || n > 0 && (size == 0 || size > maxRecord) {
			u.stats.malformed.Add(1)
			return errMalformed
		}
		if n == 0 || size > uint64(len(packed)-n) {
			if len(packed) != len(u.rest) {
				u.rest = append(u.rest[:0], packed...)
			}
			return nil
		}
		end := n + int(size)
		if err := u.readRecord(&cursor{b: packed[n:end], texts: u.texts}, to); err != nil {
			if errors.Is(err, errMalformed) || errors.Is(err, errGap) {
				u.stats.malformed.Add(1)
			}
			return err
		}
		packed = packed[end:]
	}
}

func (u *unpacker) readRecord(c *cursor, to recordHandler) error {
	kind, slot, seq := wireKind(c.byte()), c.u64(), c.u64()
	src := u.slots[slot]
	u.rec = msg.Record{Kind: msg.RecordKind(kind - 1), Seq: seq}
	switch {
	case c.bad:
		return errMalformed
	case kind == wireListed:
		to.listed()
		return nil
	case kind == wireEnd:
		return endReason(seq)
	case kind == wireOf(msg.RecSnapshot):
		src = u.readSnapshot(slot, c)
	case kind == wireOf(msg.RecGone):
		src = u.readGone(slot, c)
	case src == nil:
		return nil // of a rank that is still to be listed
	case seq > src.seq+1:
		return fmt.Errorf("%w: %d follows %d", errGap, seq, src.seq)
	case kind == 0 || kind > lastRecord:
		u.stats.kinds.Add(1)
		src.seq = seq
		return nil
	default:
		u.readDelta(c)
	}
	if c.bad || u.rec.Kind == msg.RecSnapshot && !u.addRank(src) {
		return errMalformed
	}
	if len(u.texts) > maxTexts {
		clear(u.texts)
	}
	if u.rec.Kind == msg.RecGone {
		u.removeRank(src)
	}
	src.seq = seq
	src.setIn(&u.rec)
	to.record(src, &u.rec)
	return nil
}

// endReason is why the node has ended the stream; a later version may know more reasons.
func endReason(number uint64) error {
	if number < uint64(len(endReasons)) {
		return endReasons[number]
	}
	return errEnded
}

func (u *unpacker) addRank(src *remoteRank) bool {
	key := src.key()
	if old := u.ranks[key]; old != nil && old != src {
		u.removeRank(old)
	}
	if old := u.slots[src.slot]; old != nil && old != src {
		u.removeRank(old)
	}
	if len(u.slots) >= maxRanks && u.slots[src.slot] == nil {
		return false
	}
	u.slots[src.slot], u.ranks[key] = src, src
	return true
}

func (u *unpacker) removeRank(src *remoteRank) {
	if u.slots[src.slot] == src {
		delete(u.slots, src.slot)
	}
	if u.ranks[src.key()] == src {
		delete(u.ranks, src.key())
	}
}

// readGone reads the end of a rank, whether it is known or not.
func (u *unpacker) readGone(slot uint64, c *cursor) *remoteRank {
	id := c.identity()
	if src := u.slots[slot]; src != nil && src.identity == id {
		return src
	}
	return &remoteRank{identity: id, slot: slot}
}

// readDelta reads a record between a rank's snapshot and its end.
func (u *unpacker) readDelta(c *cursor) {
	rec := &u.rec
	switch rec.Kind {
	case msg.RecState:
		flags := c.byte()
		rec.Accepting, rec.Fenced, rec.Draining = flags&flagAccepting != 0, flags&flagFenced != 0,
			flags&flagDraining != 0
		rec.Ejected = flags&flagEjected != 0
		rec.Cause, rec.OfferedTo = c.text(), c.text()
	case msg.RecStatus:
		rec.Status.HasKVUsage = c.byte()&flagUsage != 0
		rec.Status.KVUsage = math.Float64frombits(c.fixed())
		rec.Status.Capacity, rec.Status.BlockSize, rec.Status.LateReads = c.count(), c.int(), c.count()
	case msg.RecAdapters:
		rec.Adapters = c.list()
	case msg.RecKVBegin, msg.RecKV, msg.RecKVEnd:
		u.readKV(c)
	default:
		rec.ReqID, rec.Ingress, rec.Tokens, rec.Hit, rec.Out = c.request()
		rec.Cause, rec.At = c.text(), c.at()
		switch rec.Kind {
		case msg.RecAdmitted:
			rec.Session = c.u64()
		case msg.RecDone:
			rec.OfferedTo = c.text()
		default:
		}
	}
}

func (u *unpacker) readKV(c *cursor) {
	kv := &u.rec.KV
	kv.Tier = kvindex.Tier(c.byte())
	switch u.rec.Kind {
	case msg.RecKVBegin:
		kv.BlockSize = c.int()
	case msg.RecKV:
		kv.Delta.Change = kvindex.Change(c.byte())
		kv.Delta.Parent = c.fixed()
		u.hashes = u.hashes[:0]
		for range c.size(maxHashes, 8) {
			u.hashes = append(u.hashes, c.fixed())
		}
		kv.Delta.Hashes = u.hashes
	default:
	}
}

func (u *unpacker) readSnapshot(slot uint64, c *cursor) *remoteRank {
	flags, id := c.byte(), c.identity()
	u.rec.Accepting, u.rec.Cause, u.rec.Snapshot = flags&flagAccepting != 0, c.text(), &u.snap
	u.snap = msg.Snapshot{
		Accepting: flags&flagTaking != 0, Ejected: flags&flagEjected != 0,
		CachingOff: flags&flagCachingOff != 0, MaxOngoing: c.int(), Capacity: c.count(),
		BlockSize: c.int(), MaxModelLen: c.int(), Node: c.text(),
		Target: msg.Target{
			Owned: flags&flagOwned != 0, URL: c.text(), Addressing: c.text(), Selector: c.int(),
		},
		Open: u.snap.Open[:0],
	}
	for range c.size(maxOpenRequests, 8) {
		var o msg.OpenRequest
		o.ReqID, o.Ingress, o.Tokens, o.Hit, o.Out = c.request()
		o.Decoding = c.byte() != 0
		if c.bad {
			break
		}
		u.snap.Open = append(u.snap.Open, o)
	}
	u.snap.Adapters = c.list()
	if src := u.slots[slot]; src != nil && src.identity == id {
		return src
	}
	return &remoteRank{identity: id, slot: slot}
}

// cursor reads the fields of a record. After a field that is missing everything is zero, and bad is set.
type cursor struct {
	b     []byte
	bad   bool
	texts map[string]string
}

// list reads the names of adapters.
func (c *cursor) list() (names []string) {
	for range c.size(msg.MaxAdapters, 1) {
		names = append(names, c.text())
	}
	return names
}

func (c *cursor) fail() {
	c.bad, c.b = true, nil
}

func (c *cursor) u64() uint64 {
	v, n := binary.Uvarint(c.b)
	if n <= 0 {
		c.fail()
		return 0
	}
	c.b = c.b[n:]
	return v
}

func (c *cursor) count() int64 {
	v := c.u64()
	if v > maxCount {
		c.fail()
		return 0
	}
	return int64(v)
}

func (c *cursor) int() int { return int(c.count()) }

// size is the length of a list whose entries have at least entry bytes.
func (c *cursor) size(most, entry int) int {
	n := c.int()
	if n > most || n > len(c.b)/entry {
		c.fail()
		return 0
	}
	return n
}

func (c *cursor) byte() byte {
	if len(c.b) == 0 {
		c.fail()
		return 0
	}
	v := c.b[0]
	c.b = c.b[1:]
	return v
}

func (c *cursor) fixed() uint64 {
	if len(c.b) < 8 {
		c.fail()
		return 0
	}
	v := binary.LittleEndian.Uint64(c.b)
	c.b = c.b[8:]
	return v
}

// text is a string of the stream; a repeated one is not allocated again.
func (c *cursor) text() string {
	n := c.size(maxString, 1)
	if n == 0 {
		return ""
	}
	raw := c.b[:n]
	c.b = c.b[n:]
	if s, ok := c.texts[string(raw)]; ok {
		return s
	}
	s := string(raw)
	if c.texts != nil && len(c.texts) <= maxTexts {
		c.texts[s] = s
	}
	return s
}

// at is the time of a record. A time that no rank's clock can show is read as none: the record is valid
// without it.
func (c *cursor) at() time.Duration {
	v := c.u64()
	if v > maxAt {
		return 0
	}
	return time.Duration(v) * time.Microsecond
}

func (c *cursor) identity() (id identity) {
	id.app, id.unit = c.text(), c.text()
	rank := c.u64()
	if rank > math.MaxUint32 {
		c.fail()
		return id
	}
	id.rank, id.epoch, id.incarnation = routing.RankID(rank), c.u64(), c.fixed()
	return id
}

func (c *cursor) request() (id uint64, ingress string, tokens, hit, out int) {
	return c.fixed(), c.text(), c.int(), c.int(), c.int()
}
