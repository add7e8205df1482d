package placement

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// shortage says why a group cannot be placed: only fits ranks found a place, or why.
type shortage struct {
	fits int
	why  string
}

// unplaceableError returns the error for people: what is needed, and what each node has free.
func (s *shortage) unplaceableError(ps pools, g *Group) error {
	need := len(g.Ranks) + len(g.Keep)
	fits := fmt.Sprintf("%d of %s can be placed", s.fits, count(len(g.Ranks), "rank"))
	if s.why != "" {
		fits = s.why
	}
	lines := []string{fmt.Sprintf("need: %s of %s", count(need, "rank"), g.describeRank())}
	for _, p := range ps {
		lines = append(lines, p.describeFree(g))
	}
	if len(ps) == 0 {
		lines = append(lines, "there is no node")
	}
	return problem.New(problem.Unplaceable, "place %s: %s (%s)", g.ID, fits, g.Strategy).
		WithHint("%s", g.chooseHint(ps)).WithDetails(lines...)
}

// describeRank says what one rank needs and where it may be placed.
func (g *Group) describeRank() string {
	var parts []string
	if g.Slots > 0 {
		parts = append(parts, count(g.Slots, "slot"))
	}
	if g.Devices > 0 {
		parts = append(parts, count(g.Devices, "device"))
	}
	if len(parts) == 0 {
		parts = append(parts, "no slot")
	}
	out := strings.Join(parts, " and ") + " each, " + string(g.Strategy)
	if g.MaxRanksPerNode > 0 {
		out += fmt.Sprintf(", at most %d per node", g.MaxRanksPerNode)
	}
	if len(g.Labels) > 0 {
		out += ", on nodes with " + labels(g.Labels)
	}
	return out
}

// describeFree is one node's line: what it has free, and for how many ranks of the group.
func (p *pool) describeFree(g *Group) string {
	if !p.matches(g) {
		return fmt.Sprintf("node %s: labels do not match (%s)", p.ID, labels(p.Labels))
	}
	line := fmt.Sprintf("node %s: %d of %s free, %d of %s free", p.ID,
		len(p.slots), count(p.Slots, "slot"), len(p.devices), count(len(p.Devices), "device"))
	if n := p.capacityFor(g); n < math.MaxInt32 {
		line += ", room for " + count(n, "rank")
	}
	return line
}

func (g *Group) chooseHint(ps pools) string {
	devices, matched := false, false
	for _, p := range ps {
		devices, matched = devices || len(p.Devices) > 0, matched || p.matches(g)
	}
	if len(ps) > 0 && !matched {
		return "no node has these labels: correct resources.labels, or start a node with them in --labels"
	}
	if g.Devices > 0 && !devices {
		return "no node offers devices: start nodes with --gpus, or run the file on the simulated engine " +
			"with --engine sim"
	}
	return "free room by deleting an application, ask for fewer ranks, or start nodes with more --slots " +
		"or --gpus"
}

func labels(m map[string]string) string {
	if len(m) == 0 {
		return "none"
	}
	parts := make([]string, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, k+"="+m[k])
	}
	return strings.Join(parts, ", ")
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
