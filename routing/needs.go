package routing

import "time"

// Needs is what a policy reads of a request beyond its length. Whoever feeds the Router leaves out what is
// not needed: no index is built, no KV events are asked of engines, no text is canonicalized for a policy
// that does not look.
type Needs struct {
	Hits    bool // Request.Hits: the KV index
	Blocks  bool // Request.Blocks: chain hashes of the prompt, also of what no rank holds
	Text    bool // Request.Text
	Session bool // Request.Session
	Usage   bool // Rank.Usage: the engines' own report of their KV cache

	// Approximate: do not use the engines' KV events; a routed prompt's blocks count as cached on that rank
	// for ApproximateTTL, renewed by each routing (kv with no_kv_events, policies with a text tree).
	Approximate    bool
	ApproximateTTL time.Duration

	// attempts on a rank before it is taken out (cache-aware, documented: 3); 0 = not the policy's business
	AttemptsPerRank    int
	// attempts of a request in place of the application's (cache-aware, documented: 6); 0 = the application's
	AttemptsPerRequest int
}

// NeedsOf says what p reads.
func NeedsOf(p Policy) Needs {
	if n, ok := p.(interface{ needs() Needs }); ok {
		return n.needs()
	}
	return Needs{}
}
