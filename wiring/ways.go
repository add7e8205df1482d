package wiring

import (
	"net/http"
	"sync"

	"github.com/dpserve/dpserve/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// ways are the HTTP/2 connections to other nodes, one per protocol and node. A node that moved gets a new one, one that was removed
// none. Safe for concurrent use.
type ways struct {
	port *nodeport.Port
	node func(id string) *state.Node

	mu   sync.Mutex
	held map[way]*nodeport.Transport
}

// way is whom a connection is for.
type way struct{ alpn, node, address, uid string }

func newWays(port *nodeport.Port, node func(id string) *state.Node) *ways {
	return &ways{port: port, node: node, held: map[way]*nodeport.Transport{}}
}

// to gives the way to a node without waiting for it.
func (w *ways) to(alpn, id string) (http.RoundTripper, error) {
	n := w.node(id)
	if n == nil || n.Address == "" {
		return nil, problem.New(problem.Unavailable, "there is no way to node %s", id).WithHint("see `dpserve nodes`")
	}
	key := way{alpn, id, n.Address, n.UID}
	w.mu.Lock()
	defer w.mu.Unlock()
	if t := w.held[key]; t != nil {
		return t, nil
	}
	for old, t := range w.held {
		if now := w.node(old.node); now == nil || now.Address != old.address || now.UID != old.uid {
			_ = t.Close() // it was elsewhere: its requests have failed already
			delete(w.held, old)
		}
	}
	t := w.port.Transport(alpn, n.Address, n.UID)
	w.held[key] = t
	return t, nil
}

func (w *ways) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for key, t := range w.held {
		_ = t.Close()
		delete(w.held, key)
	}
}
