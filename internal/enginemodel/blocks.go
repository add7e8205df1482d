package enginemodel

// blockPool is the KV memory of one rank: fixed blocks, counted references, and a cache of full blocks by
// chained hash. A block without references keeps its content on the free list until it is the oldest there
// and its memory is needed (LRU). Several blocks may hold the same hash (copies made by requests that ran at
// the same time).
type blockPool struct {
	blocks []block
	byHash map[uint64]int32 // hash → the copy cached last, further copies through block.sameHash
	free   int              // blocks on the free list
	head   int32            // next to be reused
	tail   int32            // freed last
	log    *blockLog        // told of what loses its memory
}

type block struct {
	hash     uint64
	refs     int32
	prev     int32 // free list
	next     int32
	sameHash int32 // next older copy
	cached   bool
}

const none int32 = -1

func newBlockPool(n int, log *blockLog) *blockPool {
	p := &blockPool{
		blocks: make([]block, n), byHash: make(map[uint64]int32), head: none, tail: none,
		log: log,
	}
	for i := range p.blocks {
		p.blocks[i].sameHash = none
		p.pushFree(int32(i))
	}
	return p
}

func (p *blockPool) used() int { return len(p.blocks) - p.free }

// lookup is any block that holds hash.
func (p *blockPool) lookup(hash uint64) (int32, bool) {
	i, ok := p.byHash[hash]
	return i, ok
}

// ref takes one more reference to a cached block.
func (p *blockPool) ref(i int32) {
	b := &p.blocks[i]
	if b.refs == 0 {
		p.unlinkFree(i)
	}
	b.refs++
}

// take reuses the oldest free block; the caller has checked that there is one.
func (p *blockPool) take() int32 {
	i := p.head
	p.evict(i)
	p.ref(i)
	return i
}

// release drops one reference; the last one puts the block at the young end of the free list.
func (p *blockPool) release(i int32) {
	b := &p.blocks[i]
	b.refs--
	if b.refs == 0 {
		p.pushFree(i)
	}
}

// releaseAll releases the blocks of a sequence from the tail on, so its tail is reused before its head.
func (p *blockPool) releaseAll(blocks []int32) {
	for i := len(blocks) - 1; i >= 0; i-- {
		p.release(blocks[i])
	}
}

// cache enters a full block under its hash.
func (p *blockPool) cache(i int32, hash uint64) {
	b := &p.blocks[i]
	b.hash, b.cached, b.sameHash = hash, true, none
	if older, ok := p.byHash[hash]; ok {
		b.sameHash = older
	}
	p.byHash[hash] = i
}

func (p *blockPool) evict(i int32) {
	b := &p.blocks[i]
	if !b.cached {
		return
	}
	b.cached = false
	p.log.remove(b.hash)
	first := p.byHash[b.hash]
	if first == i {
		if b.sameHash == none {
			delete(p.byHash, b.hash)
		} else {
			p.byHash[b.hash] = b.sameHash
		}
		return
	}
	for p.blocks[first].sameHash != i {
		first = p.blocks[first].sameHash
	}
	p.blocks[first].sameHash = b.sameHash
}

// forget drops the content of every block. The order of the free list stays.
func (p *blockPool) forget() {
	clear(p.byHash)
	for i := range p.blocks {
		p.blocks[i].cached, p.blocks[i].sameHash = false, none
	}
}

func (p *blockPool) pushFree(i int32) {
	b := &p.blocks[i]
	b.prev, b.next = p.tail, none
	if p.tail == none {
		p.head = i
	} else {
		p.blocks[p.tail].next = i
	}
	p.tail = i
	p.free++
}

func (p *blockPool) unlinkFree(i int32) {
	b := &p.blocks[i]
	if b.prev == none {
		p.head = b.next
	} else {
		p.blocks[b.prev].next = b.next
	}
	if b.next == none {
		p.tail = b.prev
	} else {
		p.blocks[b.next].prev = b.prev
	}
	p.free--
}
