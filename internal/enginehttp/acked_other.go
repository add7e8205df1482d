//go:build !linux

package enginehttp

import "net"

// ackedBytes is not known on this system.
func ackedBytes(net.Conn) (n uint64, ok bool) { return 0, false }
