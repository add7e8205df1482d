package inprocess

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/test/harness"
)

// renewals counts the certificates that nodes have renewed.
func renewals(c *harness.Cluster) int {
	return strings.Count(c.Journal.String(), "the node's certificate was renewed")
}

// off closes all nodes, lets time pass, and starts all of them at once.
func off(t *testing.T, c *harness.Cluster, pass time.Duration) {
	t.Helper()
	for i := len(c.Peers()) - 1; i >= 0; i-- {
		c.Peer(i).Close()
	}
	time.Sleep(pass)
	failed := make(chan error, len(c.Peers()))
	for _, p := range c.Peers() {
		go func() { failed <- p.Again(nil) }()
	}
	for range c.Peers() {
		require.NoError(t, <-failed)
	}
}

// allAlive waits until every node renews its lease and the app runs.
func allAlive(t *testing.T, c *harness.Cluster, app string) {
	t.Helper()
	c.Led()
	c.Until("all nodes alive", func() error {
		for id, n := range c.List() {
			if n.State != "alive" {
				return fmt.Errorf("%s is %s", id, n.State)
			}
		}
		return nil
	})
	c.WaitStatus(app, "RUNNING")
}

// HF20, SP10: One control node and one worker. Each renews its certificate in time, the control node by
// itself, and no stream notices; so they work when the certificates that they joined with have expired. The
// days in which nothing happens they are off.
func TestCertificatesAreRenewedUnderAnOpenStream(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t, harness.Nodes(2), harness.Slots(2), harness.OnDisk(),
			harness.Roles(0, "control", "ingress"), harness.Roles(1, "worker"))
		c.Expect(harness.NodeFails)
		began := time.Now()
		c.Deploy(simApp("a", 2, "independent", "sim_step_ms: 100", "routing: {policy: direct}"))
		c.WaitStatus("a", "RUNNING")
		renewAt := pki.DefaultLife * 2 / 3
		off(t, c, renewAt-time.Since(began)-time.Minute)
		allAlive(t, c, "a")
		require.Zero(t, renewals(c))
		streams := make(chan *harness.Stream, 2)
		for _, rank := range []string{"0/0", "0/1"} {
			go func() { streams <- c.StreamChat(t.Context(), "a", 1200, "x-dpserve-rank", rank) }() // 120 s
		}
		time.Sleep(renewAt - time.Since(began) + 10*time.Second)
		assert.Equal(t, 2, renewals(c), "the control node and the worker, at two thirds of the life")
		for range 2 {
			s := <-streams
			assert.True(t, s.OK(), s)
			assert.Greater(t, s.Total, 110*time.Second)
		}
		off(t, c, 31*24*time.Hour-time.Since(began))
		allAlive(t, c, "a")
		s := c.StreamChat(t.Context(), "a", 20, "x-dpserve-rank", "0/1")
		assert.True(t, s.OK(), s)
		assert.Equal(t, 2, renewals(c))
	})
}

// HF20: All nodes are off until every certificate has expired. They start as after any other night: control
// nodes sign for themselves, the others get theirs from the leader.
func TestAClusterThatWasOffFor60DaysStartsByItself(t *testing.T) {
	t.Parallel()
	for name, roles := range map[string][][]string{
		"one control node": {{"control", "ingress"}, {"worker"}, {"ingress"}},
		"three control nodes": {
			{"control", "worker", "ingress"},
			{"control", "worker"},
			{"control"},
			{"worker"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				options := []harness.Option{harness.Nodes(len(roles)), harness.Slots(2), harness.OnDisk()}
				for i, r := range roles {
					options = append(options, harness.Roles(i, r...))
				}
				c := harness.New(t, options...)
				c.Expect(harness.NodeFails, harness.CertificateExpires)
				if name == "three control nodes" {
					c.WaitVoters(3)
				}
				c.Deploy(simApp("a", 2, "independent", "sim_step_ms: 10"))
				c.WaitStatus("a", "RUNNING")
				off(t, c, 60*24*time.Hour)
				allAlive(t, c, "a")
				assert.Equal(t, len(roles), renewals(c))
				s := c.StreamChat(t.Context(), "a", 20)
				assert.True(t, s.OK(), s)
			})
		})
	}
}
