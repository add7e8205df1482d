package kvindex

import (
	"encoding/binary"
	"math/bits"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// Block sizes.
const (
	// tokens or bytes per block; larger ones in events are faults (engines are seen with 1 to 784)
	MaxBlockSize     = 1 << 16
	DefaultTextBlock = 256 // bytes per block of identity "text": about 64 tokens of English
)

// Unit is what a chain's blocks are made of. Chains of different units never share a block.
type Unit uint8

// The units.
const (
	Tokens Unit = iota + 1 // token ids of the engine's tokenizer
	Text                   // bytes of the canonical request
)

// Salt is everything besides its content that must be equal for two blocks to be one.
type Salt struct {
	Unit      Unit
	BlockSize int    // tokens or bytes per block
	Model     string // served base model
	Adapter   string // LoRA name, "" for none
	CacheSalt string // cache_salt of the request, "" for none
}

// Extra is one more input of a block beside its tokens: an image, an audio clip, a prompt embedding.
type Extra struct {
	Block int    // index in the hashed prompt or event
	Key   uint64 // Hasher.Key of the engine's name for it
}

// Hasher computes chain hashes under a cluster's secret. It is a value, safe for concurrent use, and never
// allocates.
//
// A block's digest is d_i = xxh3(tokens_i, seed), with its extras folded in; its chain hash is s_i =
// fold(s_{i-1}, d_i), s_{-1} = Root(salt). Two steps instead of one let a block whose parent is not known yet
// be kept as 8 bytes, and the digests of a prompt do not wait for each other. Hashes are 64 bit and never 0.
type Hasher struct{ seed, left, right uint64 }

// Labels under which keys are drawn from the secret.
const (
	labelSeed  = 0x64707365727665a1
	labelLeft  = 0x64707365727665b2
	labelRight = 0x64707365727665c3
)

// NewHasher keys hashes by secret (cluster wide, from state/). Processes with one secret agree on every hash;
// without it an attacker cannot construct two prompts that collide.
func NewHasher(secret []byte) Hasher {
	return Hasher{
		seed:  xxh3.HashSeed(secret, labelSeed),
		left:  xxh3.HashSeed(secret, labelLeft),
		right: xxh3.HashSeed(secret, labelRight),
	}
}

// Root is the hash in front of block 0.
func (h Hasher) Root(s Salt) uint64 {
	x := h.fold(h.seed, uint64(s.Unit)<<32|uint64(uint32(s.BlockSize)))
	for _, part := range [...]string{s.Model, s.Adapter, s.CacheSalt} {
		x = h.fold(x, xxh3.HashStringSeed(part, h.seed)+uint64(len(part)))
	}
	return x
}

// Key is the digest of an engine's name for an extra input (an image hash).
func (h Hasher) Key(name string) uint64 { return xxh3.HashStringSeed(name, h.left) }

// Tokens appends the chain hashes of the full blocks of ids to dst; a last short block is left out, and so is
// everything when size is not in 1..MaxBlockSize. prev is Root, or the hash of the block in front. extras
// ascend by Block.
func (h Hasher) Tokens(dst []uint64, prev uint64, ids []uint32, size int, extras []Extra) []uint64 {
	if size < 1 || size > MaxBlockSize {
		return dst
	}
	if len(extras) == 0 {
		for ; len(ids) >= size; ids = ids[size:] {
			prev = h.fold(prev, h.tokens(ids[:size]))
			dst = append(dst, prev)
		}
		return dst
	}
	for i := 0; len(ids) >= size; i++ {
		var d uint64
		d, extras = h.digest(i, ids[:size], extras)
		prev = h.fold(prev, d)
		dst, ids = append(dst, prev), ids[size:]
	}
	return dst
}

// Bytes is Tokens for text: blocks of size bytes.
func (h Hasher) Bytes(dst []uint64, prev uint64, text []byte, size int) []uint64 {
	if size < 1 || size > MaxBlockSize {
		return dst
	}
	for len(text) >= size {
		prev = h.fold(prev, xxh3.HashSeed(text[:size], h.seed))
		dst, text = append(dst, prev), text[size:]
	}
	return dst
}

// digest is block i alone, without what stands in front of it; rest are the extras of later blocks.
func (h Hasher) digest(i int, ids []uint32, extras []Extra) (d uint64, rest []Extra) {
	d = h.tokens(ids)
	for len(extras) > 0 && extras[0].Block <= i {
		if extras[0].Block == i {
			d = h.fold(d, extras[0].Key)
		}
		extras = extras[1:]
	}
	return d, extras
}

// fold is the two halves of the 128-bit product of its keyed arguments; never 0.
func (h Hasher) fold(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a^h.left, b^h.right)
	return max(hi^lo, 1)
}

// tokens hashes ids as little-endian 32-bit words on every machine.
func (h Hasher) tokens(ids []uint32) uint64 {
	if binary.NativeEndian.Uint16([]byte{1, 0}) == 1 { // memory is the wanted order; the compiler knows
		//nolint:gosec // a read-only look at the caller's ids for the time of the call
		return xxh3.HashSeed(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(ids))), 4*len(ids)), h.seed)
	}
	swapped := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		swapped = binary.LittleEndian.AppendUint32(swapped, id)
	}
	return xxh3.HashSeed(swapped, h.seed)
}

// A text is cut into blocks that grow with their position: 256 bytes up to 4 KiB, then twice as large
// whenever the position has doubled. So a block is at most 1/8 of the text before it, the common beginning of
// two texts is known to about 5 %, and a prompt of 400 KB has 69 blocks instead of 1,600. The rank and each
// ingress store every block.
const (
	textFine = 16                          // blocks of the first size
	textStep = textFine / 2                // blocks of each other size
	textTop  = MaxBlockSize                // bytes of the largest block
	textBase = textFine * DefaultTextBlock // bytes of all blocks of the first size
)

// Text appends the chain hashes of the full blocks of a canonical text to dst; its blocks grow.
func (h Hasher) Text(dst []uint64, prev uint64, text []byte) []uint64 {
	from := 0
	for size := DefaultTextBlock; ; size *= 2 {
		end := len(text)
		if size < textTop {
			end = min(end, textFine*size)
		}
		n := len(dst)
		dst = h.Bytes(dst, prev, text[from:end], size)
		if end == len(text) {
			return dst
		}
		if len(dst) > n {
			prev = dst[len(dst)-1]
		}
		from = end
	}
}

// TextSpan is the number of bytes in n leading blocks of a text.
func TextSpan(n int) int {
	if n <= textFine {
		return n * DefaultTextBlock
	}
	bytes := textBase
	n -= textFine
	for size := 2 * DefaultTextBlock; ; size *= 2 {
		if n <= textStep || size == textTop {
			return bytes + n*size
		}
		bytes, n = bytes+textStep*size, n-textStep
	}
}
