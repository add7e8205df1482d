package enginemodel

import (
	"slices"
	"time"
)

// BlockKV is what the memory of one block holds, for engines that move blocks between each other
// (Config.Transfer): a sum over the KV of its tokens, and a second one that ends with the prompt of the
// request that wrote it. KV depends on every token before it, so equal sums mean an equal prefix too. The
// zero value is memory that holds nothing usable.
type BlockKV struct {
	Sum, PromptSum       uint64
	Tokens, PromptTokens uint32
}

// holds reports whether the first tokens tokens of the block are those of sum.
func (b *BlockKV) holds(tokens uint32, sum uint64) bool {
	return tokens == b.Tokens && sum == b.Sum || tokens == b.PromptTokens && sum == b.PromptSum
}

// KVContent is a Content that tells the KV of its blocks, too.
type KVContent interface {
	Content
	// KVSum is a sum over the KV of the first n tokens of block i, which depends on the tokens up to there
	// and on nothing else: names and salts of blocks have no part in it.
	KVSum(i, n int) uint64
	// Mislead says that the KV of the prompt is not the prompt's own: the answer is another one, which wrong
	// decides. 0 takes it back. Called only while there is no answer.
	Mislead(wrong uint64)
}

// memory is the content of all blocks of a rank. The pool says which block belongs to whom and under which
// hash, and this says what was written into it last: a block that another engine reads, or that is found in
// the prefix cache, may hold something else than its reader expects. A nil memory is not modelled.
type memory struct {
	blockSize int
	blocks    []BlockKV
}

func newMemory(cfg *Config) *memory {
	if !cfg.Transfer {
		return nil
	}
	return &memory{blockSize: cfg.BlockSize, blocks: make([]BlockKV, cfg.Blocks)}
}

// clear is called for a block that has a new owner, which writes it within the same step.
func (m *memory) clear(block int32) {
	if m != nil {
		m.blocks[block] = BlockKV{}
	}
}

// write books what the step computes for r: its first tokens tokens have KV then.
func (m *memory) write(r *Request, tokens int) {
	if m == nil || r.kv.content == nil {
		return
	}
	for ; r.kv.written < tokens/m.blockSize; r.kv.written++ {
		b := &m.blocks[r.blocks[r.kv.written]]
		b.Sum = r.kv.sum(r.kv.written, m.blockSize)
		b.Tokens = uint32(m.blockSize)
	}
	if rest := r.Prompt % m.blockSize; rest > 0 && tokens >= r.Prompt && !r.kv.promptWritten {
		r.kv.promptWritten = true
		b := &m.blocks[r.blocks[r.Prompt/m.blockSize]]
		b.PromptSum = r.kv.sum(r.Prompt/m.blockSize, rest)
		b.PromptTokens = uint32(rest)
	}
}

// load writes KV that came from another engine into the blocks of r behind the first ones.
func (m *memory) load(r *Request, first int, kv []BlockKV) {
	for i := range kv {
		m.blocks[r.blocks[first+i]] = kv[i]
	}
	r.kv.written, r.kv.promptWritten = r.Prompt/m.blockSize, true
}

// inspect compares all blocks that r has got with what it needs, and notes what is wrong.
func (m *memory) inspect(r *Request) {
	if m == nil || r.kv.content == nil {
		return
	}
	r.kv.wrong = 0
	for i, block := range r.blocks {
		n := min(m.blockSize, r.total()-i*m.blockSize)
		b := &m.blocks[block]
		if n < 1 || b.holds(uint32(n), r.kv.content.KVSum(i, n)) {
			continue
		}
		r.kv.wrong = max(1, mix(r.kv.wrong^b.Sum^mix(b.PromptSum+uint64(i))))
	}
	if r.produced == 0 {
		r.kv.content.Mislead(r.kv.wrong)
	}
}

// requestKV is the part of a request that concerns the content of its blocks.
type requestKV struct {
	content       KVContent // nil: not modelled
	written       int       // leading blocks whose content is booked as full
	promptWritten bool
	wrong         uint64 // sum over what is not the KV of its own tokens; 0 = nothing

	load  loadState
	local int // tokens of the prompt that this rank's own cache had; the rest is loaded
}

// loadState is where a request stands whose prompt another engine computes.
type loadState uint8

const (
	loadNone    loadState = iota
	loadWanted            // the request waits for its turn to load
	loadRunning           // it has its blocks, their KV is on its way
	loadReady             // the KV is there, or was: it may be preempted later
	loadFailed            // the request ended, or its prompt is computed here
)

// sum is the KV that r really has in the first n tokens of block i: on wrong KV follows wrong KV.
func (k *requestKV) sum(i, n int) uint64 {
	s := k.content.KVSum(i, n)
	if k.wrong != 0 {
		s = mix(s ^ k.wrong)
	}
	return s
}

// Lease times, as parts of Config.Lease.
const (
	// DefaultLease is how long the blocks of an ended request are kept for another engine.
	DefaultLease = 30 * time.Second
	// HeartbeatsPerLease is how often in the time of a lease a waiting reader says that it still waits.
	HeartbeatsPerLease = 6
)

// leases are the blocks of ended requests that another engine may still read, by the name that the request
// gave. They count as used until they are read, or until their time is over.
type leases struct {
	lasts  time.Duration
	byName map[string]lease
	next   time.Duration // no lease ends before it
	blocks int
}

type lease struct {
	blocks []int32
	ends   time.Duration
}

func newLeases(lasts time.Duration) leases {
	return leases{lasts: lasts, byName: map[string]lease{}, next: Never}
}

func (l *leases) keep(name string, blocks []int32, now time.Duration) {
	e := lease{blocks: blocks, ends: now + l.lasts}
	l.byName[name] = e
	l.blocks += len(blocks)
	l.next = min(l.next, e.ends)
}

// extend is a heartbeat: the lease runs two thirds of its time at least from now on. One that is gone stays
// gone.
func (l *leases) extend(name string, now time.Duration) {
	if e, ok := l.byName[name]; ok {
		e.ends = max(e.ends, now+l.lasts*2/3)
		l.byName[name] = e
	}
}

// remove ends a lease and returns its blocks; false = there is none of that name.
func (l *leases) remove(name string) ([]int32, bool) {
	e, ok := l.byName[name]
	delete(l.byName, name)
	l.blocks -= len(e.blocks)
	return e.blocks, ok
}

// over lists the leases whose time is over at now, in the order of their names: it decides which blocks are
// reused first, and equal inputs must give equal outputs.
func (l *leases) over(now time.Duration) (names []string) {
	if now < l.next {
		return nil
	}
	l.next = Never
	for name, e := range l.byName {
		if e.ends <= now {
			names = append(names, name)
			continue
		}
		l.next = min(l.next, e.ends)
	}
	slices.Sort(names)
	return names
}
