package routing

import "time"

// min-ttft and sticky weigh a rank by the prefill that its cache spares, so a rank that came up beside ranks
// that serve, with an empty cache, loses every comparison: it gets no request, and its cache stays empty. For
// a while such a rank is new: prompts without a home, which no rank holds the most of, are weighed as if it
// held as much as the rank that holds the longest part.
const (
	// newRankTime is how long a rank may count as new. A session of an agent lasts about as long.
	newRankTime = 2 * time.Minute
	// newRankLead is how much later than another rank it came up: ranks that began together have equally
	// empty caches.
	newRankLead = 10 * time.Second
	// homeShare is the share of its prompt that a request finds at its home: sticky's documented threshold.
	homeShare = stickyThreshold
)

// modeNewRanks marks an aggregate whose hits have credit for new ranks in them: equal scores go to the rank
// with fewer requests.
const modeNewRanks = 1

// creditNewRanks gives the new candidates the longest hit of all candidates, if that is below share of the
// prompt, and says whether there are any. A rank is no longer new when it has as many open requests as the
// candidates' mean. What it has queued counts in full, so the credit moves few requests at a time.
func (c *scratch) creditNewRanks(q *Request, v *View, share float64) (found bool) {
	longest := c.longestHit()
	if float64(longest) >= share*float64(q.Tokens) {
		return false
	}
	oldest, newest, open := v.Now, time.Duration(0), 0
	for _, i := range c.candidates {
		oldest, newest = min(oldest, v.Ranks[i].Since), max(newest, v.Ranks[i].Since)
		open += v.Ranks[i].ongoing()
	}
	if newest-oldest < newRankLead || v.Now-newest >= newRankTime {
		return false
	}
	for _, i := range c.candidates {
		rk := &v.Ranks[i]
		if v.Now-rk.Since < newRankTime && rk.Since-oldest >= newRankLead &&
			rk.ongoing()*len(c.candidates) < open {
			c.hits[i], found = longest, true
		}
	}
	return found
}

// newRanksRule is the rule of a formula that gives new ranks credit.
func newRanksRule(a *aggregate) rule {
	if a.mode == modeNewRanks {
		return rule{second: secondOpen}
	}
	return rule{}
}
