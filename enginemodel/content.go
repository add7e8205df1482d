package enginemodel

import "github.com/zeebo/xxh3"

// Content names the blocks of a request for the prefix cache. A trace-driven simulator brings the hashes of its trace, the
// engine process hashes real tokens (TokenContent). Used by one goroutine at a time.
type Content interface {
	// BlockHash is the chained hash of block i (from 0) of prompt and answer: it covers every token up to the block's end, so
	// equal hashes mean equal prefixes. false = unknown, the block is never shared. Asked only for blocks whose tokens exist.
	BlockHash(i int) (hash uint64, ok bool)
}

// TokenContent hashes a token prompt and the generated answer behind it, block by block, as far as asked.
type TokenContent struct {
	prompt    []uint32
	seed      uint64 // of the answer
	blockSize int
	gen       *Generator
	hashes    []uint64
	salt      uint64
}

var _ Content = (*TokenContent)(nil)

// NewTokenContent is the content of prompt followed by the answer of seed (TextSeed). salt separates caches: only requests with
// an equal salt share blocks.
func NewTokenContent(prompt []uint32, seed uint64, blockSize int, salt string) *TokenContent {
	c := &TokenContent{prompt: prompt, seed: seed, blockSize: blockSize}
	if salt != "" {
		c.salt = xxh3.HashString(salt)
	}
	return c
}

// BlockHash implements Content.
func (c *TokenContent) BlockHash(i int) (uint64, bool) {
	for len(c.hashes) <= i {
		c.hashes = append(c.hashes, c.next())
	}
	return c.hashes[i], true
}

func (c *TokenContent) next() uint64 {
	i := len(c.hashes)
	chain := c.salt
	if i > 0 {
		chain = c.hashes[i-1]
	}
	var scratch [256]byte
	raw := scratch[:0]
	for t := i * c.blockSize; t < (i+1)*c.blockSize; t++ {
		raw = appendIDs(raw, []uint32{c.token(t)})
	}
	return xxh3.HashSeed(raw, chain+1)
}

func (c *TokenContent) token(t int) uint32 {
	if t < len(c.prompt) {
		return c.prompt[t]
	}
	if c.gen == nil {
		c.gen = NewGenerator(c.seed)
	}
	return c.gen.Token(t - len(c.prompt))
}
