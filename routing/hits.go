package routing

// hitOn is the number of q's prompt tokens that rank id has cached, 0 while prefix caching is off.
func (v *View) hitOn(q *Request, id RankID) int {
	if v.PrefixCachingOff || len(q.Hits) == 0 {
		return 0
	}
	return q.HitOn(id)
}

// alignHits writes every rank's hit beside its row. Both lists ascend by rank, so one walk does it; ranks
// that left between the look-up and now are skipped, ranks that came hold nothing.
func alignHits(q *Request, v *View, c *scratch) {
	hits := resize(&c.hits, len(v.Ranks))
	clear(hits)
	if v.PrefixCachingOff {
		return
	}
	i := 0
	for k := range q.Hits {
		h := &q.Hits[k]
		for i < len(v.Ranks) && v.Ranks[i].ID < h.Rank {
			i++
		}
		if i == len(v.Ranks) {
			break
		}
		if v.Ranks[i].ID == h.Rank {
			hits[i] = q.clamp(h.Tokens)
		}
	}
}

// resize gives a scratch slice the length n, allocating only when it was never that long.
func resize[T any](s *[]T, n int) []T {
	if cap(*s) < n {
		*s = make([]T, n)
	}
	*s = (*s)[:n]
	return *s
}
