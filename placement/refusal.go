package placement

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/share"
)

// limit is what bounds the number of ranks of a group that a node can take.
type limit int

// The limits, in the order in which an error names them.
const (
	noLimit limit = iota
	limitLabels
	limitOtherPool
	limitStrategy // STRICT_PACK and STRICT_SPREAD, by the ranks that the group has
	limitMaxRanks
	limitSlots
	limitDevices
	limitPorts
)

// findLimit returns how many more ranks of g the node can take, and what bounds that number.
func (p *pool) findLimit(g *Group) (room int, by limit) {
	held := g.ranksOn(p.ID)
	switch {
	case g.Attach:
		return math.MaxInt32, noLimit
	case !p.matches(g):
		return 0, limitLabels
	case g.isKeptOff(p.ID):
		return 0, limitOtherPool
	case g.Strategy == StrictPack && held == 0 && g.hasRanksPlaced(), g.Strategy == StrictSpread && held > 0:
		return 0, limitStrategy
	}
	room = math.MaxInt32
	bound := func(n int, l limit) {
		if n < room {
			room, by = n, l
		}
	}
	if g.MaxRanksPerNode > 0 {
		bound(max(0, g.MaxRanksPerNode-held), limitMaxRanks)
	}
	if g.Slots > 0 {
		bound(len(p.slots), limitSlots)
	}
	switch {
	case g.Share > 0:
		bound(p.shared.roomFor(g.Share)+len(p.devices)*(share.Whole/g.Share), limitDevices)
	case g.Devices > 0:
		bound(len(p.deviceSets(g.Devices, g.loose)), limitDevices)
	}
	bound(p.portCapacityFor(g), limitPorts)
	return room, by
}

// shortage says why a group cannot be placed: only fits ranks found a place, or why.
type shortage struct {
	fits int
	why  string
}

// unplaceableError returns the error for people: what is short, what is needed, and what each node has free.
func (s *shortage) unplaceableError(ps pools, g *Group) error {
	need := len(g.Ranks) + len(g.Keep)
	limits := ps.findLimits(g)
	message := fmt.Sprintf("place %s: %d of %s can be placed (%s): short of %s", g.ID, s.fits,
		count(len(g.Ranks), "rank"), g.Strategy, g.describeLimits(limits))
	if s.why != "" {
		message = fmt.Sprintf("place %s: %s (%s)", g.ID, s.why, g.Strategy)
	}
	lines := []string{fmt.Sprintf("need: %s of %s", count(need, "rank"), g.describeRank())}
	for _, p := range ps {
		lines = append(lines, p.describeFree(g))
	}
	if len(ps) == 0 {
		lines = append(lines, "there is no node")
	}
	return problem.New(problem.Unplaceable, "%s", message).WithHint("%s", g.chooseHint(ps, limits)).
		WithDetails(lines...)
}

// findLimits returns the limits of all nodes, each one once and in order. A node under STRICT_SPREAD that has
// room is limited by the strategy to one rank.
func (ps pools) findLimits(g *Group) []limit {
	var out []limit
	for _, p := range ps {
		room, by := p.findLimit(g)
		if g.Strategy == StrictSpread && room > 0 {
			by = limitStrategy
		}
		if by != noLimit {
			out = append(out, by)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// describeLimits names what is short.
func (g *Group) describeLimits(limits []limit) string {
	words := map[limit]string{
		limitLabels:    "nodes with " + labels(g.Labels),
		limitOtherPool: "nodes without ranks of " + g.Other.Name,
		limitStrategy:  "room on the node of the group's other ranks",
		limitMaxRanks:  fmt.Sprintf("nodes (max_ranks_per_node: %d)", g.MaxRanksPerNode),
		limitSlots:     "slots",
		limitDevices:   "devices",
		limitPorts:     fmt.Sprintf("port blocks of %d", g.blockSize()),
	}
	if g.Strategy == StrictSpread {
		words[limitStrategy] = "nodes without a rank of the group"
	}
	parts := make([]string, len(limits))
	for i, l := range limits {
		parts[i] = words[l]
	}
	if len(parts) == 0 {
		return "nodes"
	}
	out := strings.Join(parts, " and ")
	if g.Strategy == StrictPack && !g.hasRanksPlaced() {
		out += " on one node"
	}
	return out
}

// describeRank says what one rank needs and where it may be placed.
func (g *Group) describeRank() string {
	var parts []string
	if g.Slots > 0 {
		parts = append(parts, count(g.Slots, "slot"))
	}
	switch {
	case g.Share > 0:
		parts = append(parts, share.Format(g.Share)+" of a device")
	case g.Devices > 0:
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
	if g.Other.Apart {
		out += ", on nodes without ranks of " + g.Other.Name
	}
	return out
}

// isKeptOff reports whether the group must not have ranks on a node because the other pool has some there.
func (g *Group) isKeptOff(node string) bool { return g.Other.Apart && g.Other.Ranks[node] > 0 }

// describeFree is one node's line: what it has free, for how many ranks of the group, and what limits them.
func (p *pool) describeFree(g *Group) string {
	room, by := p.findLimit(g)
	reason := map[limit]string{
		limitStrategy: "the group's other ranks are on another node",
		limitMaxRanks: "max_ranks_per_node",
		limitSlots:    "its slots",
		limitDevices:  "its devices",
		limitPorts: fmt.Sprintf("its ports %d-%d, in blocks of %d", p.Ports.Lo, p.Ports.Hi,
			g.blockSize()),
	}[by]
	if by == limitStrategy && g.Strategy == StrictSpread {
		reason = "it has a rank of the group"
	}
	switch by {
	case noLimit:
	case limitLabels:
		return fmt.Sprintf("node %s: does not have %s (labels: %s)", p.ID, labels(p.missingLabels(g)),
			labels(p.Labels))
	case limitOtherPool:
		return fmt.Sprintf("node %s: has ranks of %s, which are kept apart", p.ID, g.Other.Name)
	case limitStrategy:
		return fmt.Sprintf("node %s: %s", p.ID, reason)
	default:
		reason = ", room for " + count(room, "rank") + " by " + reason
	}
	line := fmt.Sprintf("node %s: %d of %s free, %d of %s free", p.ID,
		len(p.slots), count(p.Slots, "slot"), len(p.devices), count(len(p.Devices), "device"))
	if parts := p.shared.freeParts(); parts > 0 {
		line += " and " + share.Format(parts) + " of shared ones"
	}
	return line + reason
}

// chooseHint says what to do about the first limit that the user can change without other hardware.
func (g *Group) chooseHint(ps pools, limits []limit) string {
	hasDevices := slices.ContainsFunc(ps, func(p *pool) bool { return len(p.Devices) > 0 })
	switch {
	case slices.Equal(limits, []limit{limitLabels}):
		return "no node has these labels: correct resources.labels, or start a node with them in --labels"
	case g.Devices > 0 && !hasDevices:
		return "--engine sim runs the file on the simulated engine; for real ones start nodes where " +
			"nvidia-smi or rocm-smi lists devices (or --gpus names them), or write resources.gpus: 0 for a " +
			"build that needs none"
	case slices.Contains(limits, limitOtherPool):
		return "add nodes, or leave disaggregation.colocate: no out, so that both pools may share a node"
	case slices.Contains(limits, limitPorts):
		return "give nodes more ports with --port-range, add nodes, ask for fewer ranks, or delete an " +
			"application"
	case slices.Contains(limits, limitMaxRanks):
		return "add nodes, raise max_ranks_per_node, or ask for fewer ranks"
	case slices.Contains(limits, limitStrategy):
		return "add nodes, ask for fewer ranks, or write another placement_group_strategy"
	case slices.Contains(limits, limitDevices):
		return "add nodes with free devices, ask for fewer ranks, or delete an application"
	}
	return "add nodes or slots, ask for fewer ranks, or delete an application"
}

// missingLabels returns the labels that the group asks for and the node does not have.
func (p *pool) missingLabels(g *Group) map[string]string {
	out := maps.Clone(g.Labels)
	maps.DeleteFunc(out, func(k, v string) bool { return p.Labels[k] == v })
	return out
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
