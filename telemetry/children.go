package telemetry

import (
	"maps"
	"sync"
	"sync/atomic"
)

// children caches label children by key. Readers take no lock and allocate nothing: they read an immutable map, which a
// writer copies, changes and swaps. Writes are rare, because every key comes from a closed list or from an app file.
// A sync.Map would put each struct key into an interface: one allocation per call.
type children[K comparable, V any] struct {
	table atomic.Pointer[map[K]V]

	mu     sync.Mutex
	closed bool // no key may be added any more; guarded by mu
}

// get finds a child, or makes it once. ok is false when the key is unknown and the cache is closed.
func (c *children[K, V]) get(key K, make func() V) (v V, ok bool) {
	if t := c.table.Load(); t != nil {
		if v, ok = (*t)[key]; ok {
			return v, true
		}
	}
	return c.add(key, make)
}

func (c *children[K, V]) add(key K, make func() V) (v V, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := c.copy()
	if v, ok = next[key]; ok {
		return v, true
	}
	if c.closed {
		return v, false
	}
	v = make()
	next[key] = v
	c.table.Store(&next)
	return v, true
}

// drop removes the keys for which gone is true.
func (c *children[K, V]) drop(gone func(K) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := c.copy()
	maps.DeleteFunc(next, func(k K, _ V) bool { return gone(k) })
	c.table.Store(&next)
}

// close empties the cache and lets nothing in again, so that a late caller cannot bring deleted series back.
func (c *children[K, V]) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.table.Store(&map[K]V{})
}

// copy clones the table; call with mu held.
func (c *children[K, V]) copy() map[K]V {
	if t := c.table.Load(); t != nil {
		return maps.Clone(*t)
	}
	return map[K]V{}
}
