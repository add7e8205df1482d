package kvevents

import (
	"errors"
	"fmt"
	"math"
)

// Limits of one batch. Beyond them a batch is not decoded at all.
const (
	maxBatchBytes = 16 << 20
	maxEvents     = 1 << 16 // events of a batch
	maxHashes     = 1 << 18 // block hashes of a batch
	maxTokens     = 1 << 22 // token ids of a batch
	maxBlockSize  = 1 << 16 // tokens of a block
	maxText       = 4 << 10
	maxFields     = 64 // named fields of a map event
)

// errMalformed: a payload is no event batch, or may be incomplete.
var errMalformed = errors.New("malformed event batch")

// kind is what an event is.
type kind uint8

const (
	kindStored kind = iota
	kindRemoved
	kindCleared
)

// batchDecoder decodes payloads into events. It reuses its buffers: after a few batches it allocates only for
// new names. Not safe for concurrent use.
type batchDecoder struct {
	events  []decoded
	hashes  []Hash
	tokens  []uint32
	extra   [][]byte
	names   map[string]string // interned texts, bounded
	stored  Stored            // what the sink sees
	removed Removed

	delivered Content // Stored, Removed, Cleared and Blocks of all Delivers
}

// decoded is one event of the current batch; its spans index the batchDecoder's buffers.
type decoded struct {
	kind     kind
	fields   Stored // without what the spans say
	hasExtra bool
	// members of a Stored that this decoder does not know: they may set blocks apart
	unknownMembers int
	hashes         span
	tokens         span
	extra          span
}

type span struct{ from, to int }

func (s span) len() int { return s.to - s.from }

// batchInfo is a payload without its events.
type batchInfo struct {
	TS float64 // the engine's clock, seconds
	// the engine's own number, -1 = absent; the socket identifies the rank, not this field
	Rank      int
	Events    int // that were decoded
	Unknown   int // events of unknown types, skipped
	Malformed int // BlockStored events that contradict themselves, skipped: nothing else changes
	// members of BlockStored events that are not known; the events are used without them
	UnknownMembers int
}

// Decode reads a whole payload; Deliver passes its events to a sink afterwards. On an error (wrapping
// errMalformed) there is nothing to deliver: not msgpack, cut off, beyond a limit, or a removal that cannot
// be read (skipping one would leave blocks that are gone).
func (d *batchDecoder) Decode(payload []byte) (batchInfo, error) {
	d.events, d.hashes, d.tokens, d.extra = d.events[:0], d.hashes[:0], d.tokens[:0], d.extra[:0]
	batch, err := d.decode(payload)
	if err != nil {
		d.events = d.events[:0]
		return batchInfo{}, err
	}
	batch.Events = len(d.events)
	return batch, nil
}

func (d *batchDecoder) decode(payload []byte) (batchInfo, error) {
	if len(payload) > maxBatchBytes {
		return batchInfo{}, fmt.Errorf("%w: %d bytes", errMalformed, len(payload))
	}
	r := reader{payload}
	batch, n, err := header(&r)
	if err != nil {
		return batchInfo{}, err
	}
	count, ok := r.array()
	if !ok || count > maxEvents {
		return batchInfo{}, fmt.Errorf("%w: no list of events, or more than %d", errMalformed, maxEvents)
	}
	for i := range count {
		if err := d.event(&r, &batch); err != nil {
			return batchInfo{}, fmt.Errorf("event %d: %w", i, err)
		}
	}
	return batch, trailer(&r, n-2, &batch)
}

// header reads the head of a batch up to its events: [ts, events, rank?, …] has n elements.
func header(r *reader) (b batchInfo, n int, err error) {
	n, ok := r.array()
	if !ok || n < 2 {
		return batchInfo{}, 0, fmt.Errorf("%w: no array of time and events", errMalformed)
	}
	ts, ok := r.float()
	if !ok || math.IsNaN(ts) || math.IsInf(ts, 0) {
		return batchInfo{}, 0, fmt.Errorf("%w: no time", errMalformed)
	}
	return batchInfo{TS: ts, Rank: -1}, n, nil
}

// trailer reads what stands behind the events: the rank, and elements of versions to come. Bytes behind the
// batch are refused.
func trailer(r *reader, n int, b *batchInfo) error {
	if n > 0 && !r.null() {
		rank, ok := r.unsigned()
		if !ok || rank > math.MaxInt32 {
			return fmt.Errorf("%w: the rank is no rank", errMalformed)
		}
		b.Rank = int(rank)
	}
	for range n - 1 {
		if _, ok := r.skip(); !ok {
			return fmt.Errorf("%w: cut off behind the events", errMalformed)
		}
	}
	if len(r.b) > 0 {
		return fmt.Errorf("%w: %d bytes behind its end", errMalformed, len(r.b))
	}
	return nil
}

// event reads one event of either shape. It finds the event's end first, so that a fault inside cannot shift
// the next event.
func (d *batchDecoder) event(r *reader, b *batchInfo) error {
	whole, ok := r.skip()
	if !ok {
		return fmt.Errorf("%w: cut off or nested too deep", errMalformed)
	}
	own := reader{whole}
	hashes, tokens, extra := len(d.hashes), len(d.tokens), len(d.extra)
	e := decoded{fields: Stored{LoraID: -1}}
	verdict := d.shape(&own, &e)
	switch verdict {
	case fine:
		e.hashes, e.tokens, e.extra = span{hashes, len(d.hashes)}, span{tokens, len(d.tokens)},
			span{extra, len(d.extra)}
		verdict = d.check(&e)
	case unknown, bad, fatal:
	}
	switch verdict {
	case fine:
		d.events = append(d.events, e)
		b.UnknownMembers += e.unknownMembers
		return nil
	case unknown:
		b.Unknown++
	case bad:
		b.Malformed++
	case fatal:
		return fmt.Errorf("%w: unreadable removal, or beyond a limit", errMalformed)
	}
	d.hashes, d.tokens, d.extra = d.hashes[:hashes], d.tokens[:tokens], d.extra[:extra]
	return nil
}

// verdict decides how Decode treats an event.
type verdict uint8

const (
	fine    verdict = iota
	unknown         // skipped, counted
	bad             // skipped, counted: a Stored that contradicts itself
	fatal           // the whole batch is refused
)

// check looks at a readable event as a whole.
func (d *batchDecoder) check(e *decoded) verdict {
	if e.kind != kindStored || !indexed(e.fields.Kind) {
		return fine // other events are not delivered
	}
	hashes := d.hashes[e.hashes.from:e.hashes.to]
	if len(hashes) > 0 && (e.fields.BlockSize < 1 || e.tokens.len() != len(hashes)*e.fields.BlockSize) {
		return bad // the number of hashes does not fit the tokens, so positions would be wrong
	}
	if e.hasExtra && e.extra.len() != len(hashes) {
		return bad
	}
	for i, h := range hashes {
		if h == e.fields.Parent || i > 0 && h == hashes[i-1] {
			return bad // its own parent
		}
	}
	return fine
}

// Deliver hands the decoded events to sink, in order, those of groups that cannot be indexed excepted.
func (d *batchDecoder) Deliver(sink Sink, groups *groupFilter) {
	for i := range d.events {
		e := &d.events[i]
		switch e.kind {
		case kindCleared:
			d.delivered.Cleared++
			sink.Cleared()
		case kindRemoved:
			if e.hashes.len() > 0 && groups.removed(e) {
				d.removed = Removed{
					Hashes: d.hashes[e.hashes.from:e.hashes.to], Medium: e.fields.Medium,
					Group: e.fields.Group, Locality: e.fields.Locality,
				}
				d.delivered.Removed++
				sink.Removed(&d.removed)
			}
		case kindStored:
			if e.hashes.len() > 0 && groups.stored(e) {
				d.fill(e)
				d.delivered.Stored++
				d.delivered.Blocks += uint64(len(d.stored.Hashes))
				sink.Stored(&d.stored)
			}
		}
	}
}

func (d *batchDecoder) fill(e *decoded) {
	d.stored = e.fields
	d.stored.Hashes = d.hashes[e.hashes.from:e.hashes.to]
	d.stored.Tokens = d.tokens[e.tokens.from:e.tokens.to]
	if e.hasExtra {
		d.stored.Extra = d.extra[e.extra.from:e.extra.to]
	}
}

// cleared reports whether the current batch has an AllBlocksCleared.
func (d *batchDecoder) cleared() bool {
	for i := range d.events {
		if d.events[i].kind == kindCleared {
			return true
		}
	}
	return false
}

// maxNames bounds the interned texts of one decoder: media, adapters, kinds.
const maxNames = 1024

// name makes a string of b, once per different text.
func (d *batchDecoder) name(b []byte) string {
	if s, ok := d.names[string(b)]; ok {
		return s
	}
	if d.names == nil || len(d.names) >= maxNames {
		d.names = make(map[string]string)
	}
	s := string(b)
	d.names[s] = s
	return s
}
