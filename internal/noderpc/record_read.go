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

// errFraming says that packed records end within a record, or that a length is wrong: nothing after it can be
// read.
var errFraming = errors.New("a record's length does not fit what was sent")

// remoteRank is a rank as a stream's reader knows it.
type remoteRank struct {
	identity
	slot    uint64
	gen     uint64 // of the feedSubscribers that have its snapshot; used by the Feed
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
	roster(list []identity)
}

// unpackStats counts what an unpacker skipped.
type unpackStats struct {
	kinds     atomic.Uint64 // records of an unknown kind
	fields    atomic.Uint64 // records with fields after the known ones
	malformed atomic.Uint64 // records that contradict themselves or a bound
	strays    atomic.Uint64 // records of ranks without a snapshot
}

// unpacker reads the packed records of one stream. Its memory is bounded for any input. In the steady state
// it allocates nothing.
type unpacker struct {
	stats *unpackStats
	slots map[uint64]*remoteRank
	ranks map[appRank]*remoteRank
	texts map[string]string

	rec     msg.Record // re-used, as all fields below
	snap    msg.Snapshot
	hashes  []uint64
	pending *remoteRank // of the snapshot being read, until its last part is here
	ids     []identity
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
	for len(packed) > 0 {
		size, n := binary.Uvarint(packed)
		if n <= 0 || size == 0 || size > uint64(len(packed[n:])) {
			return fmt.Errorf("%w: %d bytes left", errFraming, len(packed))
		}
		body := packed[n : n+int(size)] //nolint:gosec // at most len(packed)
		packed = packed[n+int(size):]   //nolint:gosec // as above
		u.readRecord(wireKind(body[0]), &cursor{b: body[1:], texts: u.texts}, to)
	}
	return nil
}

func (u *unpacker) readRecord(kind wireKind, c *cursor, to recordHandler) {
	slot := c.u64()
	if kind != wireMore {
		u.pending = nil // the parts of a snapshot follow each other
	}
	var src *remoteRank
	switch {
	case kind == wireRoster:
		u.readRoster(c)
	case kind == wireMore:
		src = u.readMore(slot, c)
	case kind == wireOf(msg.RecSnapshot):
		src = u.readSnapshot(slot, c)
	case kind == wireOf(msg.RecGone):
		src = u.readGone(slot, c)
	case kind > 0 && kind <= lastRecord:
		src = u.readDelta(msg.RecordKind(kind-1), slot, c)
	default:
		u.stats.kinds.Add(1)
		return
	}
	if !u.checkRecord(c) {
		u.pending = nil
		return
	}
	if kind == wireRoster {
		to.roster(u.ids)
	} else if src != nil {
		u.passOn(src, to)
	}
}

// checkRecord says whether a record was read whole, and counts if it was not.
func (u *unpacker) checkRecord(c *cursor) bool {
	if c.bad {
		u.stats.malformed.Add(1)
		return false
	}
	if len(c.b) > 0 {
		u.stats.fields.Add(1)
	}
	if len(u.texts) > maxTexts {
		clear(u.texts)
	}
	return true
}

// passOn passes the current record on, and adds or removes its rank.
func (u *unpacker) passOn(src *remoteRank, to recordHandler) {
	switch u.rec.Kind {
	case msg.RecSnapshot:
		if !u.addRank(src) {
			u.stats.malformed.Add(1)
			return
		}
	case msg.RecGone:
		u.removeRank(src)
	default:
	}
	src.setIn(&u.rec)
	to.record(src, &u.rec)
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
	u.rec = msg.Record{Kind: msg.RecGone, Seq: c.u64()}
	id := c.identity()
	if src := u.slots[slot]; src != nil && src.identity == id {
		return src
	}
	return &remoteRank{identity: id, slot: slot}
}

// readDelta reads a record between a rank's snapshot and its end; nil if the rank is not known.
func (u *unpacker) readDelta(kind msg.RecordKind, slot uint64, c *cursor) *remoteRank {
	src := u.slots[slot]
	if src == nil {
		u.stats.strays.Add(1)
		c.b = nil
		return nil
	}
	rec := &u.rec
	*rec = msg.Record{Kind: kind, Seq: c.u64()}
	switch kind {
	case msg.RecState:
		flags := c.byte()
		rec.Accepting, rec.Fenced, rec.Draining = flags&flagAccepting != 0, flags&flagFenced != 0,
			flags&flagDraining != 0
		rec.Tripped = flags&flagTripped != 0
		rec.Cause = c.text()
		rec.Turn = c.turn()
	case msg.RecStatus:
		rec.Status.HasKVUsage = c.byte()&flagUsage != 0
		rec.Status.KVUsage = math.Float64frombits(c.fixed())
		rec.Status.Capacity, rec.Status.BlockSize = c.count(), c.int()
		if len(c.b) > 0 {
			rec.Status.LateReads = c.count()
		}
	case msg.RecKVBegin, msg.RecKV, msg.RecKVEnd:
		u.readKV(c)
	default:
		rec.ReqID, rec.Ingress, rec.Tokens, rec.Hit, rec.Out = c.request()
		rec.Cause = c.text()
		if kind == msg.RecAdmitted && len(c.b) > 0 {
			rec.Session = c.fixed()
		}
		if kind == msg.RecDone {
			rec.Turn = c.turn()
		}
		rec.At = c.at()
	}
	return src
}

func (u *unpacker) readKV(c *cursor) {
	kv := &u.rec.KV
	kv.Tier = kvindex.Tier(c.byte())
	switch u.rec.Kind {
	case msg.RecKVBegin:
		kv.BlockSize = c.int()
	case msg.RecKVEnd:
		kv.Len = c.int()
		kv.Sum = c.fixed()
	default:
		kv.Delta.Change = kvindex.Change(c.byte())
		kv.Delta.Parent = c.fixed()
		u.hashes = u.hashes[:0]
		for range c.size(maxHashes, 8) {
			u.hashes = append(u.hashes, c.fixed())
		}
		kv.Delta.Hashes = u.hashes
	}
}

// readSnapshot reads a snapshot, or its first part, which is passed on only with the last one.
func (u *unpacker) readSnapshot(slot uint64, c *cursor) *remoteRank {
	flags := c.byte()
	u.rec = msg.Record{
		Kind: msg.RecSnapshot, RankState: msg.RankState{Accepting: flags&flagAccepting != 0}, Seq: c.u64(),
		Snapshot: &u.snap,
	}
	id := c.identity()
	u.snap = msg.Snapshot{
		Accepting: flags&flagTaking != 0, Tripped: flags&flagTripped != 0,
		CachingOff: flags&flagCachingOff != 0, MaxOngoing: c.int(), Capacity: c.count(),
		BlockSize: c.int(), Node: c.text(),
		Target: msg.Target{
			Owned: flags&flagOwned != 0, URL: c.text(), Addressing: c.text(), Selector: c.int(),
		},
		Open: u.snap.Open[:0],
	}
	u.readOpen(c)
	if len(c.b) > 0 { // otherwise the engine, or an older version, did not report it
		u.snap.MaxModelLen = c.int()
	}
	src := u.slots[slot]
	if src == nil || src.identity != id {
		src = &remoteRank{identity: id, slot: slot}
	}
	return u.finishSnapshot(src, flags)
}

// readMore reads a further part of a snapshot.
func (u *unpacker) readMore(slot uint64, c *cursor) *remoteRank {
	flags := c.byte()
	if u.pending == nil || u.pending.slot != slot {
		u.stats.strays.Add(1) // its first part was malformed
		c.b = nil
		return nil
	}
	u.readOpen(c)
	return u.finishSnapshot(u.pending, flags)
}

func (u *unpacker) finishSnapshot(src *remoteRank, flags byte) *remoteRank {
	if flags&flagMore != 0 {
		u.pending = src
		return nil
	}
	u.pending = nil
	return src
}

func (u *unpacker) readOpen(c *cursor) {
	n := c.size(maxOpenRequests-len(u.snap.Open), 8)
	for range n {
		var o msg.OpenRequest
		o.ReqID, o.Ingress, o.Tokens, o.Hit, o.Out = c.request()
		o.Decoding = c.byte() != 0
		if c.bad {
			return
		}
		u.snap.Open = append(u.snap.Open, o)
	}
}

func (u *unpacker) readRoster(c *cursor) {
	u.ids = u.ids[:0]
	for range c.size(maxRanks, 8) {
		c.u64() // the slot, which the snapshot repeats
		u.ids = append(u.ids, c.identity())
	}
}

// cursor reads the fields of a record. After a field that is missing everything is zero, and bad is set.
type cursor struct {
	b     []byte
	bad   bool
	texts map[string]string
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

// turn is the last, optional text of a record.
func (c *cursor) turn() string {
	if len(c.b) == 0 {
		return ""
	}
	return c.text()
}

// at is the optional time of a record. A time that no rank's clock can show is read as none: the record is
// valid without it, and leaving it out would cost the reader a snapshot.
func (c *cursor) at() time.Duration {
	if len(c.b) == 0 {
		return 0
	}
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
