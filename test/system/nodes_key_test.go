package system

import (
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/test/harness"
)

// SP10: the gossip gets a new key under load. No request notices, whoever has the old key is outside then,
// and a node that was away all the time is inside again.
func TestSP10RotateKey(t *testing.T) {
	t.Parallel()
	c := harness.StartMembers(t, append(harness.Each(3), []string{"--roles", "worker"},
		[]string{"--roles", "worker"}), harness.LongLeases) // beside a load, too, no renewal is late
	c.Expect(harness.NodeFails, harness.GossipRefused)
	c.All[0].Want(spread("wide", 3))
	c.Running("wide")
	away := c.All[4]
	away.Term()
	c.WaitNode(away.Name, "lost", func(s *client.NodeStatus) bool { return s.State == "lost" })
	old := filesOf(t, away)
	load := harness.StartLoad(t, "wide", 4, 20, c.All[0].HTTP, c.All[1].HTTP)
	load.Reaches(10)

	code, text := command(c.All[3], "nodes", "rotate-key")
	require.Zero(t, code, text)
	assert.Contains(t, text, "the gossip has a new key")
	key := filesOf(t, c.All[0]).GossipKey
	assert.NotEqual(t, old.GossipKey, key)
	for _, m := range c.Up() {
		assert.Equal(t, key, filesOf(t, m).GossipKey, m.Name)
	}
	load.Reaches(10)
	y := load.End()
	assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "what clients saw: %v", y)
	c.Settled()

	away.Start()
	c.Eventually("the node that was away has the new key", func() error {
		if !assert.ObjectsAreEqual(key, filesOf(t, away).GossipKey) {
			return errNotYet
		}
		return nil
	})
	c.WaitNode(away.Name, "alive again", alive)
	assert.Empty(t, gossips(t, c, old.GossipKey, time.Second), "the old key opens nothing")
	assert.Equal(t, "a b c d e", gossips(t, c, key, harness.Patience), "all speak with the new one")

	code, text = command(c.All[0], "nodes", "rotate-key")
	assert.Zero(t, code, "and once more: %s", text)
	c.Settled()
}

func filesOf(t *testing.T, m *harness.Member) pki.Files {
	t.Helper()
	f, err := pki.Load(filepath.Join(m.Dir, "pki"))
	require.NoError(t, err)
	return f
}

// gossips joins the gossip with a key and returns whom it meets within patience, until that is the whole
// cluster.
func gossips(t *testing.T, c *harness.Members, secret []byte, patience time.Duration) string {
	t.Helper()
	id, err := filesOf(t, c.All[0]).Credentials()
	require.NoError(t, err)
	key, err := membership.DeriveKey(secret, id.Identity.Cluster)
	require.NoError(t, err)
	g, err := membership.Start(t.Context(), membership.Config{
		Self: membership.Member{Cluster: id.Identity.Cluster, UID: "uid-visitor", Node: "visitor"},
		Host: c.NextIP(), Incarnation: 1, Key: key,
		Seeds: func() []string { return []string{c.All[0].Gossip(), c.All[1].Gossip()} },
		Log:   slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	defer func() { assert.NoError(t, g.Close()) }()
	met := ""
	for end := time.Now().Add(patience); time.Now().Before(end) && strings.Count(met,
		" ") < len(c.All)-1; time.Sleep(20 * time.Millisecond) {
		var names []string
		for _, m := range g.Members() {
			if m.Node != "visitor" {
				names = append(names, m.Node)
			}
		}
		met = strings.Join(names, " ")
	}
	return met
}
