package ingress

import lru "container/list"

const (
	tokenizedBytes = 256 // bytes of an entry beside its blocks
	tokenizedShare = 8   // an entry larger than 1/8 of all is not kept
)

// chainCache is an LRU cache of tokenized prompts, bounded in bytes. Not safe for concurrent use.
type chainCache struct {
	limit int
	bytes int
	at    map[tokenizeKey]*lru.Element
	order *lru.List // of chainEntry, most recently used first
}

type chainEntry struct {
	key   tokenizeKey
	chain *tokenChain
}

func newChainCache(limit int) chainCache {
	return chainCache{limit: limit, at: map[tokenizeKey]*lru.Element{}, order: lru.New()}
}

func (c *tokenChain) bytes() int { return tokenizedBytes + 8*cap(c.blocks) }

// get returns a chain, or nil.
func (t *chainCache) get(key tokenizeKey) *tokenChain {
	e := t.at[key]
	if e == nil {
		return nil
	}
	t.order.MoveToFront(e)
	return entryOf(e).chain
}

// put keeps a chain, and evicts the least recently used ones.
func (t *chainCache) put(key tokenizeKey, c *tokenChain) {
	if c.bytes() > t.limit/tokenizedShare || t.at[key] != nil {
		return
	}
	t.at[key] = t.order.PushFront(chainEntry{key, c})
	for t.bytes += c.bytes(); t.bytes > t.limit; {
		e := t.order.Back()
		t.order.Remove(e)
		delete(t.at, entryOf(e).key)
		t.bytes -= entryOf(e).chain.bytes()
	}
}

func entryOf(e *lru.Element) chainEntry {
	entry, _ := e.Value.(chainEntry) // put adds nothing else
	return entry
}
