package kvindex

// side counts what is rarely more than one: the first copy of a block lives in its bit alone.
type side struct {
	copies  map[Handle]uint32 // physical copies of a handle beyond the first
	aliases map[slot]uint32   // handles of a block beyond the first
	n       int               // sum of both
}

const sideBytes = 40 // charged per entry

func (s *side) bytes() int { return sideBytes * (len(s.copies) + len(s.aliases)) }

// copy counts one more copy of h. Without room it goes uncounted, and the block is lost one removal too
// early.
func (s *side) copy(ix *Index, h Handle, n uint32) {
	if n == 0 {
		return
	}
	if s.copies[h] == 0 && !ix.chargeBytes(sideBytes) {
		ix.counters.Refused++
		return
	}
	if s.copies == nil {
		s.copies = make(map[Handle]uint32)
	}
	s.copies[h] += n
	s.n += int(n)
}

// alias counts one more handle of a block.
func (s *side) alias(ix *Index, x slot) {
	if s.aliases[x] == 0 && !ix.chargeBytes(sideBytes) {
		ix.counters.Refused++
		return
	}
	if s.aliases == nil {
		s.aliases = make(map[slot]uint32)
	}
	s.aliases[x]++
	s.n++
}

// uncopy takes a copy of h away; false if there was only the first.
func (s *side) uncopy(ix *Index, h Handle) bool {
	if len(s.copies) == 0 {
		return false
	}
	n := s.copies[h]
	if n > 1 {
		s.copies[h] = n - 1
		s.n--
	} else if n == 1 {
		s.forget(ix, h)
	}
	return n > 0
}

// unalias takes a handle of x away; false if there was only one.
func (s *side) unalias(ix *Index, x slot) bool {
	if len(s.aliases) == 0 {
		return false
	}
	n := s.aliases[x]
	if n > 1 {
		s.aliases[x] = n - 1
		s.n--
	} else if n == 1 {
		s.forgetAliases(ix, x)
	}
	return n > 0
}

func (s *side) forget(ix *Index, h Handle) {
	if len(s.copies) > 0 && s.copies[h] > 0 {
		s.n -= int(s.copies[h])
		delete(s.copies, h)
		ix.charge -= sideBytes
	}
}

func (s *side) forgetAliases(ix *Index, x slot) {
	if len(s.aliases) > 0 && s.aliases[x] > 0 {
		s.n -= int(s.aliases[x])
		delete(s.aliases, x)
		ix.charge -= sideBytes
	}
}
