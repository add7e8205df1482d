package state

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/share"
)

const maxPort = 65535

// holder is the unit, with its epoch, that holds a resource.
type holder struct {
	unit  string
	epoch uint64
}

func (h holder) String() string {
	if h.epoch == 0 {
		return h.unit + " of the same command"
	}
	return fmt.Sprintf("%s at epoch %d", h.unit, h.epoch)
}

type nodeResource struct {
	node string
	n    int
}

type rankKey struct {
	pool        string
	group, rank int
}

// heldDevice is how much of a device is held, and by whom: of units that share it, the first by name.
type heldDevice struct {
	parts int
	holder
}

type heldBlock struct {
	Block
	holder
}

// heldResources is what units hold. Apply builds it for each grant: grants are rare, and an index kept beside
// the units could differ from them.
type heldResources struct {
	ranks   map[rankKey]holder
	slots   map[nodeResource]holder
	devices map[nodeResource]heldDevice
	blocks  []heldBlock
}

// resourcesHeld returns what all units hold except those that the command starts again.
func resourcesHeld(s *State, c *GrantGroup) *heldResources {
	again := make(map[string]bool, len(c.Units))
	for i := range c.Units {
		again[c.Units[i].Unit] = true
	}
	t := &heldResources{
		ranks: map[rankKey]holder{}, slots: map[nodeResource]holder{},
		devices: map[nodeResource]heldDevice{},
	}
	for id, u := range s.Units {
		if u.Holds() && !again[id] {
			t.addHeld(u.PoolName(), u.Group, holder{id, u.Epoch}, u.Ranks, u.Blocks)
		}
	}
	return t
}

func (t *heldResources) addHeld(pool string, group int, h holder, ranks []RankGrant, blocks []Block) {
	for i := range ranks {
		r := &ranks[i]
		t.ranks[rankKey{pool, group, r.Rank}] = h
		if r.Slot >= 0 {
			t.slots[nodeResource{r.Node, r.Slot}] = h
		}
		for _, d := range r.Devices {
			device := nodeResource{r.Node, d}
			held := t.devices[device]
			if held.parts == 0 || h.unit < held.unit {
				held.holder = h
			}
			held.parts += share.On(r.Share)
			t.devices[device] = held
		}
	}
	for _, b := range blocks {
		t.blocks = append(t.blocks, heldBlock{b, h})
	}
}

// checkGrant refuses a grant that is stale or malformed, or that would give a resource to two units.
func checkGrant(s *State, c *GrantGroup) error {
	if err := checkGrantApp(s, c); err != nil {
		return err
	}
	t, named := resourcesHeld(s, c), make(map[string]bool, len(c.Units))
	for i := range c.Units {
		g := &c.Units[i]
		if err := checkUnit(s, c, g); err != nil {
			return err
		}
		if err := s.checkGrantNodes(g); err != nil {
			return err
		}
		if named[g.Unit] {
			return badGrantError("%s is in it twice", g.Unit)
		}
		named[g.Unit] = true
		if err := t.claim(c, g); err != nil {
			return err
		}
	}
	return nil
}

func checkGrantApp(s *State, c *GrantGroup) error {
	a, ok := s.Apps[c.App]
	switch {
	case !ok:
		return s.unknownAppError(c.App)
	case a.Deleting:
		return problem.New(problem.Conflict, "grant group: application %q: %w", c.App, ErrDeleting)
	case a.Revision != c.AppRevision:
		return problem.New(problem.Conflict,
			"grant group: %w: application %q is at revision %d, the grant is for revision %d",
			ErrStaleRevision, c.App, a.Revision, c.AppRevision).
			WithHint("place the units of the present revision")
	case len(c.Units) == 0:
		return badGrantError("no units")
	}
	return nil
}

// checkUnit checks one unit by itself: its name, epoch, ranks and blocks.
func checkUnit(s *State, c *GrantGroup, g *UnitGrant) error {
	if !c.hasUnit(g) {
		return badGrantError("%s is no unit of group %d of application %q", g.Unit, c.Group, c.PoolName())
	}
	if have := s.LastEpoch(g.Unit); have != g.ExpectEpoch {
		return staleEpochError("grant group", g.Unit, g.ExpectEpoch, have)
	}
	if len(g.Ranks) == 0 {
		return badGrantError("%s has no ranks", g.Unit)
	}
	for _, r := range g.Ranks {
		if r.Rank < 0 || r.Slot < -1 || r.Node == "" ||
			slices.ContainsFunc(r.Devices, func(d int) bool { return d < 0 }) {
			return badGrantError("rank %d of %s has no node or a negative number", r.Rank, g.Unit)
		}
		if r.Share != 0 && (r.Share < 0 || r.Share >= share.Whole || len(r.Devices) != 1) {
			return badGrantError("rank %d of %s has %d of %d parts of %d devices", r.Rank, g.Unit, r.Share,
				share.Whole, len(r.Devices))
		}
	}
	for _, b := range g.Blocks {
		if b.Node == "" || b.Base < 1 || b.Size < 1 || b.Base > maxPort || b.Size > maxPort-b.Base+1 {
			return badGrantError("port block %d+%d of %s is not within 1-%d", b.Base, b.Size, g.Unit, maxPort)
		}
	}
	return nil
}

// hasUnit reports whether the unit's name is that of the group, or of its one rank.
func (c *GrantGroup) hasUnit(g *UnitGrant) bool {
	id := c.PoolName() + "/" + strconv.Itoa(c.Group)
	return g.Unit == id || (len(g.Ranks) == 1 && g.Unit == id+"/"+strconv.Itoa(g.Ranks[0].Rank))
}

func badGrantError(format string, args ...any) error {
	return problem.New(problem.InvalidArgument, "grant group: %w: %s", ErrBadCommand,
		fmt.Sprintf(format, args...))
}

// claim adds what a unit of the command asks for, or names the unit that holds it.
func (t *heldResources) claim(c *GrantGroup, g *UnitGrant) error {
	for i := range g.Ranks {
		if err := t.claimRank(c, g, &g.Ranks[i]); err != nil {
			return err
		}
	}
	for _, b := range g.Blocks {
		if err := t.claimBlock(g, b); err != nil {
			return err
		}
	}
	return nil
}

func (t *heldResources) claimRank(c *GrantGroup, g *UnitGrant, r *RankGrant) error {
	me := holder{unit: g.Unit}
	rank, slot := rankKey{c.PoolName(), c.Group, r.Rank}, nodeResource{r.Node, r.Slot}
	if h, ok := t.ranks[rank]; ok {
		return takenError(ErrRankTaken, h, "rank %d of %s/%d", r.Rank, c.PoolName(), c.Group)
	}
	t.ranks[rank] = me
	if h, ok := t.slots[slot]; ok && r.Slot >= 0 {
		return takenError(ErrSlotTaken, h, "slot %d of node %s", r.Slot, r.Node)
	}
	if r.Slot >= 0 {
		t.slots[slot] = me
	}
	for _, d := range r.Devices {
		device := nodeResource{r.Node, d}
		held := t.devices[device]
		if held.parts += share.On(r.Share); held.parts > share.Whole {
			return takenError(ErrDeviceTaken, held.holder, "device %d of node %s", d, r.Node)
		}
		held.holder = me
		t.devices[device] = held
	}
	return nil
}

func (t *heldResources) claimBlock(g *UnitGrant, b Block) error {
	for i := range t.blocks {
		if o := &t.blocks[i]; o.overlaps(b) {
			return takenError(ErrPortTaken, o.holder, "ports %d-%d of node %s", b.Base, b.Base+b.Size-1,
				b.Node)
		}
	}
	t.blocks = append(t.blocks, heldBlock{b, holder{unit: g.Unit}})
	return nil
}

func takenError(why error, h holder, format string, args ...any) error {
	return problem.New(problem.Conflict, "grant group: %w: %s is held by %s", why,
		fmt.Sprintf(format, args...), h).
		WithHint("place the units again on the present state")
}
