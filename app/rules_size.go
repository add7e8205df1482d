package app

import (
	"fmt"
	"strconv"
)

// ruleSize is in every fault about sizes, because in Ray's history num_replicas has meant both ranks and
// groups.
const ruleSize = "num_replicas = dp_size × num_groups"

// settleSizes fills in dp_size, num_groups and num_replicas, and refuses sizes that do not multiply. Each may
// be missing.
func (d *decoder) settleSizes(a *draft) {
	replicas, groups, dp := a.path+".num_replicas", a.path+".num_groups", a.path+".data_parallel.dp_size"
	if !d.isGood(replicas, groups, dp, a.path+".autoscaling_config") || !d.takeScaling(a) {
		return
	}
	if a.Engine.Kind == KindAttach && !d.sizeByRanks(a) {
		return
	}
	if a.DataParallel.DPSize == 0 {
		a.DataParallel.DPSize = DefaultDPSize
	}
	if a.NumGroups == 0 && !d.groupsByReplicas(a) {
		return
	}
	product := a.DataParallel.DPSize * a.NumGroups
	if a.NumReplicas == 0 {
		a.NumReplicas = product
	}
	if a.NumReplicas != product {
		d.broken(replicas, Fault{
			Message: ruleSize, Found: strconv.Itoa(a.NumReplicas),
			Wanted: fmt.Sprintf("%d × %d = %d", a.DataParallel.DPSize, a.NumGroups, product),
			Hint:   "leave num_replicas or num_groups out",
		})
	}
	if product > MaxRanks {
		d.broken(groups, Fault{Message: ruleSize, Found: fmt.Sprintf("%d ranks", product),
			Wanted: fmt.Sprintf("at most %d", MaxRanks)})
	}
}

// groupsByReplicas derives num_groups; false after a fault.
func (d *decoder) groupsByReplicas(a *draft) bool {
	size, replicas := a.DataParallel.DPSize, a.NumReplicas
	if replicas == 0 {
		replicas = size
	}
	if replicas%size == 0 {
		a.NumGroups = replicas / size
		return true
	}
	next := (replicas/size + 1) * size
	hint := fmt.Sprintf("write %d", next)
	if replicas > size {
		hint = fmt.Sprintf("write %d or %d", next-size, next)
	}
	d.broken(a.path+".num_replicas", Fault{
		Message: ruleSize, Found: strconv.Itoa(replicas),
		Wanted: fmt.Sprintf("a multiple of dp_size %d", size), Hint: hint,
	})
	return false
}

// takeScaling reads autoscaling_config as a fixed size; false after a fault.
func (d *decoder) takeScaling(a *draft) bool {
	path := a.path + ".autoscaling_config"
	if !d.has(path) {
		return true
	}
	s := a.scaling
	if s.minimum == 0 || s.minimum != s.maximum || s.initial != 0 && s.initial != s.minimum {
		d.broken(path, Fault{
			Message: "the number of ranks is fixed",
			Found:   fmt.Sprintf("min_replicas %d, max_replicas %d", s.minimum, s.maximum),
			Wanted:  "min_replicas = max_replicas", Hint: "write num_replicas instead",
		})
		return false
	}
	if a.NumReplicas != 0 && a.NumReplicas != s.minimum {
		d.broken(path, Fault{
			Message: "two sizes", Found: fmt.Sprintf("num_replicas %d and min_replicas %d", a.NumReplicas,
				s.minimum),
			Wanted: "one of them", Hint: "leave autoscaling_config out",
		})
		return false
	}
	d.warn(path, fmt.Sprintf("read as num_replicas: %d", s.minimum), "write num_replicas instead")
	a.NumReplicas = s.minimum
	return true
}

// sizeByRanks sets dp_size and num_groups of an attach application from its list of ranks; false after a
// fault.
func (d *decoder) sizeByRanks(a *draft) bool {
	path := a.path + ".engine.ranks"
	if len(a.Engine.Ranks) == 0 || !d.isGood(path) || !d.goodRanks(a) {
		return false
	}
	sizes, ok := d.groupSizes(a)
	if !ok {
		return false
	}
	dp, groups := &a.DataParallel.DPSize, &a.NumGroups
	if *dp != 0 && *dp != sizes[0] {
		d.broken(a.path+".data_parallel.dp_size", Fault{
			Message: "dp_size is the number of attached ranks of a group", Found: strconv.Itoa(*dp),
			Wanted: strconv.Itoa(sizes[0]),
			Hint:   "leave dp_size out, or list the missing ranks",
		})
		return false
	}
	if *groups != 0 && *groups != len(sizes) {
		d.broken(a.path+".num_groups", Fault{
			Message: "num_groups is the number of groups that the ranks name", Found: strconv.Itoa(*groups),
			Wanted: strconv.Itoa(len(sizes)),
			Hint:   "write group: N on each rank, from 0",
		})
		return false
	}
	*dp, *groups = sizes[0], len(sizes)
	return true
}

func (d *decoder) goodRanks(a *draft) bool {
	for i := range a.Engine.Ranks {
		if !d.isGood(index(a.path+".engine.ranks", i) + ".group") {
			return false
		}
	}
	return true
}

// groupSizes counts the ranks of each group. Groups must be numbered from 0 without gaps and have one size.
func (d *decoder) groupSizes(a *draft) ([]int, bool) {
	sizes := make([]int, len(a.Engine.Ranks))
	top := 0
	for i, r := range a.Engine.Ranks {
		if r.Group >= len(sizes) {
			d.broken(index(a.path+".engine.ranks", i)+".group", Fault{
				Found: strconv.Itoa(r.Group), Wanted: "group numbers from 0 without gaps",
				Hint: "count groups from 0",
			})
			return nil, false
		}
		sizes[r.Group]++
		top = max(top, r.Group)
	}
	sizes = sizes[:top+1]
	for g, n := range sizes {
		if n != sizes[0] || n == 0 {
			d.broken(a.path+".engine.ranks", Fault{
				Message: "all groups have the same number of ranks",
				Found:   fmt.Sprintf("group %d with %d", g, n),
				Wanted:  fmt.Sprintf("%d as in group 0", sizes[0]),
				Hint:    "check the group numbers of the ranks, counted from 0",
			})
			return nil, false
		}
	}
	if sizes[0] > MaxDPSize {
		d.broken(a.path+".engine.ranks", Fault{
			Found: fmt.Sprintf("%d ranks in a group", sizes[0]), Wanted: fmt.Sprintf("at most %d", MaxDPSize),
			Hint: "form groups with group: N",
		})
		return nil, false
	}
	return sizes, true
}
