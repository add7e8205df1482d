package routing

// PotentialLoad is what a rank would have in hand with one more request (get_potential_loads).
type PotentialLoad struct {
	Rank          RankID `json:"rank"`
	PrefillTokens int64  `json:"potential_prefill_tokens"` // Q + L − hit
	// distinct blocks under policy kv, else the contexts of all open requests and this one
	DecodeBlocks  int64  `json:"potential_decode_blocks"`
}

// PotentialLoads says it for every rank of the view; nothing changes.
func (r *Router) PotentialLoads(q *Request) []PotentialLoad {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reckon(max(r.view.Now, q.Now))
	var d Decision
	clear(resize(&d.scratch.extra, len(r.view.Ranks)))
	kv, tracked := r.policy.(KV)
	tracked = tracked && !kv.NoTrack
	if tracked {
		kv.decodeBlocks(q, &r.view, r.state, &d.scratch)
	}
	out := make([]PotentialLoad, len(r.view.Ranks))
	for i := range out {
		rk := &r.view.Ranks[i]
		blocks := d.scratch.extra[i]
		if !tracked {
			blocks = ceilDiv(rk.Load.K+rk.Load.Kq+int64(q.Tokens), int64(rk.blockSize(q)))
		}
		out[i] = PotentialLoad{Rank: rk.ID, PrefillTokens: rk.Load.Q + int64(q.Tokens-r.view.hitOn(q, rk.ID)),
			DecodeBlocks: blocks}
	}
	return out
}
