package membership

import (
	"fmt"
	"net"
	"time"

	"github.com/hashicorp/memberlist"
)

// delegate answers memberlist. memberlist calls it under its own lock, so it must not call memberlist and
// must not wait.
type delegate struct{ g *Gossip }

var (
	_ memberlist.Delegate      = (*delegate)(nil)
	_ memberlist.MergeDelegate = (*delegate)(nil)
	_ memberlist.AliveDelegate = (*delegate)(nil)
	_ memberlist.PingDelegate  = (*delegate)(nil)
)

// NodeMeta returns what this node announces.
func (d *delegate) NodeMeta(int) []byte { return d.g.encodedMeta() }

// NotifyAlive refuses members of other clusters, removed members, and nodes that are not dpserve's.
func (d *delegate) NotifyAlive(n *memberlist.Node) error { return d.g.checkMember(n) }

// NotifyMerge refuses the whole view of a peer that knows members of another cluster, so that two clusters
// never mix.
func (d *delegate) NotifyMerge(peers []*memberlist.Node) error {
	for _, n := range peers {
		if meta, err := decodeMeta(n.Meta); err == nil && meta.Cluster != d.g.cfg.Meta.Cluster {
			return fmt.Errorf("%s belongs to cluster %s, not %s", n.Name, meta.Cluster, d.g.cfg.Meta.Cluster)
		}
	}
	return nil
}

// NotifyPingComplete records that a member answered.
func (d *delegate) NotifyPingComplete(n *memberlist.Node, _ time.Duration, _ []byte) {
	d.g.table.recordAnswer(n.Name)
}

// AckPayload adds nothing.
func (d *delegate) AckPayload() []byte { return nil }

// NotifyMsg ignores user messages, because dpserve sends none.
func (d *delegate) NotifyMsg([]byte) {}

// GetBroadcasts has none.
func (d *delegate) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState adds nothing to a push and pull.
func (d *delegate) LocalState(bool) []byte { return nil }

// MergeRemoteState ignores what others add.
func (d *delegate) MergeRemoteState([]byte, bool) {}

func (g *Gossip) checkMember(n *memberlist.Node) error {
	meta, err := decodeMeta(n.Meta)
	if err != nil {
		return err
	}
	switch {
	case meta.Cluster != g.cfg.Meta.Cluster:
		return fmt.Errorf("it belongs to cluster %s, not %s", meta.Cluster, g.cfg.Meta.Cluster)
	case g.cfg.Revoked(meta.UID):
		return fmt.Errorf("uid %s was removed from the cluster", meta.UID)
	}
	_, _, err = splitName(n.Name)
	return err
}

// numericAddress returns the IP:PORT of a seed, in the form of Member.Gossip.
func (g *Gossip) numericAddress(seed string) (string, error) {
	host, port, err := net.SplitHostPort(seed)
	if err != nil {
		return "", err
	}
	ctx, cancel := g.transport.within(resolveTimeout)
	defer cancel()
	ip, err := resolve(ctx, host)
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(ip.String(), port), nil
}
