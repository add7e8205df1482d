package controller

import "slices"

// numbersAhead is how far reports of a node may overtake each other.
const numbersAhead = 1024

// numbers remembers which reports of a node were seen: all up to low, and those above.
type numbers struct {
	low   uint64
	above []uint64 // ascending
}

// first says whether n is new. 0 is no number and always new.
func (s *numbers) first(n uint64) bool {
	if n == 0 {
		return true
	}
	at, seen := slices.BinarySearch(s.above, n)
	if n <= s.low || seen {
		return false
	}
	s.above = slices.Insert(s.above, at, n)
	for len(s.above) > 0 && (s.above[0] == s.low+1 || len(s.above) > numbersAhead) {
		s.low, s.above = s.above[0], s.above[1:]
	}
	return true
}
