package ingress

import (
	"github.com/dpserve/dpserve/actors/msg"
)

// Index is this ingress's picture of what the ranks of an application have cached; nil if there is no such application or its
// policy reads none.
func (in *Ingress) Index(app string) *msg.IndexStatus {
	l := in.known(app)
	if l == nil || l.reads().cache == nil {
		return nil
	}
	c := l.reads().cache
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.status
	s.Resyncs = l.resyncs.Load()
	return &s
}

// Identity is what text prompts of an application are known by: text or tokens; "" if its policy reads no blocks.
func (in *Ingress) Identity(app string) string {
	l := in.known(app)
	if l == nil || !l.reads().chains() {
		return ""
	}
	return l.reads().identity
}
