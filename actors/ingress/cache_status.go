package ingress

import (
	"github.com/dpserve/dpserve/actors/msg"
)

// Index is the state of this ingress's picture of the ranks' caches for an application; nil if the
// application does not exist or its policy does not use the caches.
func (in *Ingress) Index(app string) *msg.IndexStatus {
	ar := in.findAppRouter(app)
	if ar == nil || ar.inputs().cache == nil {
		return nil
	}
	c := ar.inputs().cache
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.status
	s.Resyncs = ar.resyncs.Load()
	return &s
}

// Identity is how text prompts of an application are identified: text or tokens; "" if its policy reads no
// blocks.
func (in *Ingress) Identity(app string) string {
	ar := in.findAppRouter(app)
	if ar == nil || !ar.inputs().chains() {
		return ""
	}
	return ar.inputs().identity
}
