// Package remote is the wire between nodes: gRPC services over the interfaces of actors/msg, the ranks'
// streams, and the data port, each with both its ends.
package noderpc
