package wiring

// FirstToken is where and with what other machines join, right after the very first start of a cluster; else empty.
func (n *Node) FirstToken() (address, token string) { return "", "" }

// Left says that this node was removed from its cluster.
func (n *Node) Left() bool { return false }
