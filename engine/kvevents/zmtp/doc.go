// Package zmtp is one ZeroMQ connection at a time, with limits. The wire protocol is go-zeromq's (zmq4.Open);
// listening, dialling, queues and reconnects stay with the caller, because the library's sockets cannot be
// bounded: they have no high-water mark, accept frames of any size a peer announces, handshake inside the
// accept loop, die with a peer's malformed handshake, and leave goroutines behind. Used by the event
// subscriber and by the simulated engine's publisher.
package zmtp
