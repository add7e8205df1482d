package ingress

import (
	"sync"
	"time"

	"github.com/dpserve/dpserve/routing"
)

// answeredWithin is how long an answer of a rank shows that the application's engines answer a model.
const answeredWithin = time.Minute

// goodAnswers says which ranks have answered a model well of late. A client's mistake is the same at every
// rank; so if one of them refuses a model, an API key or a route, and another one has just answered, the
// rank is at fault. It is bounded by the names of the application's models. Safe for concurrent use; the
// zero value is ready.
type goodAnswers struct {
	mu     sync.Mutex
	models map[string]*lastAnswers
}

// lastAnswers are the last answers of two ranks. at is on the ingress's clock.
type lastAnswers struct {
	ranks [2]routing.RankRef
	at    [2]time.Duration
}

// note records that a rank has answered a model.
func (a *goodAnswers) note(model []byte, r routing.RankRef, at time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	last := a.models[string(model)]
	if last == nil {
		if a.models == nil {
			a.models = map[string]*lastAnswers{}
		}
		last = &lastAnswers{}
		a.models[string(model)] = last
	}
	if last.ranks[0] != r { // the older one of two others goes
		last.ranks[1], last.at[1] = last.ranks[0], last.at[0]
		last.ranks[0] = r
	}
	last.at[0] = at
}

// hasSibling reports whether a rank other than r has answered the model within answeredWithin.
func (a *goodAnswers) hasSibling(model []byte, r routing.RankRef, now time.Duration) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	last := a.models[string(model)]
	if last == nil {
		return false
	}
	for i, other := range last.ranks {
		if other != r && other != (routing.RankRef{}) && now-last.at[i] < answeredWithin {
			return true
		}
	}
	return false
}
