package enginemodel

// queue is the waiting line: first come first served, but preempted requests return to its front.
type queue struct {
	items  []*Request
	head   int
	tokens int // prompt tokens that wait
}

func (q *queue) len() int { return len(q.items) - q.head }

func (q *queue) front() *Request { return q.items[q.head] }

func (q *queue) pushBack(r *Request) {
	q.items = append(q.items, r)
	q.tokens += r.Prompt
}

func (q *queue) popFront() *Request {
	r := q.items[q.head]
	q.items[q.head] = nil
	q.head++
	q.tokens -= r.Prompt
	switch {
	case q.head == len(q.items):
		q.items, q.head = q.items[:0], 0
	case q.head > 64 && q.head > len(q.items)/2:
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	return r
}

func (q *queue) pushFront(r *Request) {
	if q.head == 0 {
		q.items = append(q.items, nil)
		copy(q.items[1:], q.items)
	} else {
		q.head--
	}
	q.items[q.head] = r
	q.tokens += r.Prompt
}

// remove takes r out, wherever it stands.
func (q *queue) remove(r *Request) {
	for i := q.head; i < len(q.items); i++ {
		if q.items[i] == r {
			copy(q.items[i:], q.items[i+1:])
			q.items[len(q.items)-1] = nil
			q.items = q.items[:len(q.items)-1]
			q.tokens -= r.Prompt
			return
		}
	}
}
