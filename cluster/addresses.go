package cluster

import (
	"errors"
	"maps"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/state"
)

// address is where a node's port is: as Config.Resolve says, else as the state does.
func (c *Cluster) address(uid string) (string, bool) {
	if c.cfg.Resolve != nil {
		if address, ok := c.cfg.Resolve(uid); ok {
			return address, true
		}
	}
	address := find(c.State(), uid).Address
	return address, address != ""
}

// voices are the addresses of the nodes that may vote, by UID.
func voices(st *state.State) map[string]string {
	all := map[string]string{}
	for _, n := range st.Nodes {
		if n.Has(state.RoleControl) {
			all[n.UID] = n.Address
		}
	}
	return all
}

// keepAddresses writes a snapshot whenever the address of a control node has changed. When all control nodes start at once
// nobody leads yet, so nobody knows what of the log behind the snapshot was committed: the addresses at which to ask for votes
// must be in the snapshot.
func (c *Cluster) keepAddresses(saved map[string]string) {
	for {
		changed, now := c.Changed(), voices(c.State())
		again := (<-chan time.Time)(nil)
		if !maps.Equal(now, saved) {
			if err := c.Snapshot(); err == nil || errors.Is(err, raft.ErrNothingNewToSnapshot) {
				saved = now
			} else {
				again = time.After(faultPause)
			}
		}
		select {
		case <-changed:
		case <-again:
		case <-c.done:
			return
		}
	}
}
