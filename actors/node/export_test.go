package node

import "github.com/dpserve/dpserve/internal/state"

// UsedBlocks returns the port blocks of units that are not gone.
func (n *Node) UsedBlocks() (blocks []state.Block) {
	for _, u := range n.list() {
		if u.m.Block.Size > 0 && u.currentPhase() != state.Gone {
			blocks = append(blocks, u.m.Block)
		}
	}
	return blocks
}
