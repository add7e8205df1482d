package kvevents

// Media and localities as engines spell them; others are passed on as they come.
const (
	MediumGPU     = "GPU"
	MediumCPU     = "CPU"
	MediumStorage = "STORAGE"
)

// Stored says that blocks entered a rank's cache. The slices are valid only during the call they are passed
// in.
type Stored struct {
	Hashes    []Hash
	Parent    Hash     // zero at the root
	Tokens    []uint32 // of all blocks, concatenated: BlockSize per hash
	BlockSize int      // tokens per block, of this event
	Medium    string   // "" = the engine's only one (old shapes)
	LoraName  string   // "" = none
	LoraID    int64    // -1 = none
	Group     int      // KV group of a hybrid model, 0 otherwise
	Kind      string   // kv_cache_spec_kind; "" = not told
	Locality  string   // "" = not told
	// Extra holds, per block, the raw msgpack of its extra_keys entry, nil where the entry is nil; nil as a
	// whole where the event has none. Blocks with different extras never share (cache_salt, LoRA, images):
	// see Salt.
	Extra [][]byte
}

// Removed says that copies of blocks left the cache: one count down per hash, (Hash, Group, Medium) is the
// key.
type Removed struct {
	Hashes   []Hash
	Medium   string
	Group    int
	Locality string
}

// Sink takes the events of one rank, in the engine's order, from one goroutine at a time. Its methods must
// not block and must not keep what they are given. The first call is Reset.
type Sink interface {
	Stored(ev *Stored)
	Removed(ev *Removed)
	// Cleared: the engine dropped every block. What is known from here on is exact again.
	Cleared()
	// Reset: forget every block of the rank. partial = the engine may hold blocks that will never be told.
	Reset(partial bool)
}

// Salt is the cache_salt of a Stored event, "" without one. ok is false if its blocks are set apart by
// something else too (images, embeddings): such blocks match no text prompt.
func (ev *Stored) Salt() (salt string, ok bool) {
	for i, raw := range ev.Extra {
		if raw == nil {
			continue
		}
		r := reader{b: raw}
		n, isArray := r.array()
		if !isArray {
			return "", false
		}
		if ev.LoraName != "" && n > 0 {
			name, isText := r.text(maxText)
			if !isText || string(name) != ev.LoraName {
				return "", false
			}
			n--
		}
		if n == 0 {
			continue
		}
		text, isText := r.text(maxText)
		// the salt stands on the first block of a chain only
		if n > 1 || !isText || i > 0 || !ev.Parent.IsZero() {
			return "", false
		}
		salt = string(text)
	}
	return salt, true
}
