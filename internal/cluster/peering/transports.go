package peering

import (
	"net/http"
	"sync"

	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Transports holds the connections to other nodes, one per protocol and node. A node that moved
// gets a new connection; a removed node gets none. Safe for concurrent use.
type Transports struct {
	port *nodeport.Port
	node func(id string) *state.Node

	mu   sync.Mutex
	open map[transportKey]*nodeport.Transport
}

// transportKey identifies a connection.
type transportKey struct{ alpn, node, address, uid string }

func newTransports(port *nodeport.Port, node func(id string) *state.Node) *Transports {
	return &Transports{port: port, node: node, open: map[transportKey]*nodeport.Transport{}}
}

// To returns the transport to a node and does not wait for the connection.
func (w *Transports) To(alpn, id string) (http.RoundTripper, error) {
	n := w.node(id)
	if n == nil || n.Address == "" {
		return nil, problem.New(problem.Unavailable, "there is no way to node %s", id).
			WithHint("see `dpserve nodes`")
	}
	key := transportKey{alpn, id, n.Address, n.UID}
	w.mu.Lock()
	defer w.mu.Unlock()
	if t := w.open[key]; t != nil {
		return t, nil
	}
	for old, t := range w.open {
		if now := w.node(old.node); now == nil || now.Address != old.address || now.UID != old.uid {
			_ = t.Close() // the node has moved: requests on this connection have failed already
			delete(w.open, old)
		}
	}
	t := w.port.Transport(alpn, n.Address, n.UID)
	w.open[key] = t
	return t, nil
}

func (w *Transports) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for key, t := range w.open {
		_ = t.Close()
		delete(w.open, key)
	}
}
