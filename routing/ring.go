package routing

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/twmb/murmur3"
)

// ringSeed is the seed of Ray Serve's consistent-hash ring; with it a session falls on the same point here as
// there.
const ringSeed = 0xF9B4CA77

// ring is a consistent-hash ring: every rank has the same number of points, hashed from "GROUP/RANK:n".
// Points of a rank do not depend on the others, so a rank that comes or goes moves only its own share of the
// keys.
type ring struct {
	points []ringPoint // ascending by hash, then rank
	nodes  int         // points per rank
	ids    table       // rank id + 1 → 1
}

type ringPoint struct {
	hash uint64
	rank RankID
}

func newRing(v *View, nodes int) ring {
	r := ring{nodes: nodes}
	for i := range v.Ranks {
		r.add(v.Ranks[i].ID)
	}
	return r
}

func comparePoints(a, b ringPoint) int {
	return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(a.rank, b.rank))
}

func (r *ring) appendPoints(points []ringPoint, id RankID) []ringPoint {
	for n := range r.nodes {
		points = append(points, ringPoint{hash: hashString(fmt.Sprintf("%s:%d", id, n)), rank: id})
	}
	return points
}

// observe keeps the ring equal to the ranks of the view.
func (r *ring) observe(e *Event) {
	switch e.Kind {
	case EvRankUp:
		if r.ids.get(uint64(e.Rank)+1) == 0 {
			r.add(e.Rank)
		}
	case EvRankDown:
		if r.ids.get(uint64(e.Rank)+1) != 0 {
			r.ids.remove(uint64(e.Rank) + 1)
			r.points = slices.DeleteFunc(r.points, func(p ringPoint) bool { return p.rank == e.Rank })
		}
	default:
	}
}

// add merges a rank's points into the ring from behind, so that a thousand ranks coming up one by one stay
// cheap.
func (r *ring) add(id RankID) {
	r.ids.set(uint64(id)+1, 1)
	fresh := r.appendPoints(nil, id)
	slices.SortFunc(fresh, comparePoints)
	old := len(r.points)
	r.points = append(r.points, fresh...)
	for to, i, j := len(r.points)-1, old-1, len(fresh)-1; j >= 0; to-- {
		if i >= 0 && comparePoints(r.points[i], fresh[j]) > 0 {
			r.points[to] = r.points[i]
			i--
			continue
		}
		r.points[to] = fresh[j]
		j--
	}
}

// first is the index of the first point behind key, clockwise. The ring is not empty.
func (r *ring) first(key uint64) int {
	i, _ := slices.BinarySearchFunc(r.points, key, func(p ringPoint, key uint64) int {
		if p.hash > key {
			return 1
		}
		return -1
	})
	return i % len(r.points)
}

// walk calls visit with the row of each rank of the view, in the order of the ring from key on, each once,
// until it returns false. seen is scratch of one number per row, all 0; it is 1 for the rows that were
// visited.
func (r *ring) walk(v *View, key uint64, seen []int64, visit func(row int) bool) {
	if len(r.points) == 0 {
		return
	}
	left := len(v.Ranks)
	for k, i := 0, r.first(key); k < len(r.points) && left > 0; k++ {
		row, ok := v.Find(r.points[i].rank)
		if ok && seen[row] == 0 {
			seen[row] = 1
			left--
			if !visit(row) {
				return
			}
		}
		if i++; i == len(r.points) {
			i = 0
		}
	}
}

// hashString is the 64-bit murmur3 hash that the ring uses for keys and points.
func hashString(s string) uint64 { return murmur3.SeedStringSum64(ringSeed, s) }

func hashBytes(b []byte) uint64 { return murmur3.SeedSum64(ringSeed, b) }

// spread maps a request's number to a point of the ring: requests without a key go everywhere.
func spread(id uint64) uint64 {
	id ^= id >> 30
	id *= 0xBF58476D1CE4E5B9
	id ^= id >> 27
	id *= 0x94D049BB133111EB
	return id ^ id>>31
}
