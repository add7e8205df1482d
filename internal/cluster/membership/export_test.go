package membership

import "time"

// Kill ends a member without announcing it, like a power cut.
func (g *Gossip) Kill() error { return g.end(false) }

// UpdateMeta announces another Meta.
func (g *Gossip) UpdateMeta(m Meta) error {
	if err := g.setMeta(m); err != nil {
		return err
	}
	return g.list.UpdateNode(time.Second)
}

// Encode, DecodeMeta and ReasonOf are for tests.
func (m Meta) Encode() ([]byte, error)           { return m.encode() }
func DecodeMeta(b []byte) (Meta, error)          { return decodeMeta(b) }
func SplitName(s string) (string, uint64, error) { return splitName(s) }
