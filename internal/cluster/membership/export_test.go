package membership

// Kill ends a member without announcing it, like a power cut.
func (g *Gossip) Kill() error { return g.shutdown() }
