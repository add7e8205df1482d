package controller

import "time"

// part is one node's share of a unit's current grant.
type part struct {
	started, ready, draining bool
	ended                    bool // its node ends it, or has ended it, by itself
	gone                     bool // nothing is left of it
	adopted                  bool // granted before this leader led, and its node has not reported it
	absent                   bool // adopted, and its node reports that it does not have it

	process      uint64    // incarnation of the node that reported it last
	number       uint64    // newest event taken from that incarnation
	missingSince time.Time // since when that incarnation has not reported it; zero = it does
}

// isNewer reports whether an event is newer than the last one. Number 0 means no number and is always new.
func (p *part) isNewer(process, number uint64) bool {
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

// markGone notes that nothing is left of the part.
func (p *part) markGone() { p.ended, p.gone, p.adopted = true, true, false }

// allParts reports whether so holds for every part.
func (u *unit) allParts(so func(*part) bool) bool {
	for _, p := range u.parts {
		if !so(p) {
			return false
		}
	}
	return true
}

// othersLack reports whether so is false for a part on another node.
func (u *unit) othersLack(node string, so func(*part) bool) bool {
	for n, p := range u.parts {
		if n != node && !so(p) {
			return true
		}
	}
	return false
}

// hasUnreportedPart reports whether a node has not told this leader yet what it has of the unit.
func (u *unit) hasUnreportedPart() bool { return !u.allParts(func(p *part) bool { return !p.adopted }) }

func isStarted(p *part) bool  { return p.started }
func isReady(p *part) bool    { return p.ready }
func isDraining(p *part) bool { return p.draining || p.ended }
func isEnded(p *part) bool    { return p.ended }
func isGone(p *part) bool     { return p.gone }
