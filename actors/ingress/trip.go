package ingress

import "net/http"

// countsToTrip says whether the failure of an attempt counts towards its rank's trip. Of one request the first one counts: what fails on
// several ranks is more likely the request's fault than theirs. Of an engine's own limits (408, 429) none does.
func (req *request) countsToTrip(res *result) bool {
	if !causePolicies[res.cause].trip || req.countedTrip || req.app.router.isLost(req.attempt.rank) {
		return false
	}
	if res.status == http.StatusRequestTimeout || res.status == http.StatusTooManyRequests {
		return false
	}
	req.countedTrip = true
	return true
}
