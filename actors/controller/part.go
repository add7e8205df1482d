package controller

import "time"

// part is what one node has of the grant in hand of a unit.
type part struct {
	started, ready, draining bool
	ended                    bool // its node ends it, or has ended it, by itself
	gone                     bool // nothing is left of it
	adopted                  bool // granted before this leader led, and its node has not spoken of it
	absent                   bool // adopted, and its node says that it does not have it

	process uint64    // of the node that spoke of it last
	number  uint64    // of the newest event taken from that process
	missed  time.Time // since when that process has not spoken of it; zero = it does
}

// news says whether an event is newer than what is known. 0 is no number and always new.
func (p *part) news(process, number uint64) bool {
	if p.process != process {
		p.process, p.number = process, 0
	}
	if number == 0 {
		return true
	}
	if number <= p.number {
		return false
	}
	p.number = number
	return true
}

// end notes that nothing is left of the part.
func (p *part) end() { p.ended, p.gone, p.adopted = true, true, false }

// all says whether every part is so.
func (u *unit) all(so func(*part) bool) bool {
	for _, p := range u.parts {
		if !so(p) {
			return false
		}
	}
	return true
}

// others says whether a part on another node is not so.
func (u *unit) others(node string, so func(*part) bool) bool {
	for n, p := range u.parts {
		if n != node && !so(p) {
			return true
		}
	}
	return false
}

// unsure says whether a node of the unit has not told this leader yet what it has of it.
func (u *unit) unsure() bool { return !u.all(func(p *part) bool { return !p.adopted }) }

func isStarted(p *part) bool  { return p.started }
func isReady(p *part) bool    { return p.ready }
func isDraining(p *part) bool { return p.draining || p.ended }
func isEnded(p *part) bool    { return p.ended }
func isGone(p *part) bool     { return p.gone }
