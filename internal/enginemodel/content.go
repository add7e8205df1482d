package enginemodel

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// Content names the blocks of a request for the prefix cache. A trace-driven simulator brings the hashes of
// its trace, the engine process hashes real tokens (TokenContent). Used by one goroutine at a time.
type Content interface {
	// BlockHash is the chained hash of block i (from 0) of prompt and answer: it covers every token up to the
	// block's end, so equal hashes mean equal prefixes. false = unknown, the block is never shared. Asked
	// only for blocks whose tokens exist.
	BlockHash(i int) (hash uint64, ok bool)
}

// HashAlgo is how the blocks of a TokenContent are named.
type HashAlgo uint8

// The algorithms.
const (
	HashFast HashAlgo = iota // chained xxh3 of 64 bits
	// vLLM's sha256_cbor: SHA-256 of canonical CBOR [parent, tokens, extra keys]
	HashSHA256CBOR
)

// DigestSize is the length of a whole block hash.
const DigestSize = sha256.Size

// Hashing is what the hashes of an engine have in common. The zero value is HashFast.
type Hashing struct {
	Algo HashAlgo
	Root [DigestSize]byte // HashSHA256CBOR: parent of first blocks (RootOf)
}

// RootOf is the parent of first blocks under HashSHA256CBOR: vLLM's NONE_HASH for a PYTHONHASHSEED.
func RootOf(seed string) [DigestSize]byte { return sha256.Sum256(appendCBORText(nil, seed)) }

// TokenContent hashes a token prompt and the generated answer behind it, block by block, as far as asked.
type TokenContent struct {
	prompt    []uint32
	prose     Prose // of the answer
	blockSize int
	gen       *Generator
	hashes    []uint64
	hashing   Hashing
	digests   [][DigestSize]byte // HashSHA256CBOR: behind hashes
	saltText  string
	salt      uint64
	kv        []uint64 // sums over the KV of full blocks, as far as asked
	given     []byte   // the text of the answer; nil = prose
	wrong     uint64   // what the prompt's KV got wrong
}

var _ KVContent = (*TokenContent)(nil)

// NewTokenContent is the content of prompt followed by an answer (ProseAfter). salt separates caches: only
// requests with an equal salt share blocks.
func NewTokenContent(prompt []uint32, answer Prose, blockSize int, salt string) *TokenContent {
	c := &TokenContent{prompt: prompt, prose: answer, blockSize: blockSize, saltText: salt}
	if salt != "" {
		c.salt = xxh3.HashString(salt)
	}
	return c
}

// Use names the blocks by h instead of HashFast; to be called before the first BlockHash.
func (c *TokenContent) Use(h Hashing) *TokenContent {
	c.hashing = h
	return c
}

// Answer sets the text of the answer, in the place of prose; to be called before the first BlockHash.
func (c *TokenContent) Answer(text []byte) *TokenContent {
	if c.given = text; text == nil {
		c.given = []byte{}
	}
	return c
}

// Mislead implements KVContent.
func (c *TokenContent) Mislead(wrong uint64) {
	if wrong != c.wrong {
		c.wrong, c.gen = wrong, nil
	}
}

// KVSum implements KVContent.
func (c *TokenContent) KVSum(i, n int) uint64 {
	for len(c.kv) < i {
		c.kv = append(c.kv, c.kvSum(len(c.kv), c.blockSize))
	}
	if n == c.blockSize {
		if len(c.kv) == i {
			c.kv = append(c.kv, c.kvSum(i, n))
		}
		return c.kv[i]
	}
	return c.kvSum(i, n)
}

func (c *TokenContent) kvSum(i, n int) uint64 {
	chain := uint64(0)
	if i > 0 {
		chain = c.kv[i-1]
	}
	return c.sumTokens(i*c.blockSize, n, chain)
}

// sumTokens sums n tokens from the first on, behind chain.
func (c *TokenContent) sumTokens(first, n int, chain uint64) uint64 {
	var scratch [256]byte
	raw := scratch[:0]
	for t := first; t < first+n; t++ {
		raw = appendIDs(raw, []uint32{c.token(t)})
	}
	return xxh3.HashSeed(raw, chain+1)
}

// Salt is the salt it was made with.
func (c *TokenContent) Salt() string { return c.saltText }

// BlockHash implements Content: of longer hashes the low 64 bits, as they travel on the wire.
func (c *TokenContent) BlockHash(i int) (uint64, bool) {
	for len(c.hashes) <= i {
		c.hashes = append(c.hashes, c.next())
	}
	return c.hashes[i], true
}

// Digest is the whole hash of block i. Under HashFast there are but 64 bits; the rest is derived from them.
func (c *TokenContent) Digest(i int) [DigestSize]byte {
	hash, _ := c.BlockHash(i)
	if c.hashing.Algo == HashSHA256CBOR {
		return c.digests[i]
	}
	return WidenHash(hash)
}

// WidenHash makes a digest of a 64-bit hash: distinct for distinct hashes, which it ends with.
func WidenHash(hash uint64) [DigestSize]byte {
	var d [DigestSize]byte
	for k := range DigestSize / 8 {
		binary.BigEndian.PutUint64(d[8*k:], mix(hash+uint64(k)))
	}
	binary.BigEndian.PutUint64(d[DigestSize-8:], hash)
	return d
}

// AppendBlockTokens appends the tokens of block i to dst.
func (c *TokenContent) AppendBlockTokens(dst []uint32, i int) []uint32 {
	for t := i * c.blockSize; t < (i+1)*c.blockSize; t++ {
		dst = append(dst, c.token(t))
	}
	return dst
}

func (c *TokenContent) next() uint64 {
	if c.hashing.Algo == HashSHA256CBOR {
		return c.nextDigest()
	}
	i := len(c.hashes)
	chain := c.salt
	if i > 0 {
		chain = c.hashes[i-1]
	}
	return c.sumTokens(i*c.blockSize, c.blockSize, chain)
}

func (c *TokenContent) nextDigest() uint64 {
	i := len(c.digests)
	parent := c.hashing.Root
	if i > 0 {
		parent = c.digests[i-1]
	}
	salt := ""
	if i == 0 {
		salt = c.saltText
	}
	var scratch [1024]byte
	d := sha256.Sum256(c.appendBlockCBOR(scratch[:0], parent, i, salt))
	c.digests = append(c.digests, d)
	return binary.BigEndian.Uint64(d[DigestSize-8:])
}

// appendBlockCBOR writes [parent, [tokens], null | [["cache_salt", salt]]].
func (c *TokenContent) appendBlockCBOR(b []byte, parent [DigestSize]byte, i int, salt string) []byte {
	b = appendCBORHead(b, cborArray, 3)
	b = append(appendCBORHead(b, cborBytes, DigestSize), parent[:]...)
	b = appendCBORHead(b, cborArray, uint64(c.blockSize))
	for t := i * c.blockSize; t < (i+1)*c.blockSize; t++ {
		b = appendCBORHead(b, cborUint, uint64(c.token(t)))
	}
	if salt == "" {
		return append(b, cborNull)
	}
	b = appendCBORHead(appendCBORHead(b, cborArray, 1), cborArray, 2)
	return appendCBORText(appendCBORText(b, "cache_salt"), salt)
}

func (c *TokenContent) token(t int) uint32 {
	if t < len(c.prompt) {
		return c.prompt[t]
	}
	if c.gen == nil {
		c.gen = c.answer()
	}
	return c.gen.Token(t - len(c.prompt))
}

func (c *TokenContent) answer() *Generator {
	switch {
	case c.wrong != 0:
		return NewGenerator(c.prose.Misled(c.wrong))
	case c.given != nil:
		return GivenText(c.given)
	}
	return NewGenerator(c.prose)
}

// Major types of CBOR (RFC 8949), as far as block hashes need them.
const (
	cborUint  = 0 << 5
	cborBytes = 2 << 5
	cborText  = 3 << 5
	cborArray = 4 << 5
	cborNull  = 0xf6
)

// appendCBORHead appends a type with its number in the shortest form, as canonical CBOR wants it.
func appendCBORHead(b []byte, major byte, n uint64) []byte {
	switch {
	case n < 24:
		return append(b, major|byte(n))
	case n < 1<<8:
		return append(b, major|24, byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, major|25), uint16(n))
	case n < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, major|26), uint32(n))
	}
	return binary.BigEndian.AppendUint64(append(b, major|27), n)
}

func appendCBORText(b []byte, s string) []byte {
	return append(appendCBORHead(b, cborText, uint64(len(s))), s...)
}
