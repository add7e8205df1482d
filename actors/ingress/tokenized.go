package ingress

import lru "container/list"

const (
	tokenizedBytes = 256 // of an entry, besides its blocks
	tokenizedShare = 8   // an entry larger than 1/8 of all is not kept
)

// chainCache is an LRU of tokenized prompts, bounded in bytes. Not safe for concurrent use.
type chainCache struct {
	limit int
	bytes int
	at    map[tokenizeKey]*lru.Element
	order *lru.List // of tokenizedEntry, used last first
}

type chainEntry struct {
	key   tokenizeKey
	chain *tokenChain
}

func newChainCache(limit int) chainCache {
	return chainCache{limit: limit, at: map[tokenizeKey]*lru.Element{}, order: lru.New()}
}

func (c *tokenChain) bytes() int { return tokenizedBytes + 8*cap(c.blocks) }

// get gives a chain, nil if it is not known.
func (t *chainCache) get(key tokenizeKey) *tokenChain {
	e := t.at[key]
	if e == nil {
		return nil
	}
	t.order.MoveToFront(e)
	return entryOf(e).chain
}

// put keeps a chain, and lets those go that were not used for the longest time.
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
	entry, _ := e.Value.(chainEntry) // nothing else is put in
	return entry
}
