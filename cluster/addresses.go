package cluster

import (
	"bytes"
	"encoding/json"
	"sync"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/state"
)

// addressBook is where the nodes are, and what they are called, as the entries of this node's log say, committed or not.
// Who has no leader does not know what of its log is committed, so the state may lack the addresses of the very nodes
// whose votes are needed; and a wrong address does no harm, because a Layer connects to nobody but the node that was
// asked for.
type addressBook struct {
	mu    sync.Mutex
	byUID map[string]state.Node
}

// putNode is how an entry that concerns the book can be told without decoding the others.
func putNode() []byte { return []byte(`"put_node"`) }

// read takes up one entry.
func (b *addressBook) read(l *raft.Log) {
	if l.Type != raft.LogCommand || !bytes.Contains(l.Data, putNode()) {
		return
	}
	var entry struct { // only what the book needs: the entry may be of a newer version
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
	b.byUID[entry.PutNode.Node.UID] = state.Node{ID: entry.PutNode.Node.ID, Address: entry.PutNode.Node.Address}
}

// readAll takes up a whole log, and gives its newest list of members with its index; 0 = it has none.
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
		b.read(&l)
		if l.Type == raft.LogConfiguration {
			members, index = raft.DecodeConfiguration(l.Data), i
		}
	}
	return members, index, nil
}

// of is the name and address of a node.
func (b *addressBook) of(uid string) state.Node {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.byUID[uid]
}

// addresses are where a node's port may be, the likeliest first: as Config.Resolve says, the log, the state.
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
	add(c.book.of(uid).Address)
	add(find(c.State(), uid).Address)
	return all
}

// nameOf is the name of a node, "" if neither the state nor the log has it.
func (c *Cluster) nameOf(uid string) string {
	if n := find(c.State(), uid); n.ID != "" {
		return n.ID
	}
	return c.book.of(uid).ID
}
