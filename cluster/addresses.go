package cluster

import (
	"bytes"
	"encoding/json"
	"sync"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/state"
)

// addressBook has the names and addresses of nodes from the entries of this node's log, committed or not. A
// node without a leader does not know which entries are committed, so the state may lack the addresses of
// nodes whose votes are needed. A wrong address does no harm, because a Layer connects only to the node that
// was asked for.
type addressBook struct {
	mu    sync.Mutex
	byUID map[string]state.Node
}

// putNodeMark is in every entry that concerns the book. It spares decoding the other entries.
func putNodeMark() []byte { return []byte(`"put_node"`) }

// readEntry takes the address out of one entry.
func (b *addressBook) readEntry(l *raft.Log) {
	if l.Type != raft.LogCommand || !bytes.Contains(l.Data, putNodeMark()) {
		return
	}
	var entry struct { // only the fields that the book needs: a newer version may have written the entry
		PutNode *struct {
			Node struct{ UID, ID, Address string }
		} `json:"put_node"`
	}
	if err := json.Unmarshal(l.Data, &entry); err != nil || entry.PutNode == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.byUID == nil {
		b.byUID = map[string]state.Node{}
	}
	b.byUID[entry.PutNode.Node.UID] = state.Node{ID: entry.PutNode.Node.ID,
		Address: entry.PutNode.Node.Address}
}

// readAll reads a whole log. It returns the newest list of members in the log and its index; 0 = there is
// none.
func (b *addressBook) readAll(log raft.LogStore) (members raft.Configuration, index uint64, err error) {
	first, err := log.FirstIndex()
	if err != nil {
		return members, 0, err
	}
	last, err := log.LastIndex()
	if err != nil || last == 0 {
		return members, 0, err
	}
	for i := first; i <= last; i++ {
		var l raft.Log
		if err := log.GetLog(i, &l); err != nil {
			return members, 0, err
		}
		b.readEntry(&l)
		if l.Type == raft.LogConfiguration {
			members, index = raft.DecodeConfiguration(l.Data), i
		}
	}
	return members, index, nil
}

// lookup returns the name and address of a node.
func (b *addressBook) lookup(uid string) state.Node {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.byUID[uid]
}

// addresses returns the possible addresses of a node's port, the most likely first: Config.Resolve, log,
// state.
func (c *Cluster) addresses(uid string) []string {
	var all []string
	add := func(address string) {
		for _, a := range all {
			if a == address {
				return
			}
		}
		if address != "" {
			all = append(all, address)
		}
	}
	if c.cfg.Resolve != nil {
		if address, ok := c.cfg.Resolve(uid); ok {
			add(address)
		}
	}
	add(c.book.lookup(uid).Address)
	add(nodeByUID(c.State(), uid).Address)
	return all
}

// nameOf returns the name of a node; "" if neither the state nor the log has it.
func (c *Cluster) nameOf(uid string) string {
	if n := nodeByUID(c.State(), uid); n.ID != "" {
		return n.ID
	}
	return c.book.lookup(uid).ID
}
