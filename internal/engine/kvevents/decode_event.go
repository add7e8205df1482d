package kvevents

import (
	"math"
	"slices"
)

// field is one member of an event; its order is that of the array shape.
type field uint8

const (
	fieldHashes field = iota
	fieldParent
	fieldTokens
	fieldBlockSize
	fieldLoraID
	fieldMedium
	fieldLoraName
	fieldExtra
	fieldGroup
	fieldSpec
	fieldLocality
	fieldSalt
	fieldMetadata // a map of members
	fieldUnused   // known, and without meaning for the identity of a block
	fieldOther
)

// storedFields and removedFields are the fields of events in array form, in order. Older engines send fewer
// fields, newer ones send more.
var (
	storedFields = [...]field{ //nolint:gochecknoglobals // a constant table
		fieldHashes, fieldParent, fieldTokens, fieldBlockSize, fieldLoraID, fieldMedium, fieldLoraName,
		fieldExtra, fieldGroup, fieldSpec,
		fieldUnused, fieldLocality,
	}
	//nolint:gochecknoglobals // a constant table
	removedFields = [...]field{fieldHashes, fieldMedium, fieldGroup, fieldLocality}
)

func fieldOf(name []byte) field {
	switch string(name) {
	case "block_hashes":
		return fieldHashes
	case "parent_block_hash":
		return fieldParent
	case "token_ids":
		return fieldTokens
	case "block_size":
		return fieldBlockSize
	case "lora_id":
		return fieldLoraID
	case "medium":
		return fieldMedium
	case "lora_name":
		return fieldLoraName
	case "extra_keys":
		return fieldExtra
	case "group_idx":
		return fieldGroup
	case "kv_cache_spec_kind":
		return fieldSpec
	case "locality":
		return fieldLocality
	case "cache_salt":
		return fieldSalt
	case "metadata":
		return fieldMetadata
	case "type", "kv_cache_spec_sliding_window", "session_id":
		return fieldUnused
	}
	return fieldOther
}

func kindOf(name []byte) (kind, bool) {
	switch string(name) {
	case "BlockStored":
		return kindStored, true
	case "BlockRemoved":
		return kindRemoved, true
	case "AllBlocksCleared":
		return kindCleared, true
	}
	return 0, false
}

// shape reads one event: an array or a map. The shape may differ from event to event.
func (d *batchDecoder) shape(r *reader, e *decoded) verdict {
	if n, ok := r.array(); ok {
		return d.arrayEvent(r, n, e)
	}
	if n, ok := r.mapping(); ok {
		return d.mapEvent(r, n, e)
	}
	return unknown
}

func (d *batchDecoder) arrayEvent(r *reader, n int, e *decoded) verdict {
	if n == 0 {
		return unknown
	}
	name, ok := r.text()
	if !ok {
		return unknown
	}
	if e.kind, ok = kindOf(name); !ok {
		return unknown
	}
	order := storedFields[:]
	switch e.kind {
	case kindRemoved:
		order = removedFields[:]
	case kindCleared:
		return fine
	case kindStored:
	}
	for i := range min(n-1, len(order)) {
		if v := d.field(r, order[i], e); v != fine {
			return v
		}
	}
	e.unknownMembers += max(0, n-1-len(order))
	return d.complete(n > 1, e)
}

// mapEvent reads the fields in the order they come, the type first or last.
func (d *batchDecoder) mapEvent(r *reader, n int, e *decoded) verdict {
	if n > maxFields {
		return fatal
	}
	known, from := false, r.b
	for range n {
		key, ok := r.text()
		if !ok {
			key = nil
			_, _ = r.skip()
		}
		if string(key) != "type" {
			_, _ = r.skip()
			continue
		}
		name, ok := r.text()
		if !ok {
			return unknown
		}
		if e.kind, known = kindOf(name); !known {
			return unknown
		}
		break
	}
	if !known {
		return unknown
	}
	if e.kind == kindCleared {
		return fine
	}
	r.b = from
	return d.members(r, n, e)
}

func (d *batchDecoder) members(r *reader, n int, e *decoded) verdict {
	var hashes bool
	for range n {
		key, ok := r.text()
		if !ok {
			_, _ = r.skip()
		}
		f := fieldOf(key)
		if f == fieldHashes && hashes {
			return e.skipOrFail() // twice
		}
		hashes = hashes || f == fieldHashes
		if v := d.field(r, f, e); v != fine {
			return v
		}
	}
	return d.complete(hashes, e)
}

// An event without hashes cannot be read.
func (*batchDecoder) complete(hashes bool, e *decoded) verdict {
	if !hashes {
		return e.skipOrFail()
	}
	return fine
}

// skipOrFail is the verdict on an event that cannot be read. Skipping a store only under-reports the cache;
// skipping a removal would over-report it, so that is fatal.
func (e *decoded) skipOrFail() verdict {
	if e.kind == kindRemoved {
		return fatal
	}
	return bad
}

// field reads one member; nil means the default of any field.
func (d *batchDecoder) field(r *reader, f field, e *decoded) verdict {
	if f == fieldUnused || e.kind == kindRemoved && !slices.Contains(removedFields[:], f) {
		return passed(r)
	}
	if f != fieldHashes && r.null() {
		return fine
	}
	if f == fieldOther {
		e.unknownMembers++
		return passed(r)
	}
	if v := d.value(r, f, e); v != fine {
		if v == bad {
			return e.skipOrFail()
		}
		return v
	}
	return fine
}

// passed skips a value.
func passed(r *reader) verdict {
	if _, ok := r.skip(); !ok {
		return fatal
	}
	return fine
}

func (d *batchDecoder) value(r *reader, f field, e *decoded) verdict {
	switch f {
	case fieldHashes:
		return d.hashList(r)
	case fieldParent:
		h, ok := r.hash()
		if h != UintHash(0) { // llm-d-inference-sim writes 0 at the root in its arrays
			e.fields.Parent = h
		}
		return readable(ok)
	case fieldTokens:
		return d.tokenList(r)
	case fieldBlockSize:
		n, ok := r.unsigned()
		e.fields.BlockSize = int(min(n, maxBlockSize+1))
		return readable(ok && n <= maxBlockSize)
	case fieldLoraID:
		v, _, ok := r.integer()
		e.fields.LoraID = int64(v)
		return readable(ok)
	case fieldGroup:
		n, ok := r.unsigned()
		e.fields.Group = int(min(n, math.MaxInt32))
		return readable(ok && n < maxGroups)
	case fieldExtra:
		e.hasExtra = true
		return d.extraList(r)
	case fieldMedium:
		return d.text(r, &e.fields.Medium)
	case fieldLoraName:
		// SGLang 0.5.18 and 0.5.19 append a map of metadata where vLLM's arrays have the name of the adapter
		if n, ok := r.mapping(); ok {
			return d.metadata(r, n, e)
		}
		return d.text(r, &e.fields.LoraName)
	case fieldSalt:
		return d.text(r, &e.fields.CacheSalt)
	case fieldMetadata:
		n, ok := r.mapping()
		if !ok {
			return bad
		}
		return d.metadata(r, n, e)
	case fieldSpec:
		return d.text(r, &e.fields.Kind)
	case fieldLocality:
		return d.text(r, &e.fields.Locality)
	case fieldUnused, fieldOther:
	}
	return fine
}

// metadata reads the n members of a map that says which request stored the blocks.
func (d *batchDecoder) metadata(r *reader, n int, e *decoded) verdict {
	if n > maxFields {
		return bad
	}
	for range n {
		key, ok := r.text()
		if !ok {
			_, _ = r.skip()
		}
		f := fieldOf(key)
		if f != fieldSalt && f != fieldUnused {
			f = fieldOther
		}
		if v := d.field(r, f, e); v != fine {
			return v
		}
	}
	return fine
}

func readable(ok bool) verdict {
	if ok {
		return fine
	}
	return bad
}

func (d *batchDecoder) text(r *reader, to *string) verdict {
	b, ok := r.text()
	if ok {
		*to = d.name(b)
	}
	return readable(ok)
}

// hash takes an integer or raw bytes.
func (r *reader) hash() (Hash, bool) {
	if v, negative, ok := r.integer(); ok && negative {
		return IntHash(int64(v)), true
	} else if ok {
		return UintHash(v), true
	}
	b, ok := r.bin()
	if !ok {
		return Hash{}, false
	}
	return BytesHash(b)
}

func (d *batchDecoder) hashList(r *reader) verdict {
	n, ok := r.array()
	if !ok {
		return bad
	}
	if len(d.hashes)+n > maxHashes {
		return fatal
	}
	for range n {
		h, ok := r.hash()
		if !ok {
			return bad
		}
		d.hashes = append(d.hashes, h)
	}
	return fine
}

func (d *batchDecoder) tokenList(r *reader) verdict {
	n, ok := r.array()
	if !ok {
		return bad
	}
	if len(d.tokens)+n > maxTokens {
		return fatal
	}
	d.tokens = slices.Grow(d.tokens, n)
	for range n {
		id, ok := r.unsigned()
		if !ok || id > math.MaxUint32 {
			return bad
		}
		d.tokens = append(d.tokens, uint32(id))
	}
	return fine
}

func (d *batchDecoder) extraList(r *reader) verdict {
	n, ok := r.array()
	if !ok {
		return bad
	}
	if len(d.extra)+n > maxHashes {
		return fatal
	}
	for range n {
		if r.null() {
			d.extra = append(d.extra, nil)
			continue
		}
		raw, ok := r.skip()
		if !ok {
			return bad
		}
		d.extra = append(d.extra, raw)
	}
	return fine
}
