package ingress

import "net/http"

// countsToTrip reports whether the failure of an attempt counts towards its rank's trip. Only the first
// failure of a request counts: a request that fails on several ranks is more likely the cause than they are.
// An engine's own limits (408, 429) never count.
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
