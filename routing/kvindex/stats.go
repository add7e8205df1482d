package kvindex

// Counters count, since New, what was dropped or given up, each for one reason. Blocks unless said.
type Counters struct {
	Fenced        uint64 // calls: an older epoch, another incarnation, or a column that is closed
	Unopened      uint64 // calls for a rank without a column
	WrongFeed     uint64 // calls that do not fit the column's feed
	BadLength     uint64 // events: token ids ≠ blocks × block size, or a block size out of bounds
	BadBlockSize  uint64 // events of another block size than the column's (a partial block, a wrong setting)
	OtherGroup    uint64 // events of attention groups that are not indexed
	SelfParent    uint64 // events naming a block its own parent
	Cycle         uint64 // events closing a circle of parents
	Conflict      uint64 // events or records that place a known block elsewhere
	UnknownParent uint64 // stored blocks kept aside because their parent is not known
	AsideDropped  uint64 // blocks kept aside and dropped for want of room
	UnknownRemove uint64 // removals of blocks that are not held
	Repeated      uint64 // columns emptied because their engine told of more copies than it has blocks
	Refused       uint64 // blocks, copies or records not taken: the cap leaves no room
	Evicted       uint64 // blocks dropped at the cap, all holders at once
	Expired       uint64 // blocks whose time or capacity as a speculative store or record ended
}

// Stats are gauges of an index.
type Stats struct {
	Counters
	Blocks      int // chain hashes known, ghosts included
	Columns     int // open
	Bytes       int // charged against Cap
	Cap         int
	Handles     int // engine handles, over all columns
	HandleBytes int // of Bytes
	Aside       int // blocks waiting for their parents
	Orphans     int // held blocks whose parent is not held
	Unswept     bool
}

// Stats is the writer's: call it where events are applied.
func (ix *Index) Stats() Stats {
	s := Stats{
		Counters: ix.counters, Blocks: ix.pool.live, Bytes: ix.charge, Cap: ix.cap, Handles: ix.handles,
		Unswept: ix.sweep.n > 0 || ix.sweep.cursor > 0,
	}
	for _, c := range ix.columns {
		if c == nil {
			continue
		}
		s.Columns++
		s.HandleBytes += c.handles.bytes()
		s.Aside += len(c.aside.blocks)
		s.Orphans += c.orphans
	}
	return s
}
