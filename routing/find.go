package routing

// Find is the index of rank id in v.Ranks, or where it would be inserted and false.
func (v *View) Find(id RankID) (int, bool) {
	lo, hi := 0, len(v.Ranks)
	for lo < hi {
		mid := (lo + hi) / 2
		if v.Ranks[mid].ID < id {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo, lo < len(v.Ranks) && v.Ranks[lo].ID == id
}

// maxWalk is how many rows findNear looks at before it searches: as many ranks may be missing without a cost.
const maxWalk = 8

// findNear is Find for a view of groups of about width ranks each. With all ranks there the row is group ×
// width + rank, every missing one before it moves it one back. The binary search's wrong guesses are a third
// of a pick otherwise.
func (v *View) findNear(id RankID, width int) (int, bool) {
	i := min(id.Group()*width+id.Rank(), len(v.Ranks)-1)
	for n := 0; n < maxWalk && i >= 0; n++ {
		if v.Ranks[i].ID == id {
			return i, true
		}
		i--
	}
	return v.Find(id)
}
