package sim

import "sync"

// offers bring together prefill legs that have ended and decode engines that wait for their blocks, by a key
// that both know: the request id, a transfer id or a room. Safe for concurrent use.
type offers struct {
	mu    sync.Mutex
	byKey map[string]*offer
}

// offer is one key's place. It exists while somebody waits for it, or while its lease runs.
type offer struct {
	made    chan struct{} // closed when the leg has ended
	joined  chan struct{} // closed when a decode engine waits
	waiting int
	lease   string  // "" until it is made, and when it was taken
	blocks  []int32 // as parameters name them
}

// place needs the lock.
func (o *offers) place(key string) *offer {
	if o.byKey == nil {
		o.byKey = map[string]*offer{}
	}
	p := o.byKey[key]
	if p == nil {
		p = &offer{made: make(chan struct{}), joined: make(chan struct{})}
		o.byKey[key] = p
	}
	return p
}

// add offers the blocks of an ended leg.
func (o *offers) add(key, lease string, blocks []int32) {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := o.place(key)
	select {
	case <-p.made: // a key that is used twice: the newer leg counts
	default:
		close(p.made)
	}
	p.lease, p.blocks = lease, blocks
}

// join waits for a key; quit ends it.
func (o *offers) join(key string) *offer {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := o.place(key)
	if p.waiting++; p.waiting == 1 {
		select {
		case <-p.joined:
		default:
			close(p.joined)
		}
	}
	return p
}

// expect is the place of a key for a prefill leg that has not begun: it waits for joined. drop ends it.
func (o *offers) expect(key string) *offer {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.place(key)
}

func (o *offers) quit(key string, p *offer) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if p.waiting--; p.waiting == 0 && p.lease == "" && o.byKey[key] == p {
		delete(o.byKey, key)
	}
}

// take gives what was offered, once.
func (o *offers) take(key string) (lease string, blocks []int32) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if p := o.byKey[key]; p != nil {
		lease, blocks = p.lease, p.blocks
		p.lease, p.blocks = "", nil
	}
	return lease, blocks
}

// drop forgets an offer whose lease has ended.
func (o *offers) drop(lease string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for key, p := range o.byKey {
		if p.lease != lease {
			continue
		}
		p.lease, p.blocks = "", nil
		if p.waiting == 0 {
			delete(o.byKey, key)
		}
	}
}

// forget removes the place of a prefill leg that came to nothing.
func (o *offers) forget(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if p := o.byKey[key]; p != nil && p.waiting == 0 && p.lease == "" {
		delete(o.byKey, key)
	}
}
