// Package rawconn makes TCP connections whose reads and writes bypass Go's scheduler: they use raw system
// calls.
//
// An ordinary read or write of a net.Conn leaves and re-enters the scheduler around the call, because the
// call might block. The sockets are non-blocking, so it never does; but on a machine whose processors are
// nearly idle, as a relay of paced token streams leaves them, each of these steps may wake the runtime's
// monitor thread and other processors, which costs more than the call. docs/performance.md has the numbers.
// This package makes the raw system call instead, from the callbacks of syscall.RawConn, which still parks
// the goroutine in the runtime's poller when there is nothing to read or no room to write. Deadlines, Close
// and errors work as they do without it.
//
// A raw call holds its processor until it is done, and garbage collection waits for it: so one call writes at
// most maxPiece bytes. The race detector does not see what a raw call does to memory, so under it, and on
// systems other than Linux, connections stay as they are.
package rawconn
