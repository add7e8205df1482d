package ingress

import (
	"sync"
	"time"
)

// budgetSlots divide the window. One additional slot covers the slot that is still filling, so that no window
// of the full length holds more retries than allowed.
const budgetSlots = 10 + 1

// budget limits retries to a share of the requests over a sliding window, with a floor, so that retries
// cannot multiply an outage. Safe for concurrent use. The time is an argument.
type budget struct {
	slot time.Duration // length of one slot

	mu       sync.Mutex
	now      int64 // number of the newest slot
	requests [budgetSlots]int
	retries  [budgetSlots]int
}

func newBudget(window time.Duration) *budget {
	return &budget{slot: max(window/(budgetSlots-1), 1)}
}

// request counts an incoming request.
func (b *budget) request(at time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.requests[b.advance(at)]++
}

// draw takes one retry from the budget; it returns false if the budget is empty.
func (b *budget) draw(at time.Duration) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := b.advance(at)
	if sumSlots(&b.retries) >= max(sumSlots(&b.requests)/budgetShare, budgetFloor) {
		return false
	}
	b.retries[i]++
	return true
}

// advance clears the slots that have left the window and returns the current one. The caller holds mu.
func (b *budget) advance(at time.Duration) int {
	n := int64(at / b.slot)
	for i := max(b.now+1, n-budgetSlots+1); i <= n; i++ {
		b.requests[i%budgetSlots], b.retries[i%budgetSlots] = 0, 0
	}
	b.now = max(b.now, n)
	return int(b.now % budgetSlots)
}

func sumSlots(slots *[budgetSlots]int) int {
	n := 0
	for _, v := range slots {
		n += v
	}
	return n
}
