package kvevents

// maxGroups bounds the KV groups of a hybrid model.
const maxGroups = 64

// Groups remembers which KV groups of a rank can be indexed by prefix: removals name the group but not its
// kind. nil = no memory, every removal passes. Not safe for concurrent use.
type Groups struct {
	out     uint64 // groups whose kind is none of ours
	Skipped uint64 // events of such groups
}

// indexed says whether blocks of this kind hold every token of a prefix (a sliding window or a Mamba
// state keeps only a part of it).
func indexed(spec string) bool {
	switch spec {
	case "", "full_attention", "mla_attention", "sink_full_attention":
		return true
	}
	return false
}

func (g *Groups) stored(e *decoded) bool {
	if indexed(e.fields.spec) {
		return true
	}
	if g != nil {
		g.out |= 1 << e.fields.group
		g.Skipped++
	}
	return false
}

func (g *Groups) removed(e *decoded) bool {
	if g == nil || g.out&(1<<e.fields.group) == 0 {
		return true
	}
	g.Skipped++
	return false
}

// forget begins anew, with a new incarnation.
func (g *Groups) forget() { g.out = 0 }
