package ingress

import (
	"github.com/dpserve/dpserve/actors/msg"
)

// Index is this ingress's picture of what the ranks of an application have cached; nil if there is no such application or its
// policy reads none.
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

// Identity is what text prompts of an application are known by: text or tokens; "" if its policy reads no blocks.
func (in *Ingress) Identity(app string) string {
	ar := in.findAppRouter(app)
	if ar == nil || !ar.inputs().chains() {
		return ""
	}
	return ar.inputs().identity
}
