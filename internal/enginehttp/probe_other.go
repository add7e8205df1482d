//go:build !unix

package enginehttp

import "net"

// probe is not there on this system: a request on a connection that its peer has closed fails, and may be
// sent again.
type probe struct{}

func newProbe(net.Conn) *probe { return nil }

func (*probe) quiet() bool { return true }
