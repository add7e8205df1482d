package routing

import (
	"slices"
	"time"
)

const (
	// firstService is how long an answer is taken to take until there was a good one.
	firstService = time.Second
	// longestService is how long a failed answer counts at most.
	longestService = time.Minute
	// serviceMemory is how many answers the mean times go back, about.
	serviceMemory = 16
	// mostFailures is how many failed answers of a rank count at once, the newest ones.
	mostFailures = 256
)

// End is how a request has ended, as far as it shows what load it was.
type End uint8

// The ends. EndUnknown: its client left, the engine refused it rightly, or nothing is known.
const (
	EndUnknown End = iota
	EndGood        // it was answered
	EndFailed      // its rank did not answer it, or with an error of the rank's own
)

// failure is an answer of a rank that has failed. An engine that fails its requests at once would look idle
// to every policy that reads load, and get most of the requests. So a failed answer counts on as the load
// that its request would have been from its dispatch on: of a prompt for the mean time of a prefill, and of a
// decode for the rest of the mean time of an answer.
type failure struct {
	began       time.Duration
	tokens, hit int32
}

// service is how long the good answers of an application's ranks take on the mean, from the dispatch on.
type service struct {
	prefill, whole time.Duration // 0: there was none
	hasFailures    bool          // a rank has failures that may still count
}

// learn adds a sample to a mean.
func learn(mean *time.Duration, took time.Duration) {
	if *mean == 0 {
		*mean = max(took, 1)
		return
	}
	*mean = max(*mean+(took-*mean)/serviceMemory, 1)
}

// isOver reports whether a failed answer counts no longer.
func (s *service) isOver(f failure, now time.Duration) bool {
	whole := s.whole
	if whole == 0 {
		whole = firstService
	}
	return now-f.began >= min(whole, longestService)
}

// loadOf is what a failed answer counts as at an instant.
func (s *service) loadOf(f failure, now time.Duration) Load {
	switch {
	case s.isOver(f, now):
		return Load{}
	case s.prefill == 0 || now-f.began < s.prefill:
		return Load{W: 1, Q: int64(f.tokens - f.hit), Kq: int64(f.tokens)}
	default:
		return Load{R: 1, K: int64(f.tokens)}
	}
}

// loadOfAll is what failed answers count as together.
func (s *service) loadOfAll(list []failure, now time.Duration) (sum Load) {
	for _, f := range list {
		l := s.loadOf(f, now)
		sum.W, sum.R, sum.Q, sum.K, sum.Kq = sum.W+l.W, sum.R+l.R, sum.Q+l.Q, sum.K+l.K, sum.Kq+l.Kq
	}
	return sum
}

// end learns from the end of a request.
func (a *account) end(o *open, how End) {
	switch {
	case a.service == nil || o.sent == 0: // it was open in a snapshot: its begin is not known
	case how == EndGood:
		learn(&a.service.whole, a.at()-o.sent)
	case how == EndFailed:
		if len(a.failures) == mostFailures {
			a.failures = slices.Delete(a.failures, 0, 1)
		}
		a.failures = append(a.failures, failure{o.sent, o.tokens, o.hit})
		a.service.hasFailures = true
	}
}
