package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
)

func twoNodes(b client.NodeStatus) []client.NodeStatus {
	return []client.NodeStatus{
		{
			Node: "a", State: "alive", Roles: []string{"control", "worker"}, Leader: true, Voter: true,
			SlotsUsed: 3, Slots: 64, Ranks: 3, Groups: []string{"chat/0"},
			LastSeen: time.Unix(100, 0), SeenBy: "leader", SkewMs: 3600_000,
			Notes: []string{"its clock is 1h0m0s ahead of the leader's"},
		}, b,
	}
}

func TestNodesTable(t *testing.T) {
	c := newCLI(t)
	c.cluster.nodes.script = [][]client.NodeStatus{
		twoNodes(client.NodeStatus{
			Node: "b", State: "lost", Roles: []string{"ingress"}, Reason: "silent for 12s",
		}),
	}
	require.Zero(t, c.run([]string{"nodes"}), c.stderr())
	assert.Contains(t, c.stdout(), "NODE  STATE  ROLES  SLOTS  GPUS  RANKS  IN-FLIGHT  GROUPS")
	assert.Contains(t, c.stdout(), "cw*    3/64   0/0   3      0          chat/0")
	assert.Contains(t, c.stdout(), "1h0m0s")
	assert.Contains(t, c.stdout(), "silent for 12s")
	assert.Contains(t, c.stdout(), "a: its clock is 1h0m0s ahead of the leader's")
}

func TestNodesTableShowsDevicesThatWereFound(t *testing.T) {
	c := newCLI(t)
	found := []client.DeviceModel{
		{
			Kind: "nvidia", Name: "NVIDIA H100 80GB HBM3", MemoryMiB: 81559, Driver: "550",
			Devices: []int{0, 1, 2},
		},
		{Kind: "nvidia", Name: "NVIDIA GB10", Devices: []int{3}},
	}
	c.cluster.nodes.script = [][]client.NodeStatus{
		twoNodes(client.NodeStatus{Node: "b", State: "alive", GPUs: 4, Devices: found}),
		twoNodes(client.NodeStatus{Node: "b", State: "alive", GPUs: 4, Devices: found}),
	}
	require.Zero(t, c.run([]string{"nodes"}), c.stderr())
	assert.Contains(t, c.stdout(), "DEVICES")
	assert.Contains(t, c.stdout(), "3 x NVIDIA H100 80GB HBM3 79.6 GiB, 1 x NVIDIA GB10")
	require.Zero(t, c.run([]string{"nodes", "-o", "json"}), c.stderr())
	assert.Contains(t, c.stdout(), `"driver": "550"`)
}

func TestDrainWatchesUntilTheNodeIsEmpty(t *testing.T) {
	c := newCLI(t)
	c.cluster.nodes.script = [][]client.NodeStatus{
		twoNodes(client.NodeStatus{Node: "b", State: "draining", Ranks: 2, InFlight: 5}),
		twoNodes(client.NodeStatus{Node: "b", State: "silent", Ranks: 2, Reason: "not heard for 6s"}),
		twoNodes(client.NodeStatus{Node: "b", State: "unknown", Ranks: 2, Reason: "no node leads"}),
		twoNodes(client.NodeStatus{Node: "b", State: "draining", Ranks: 1}),
		twoNodes(client.NodeStatus{Node: "b", State: "drained"}),
	}
	require.Zero(t, c.run([]string{"drain", "b", "--deadline", "30m"}), c.stderr())
	assert.Equal(t, []string{"b"}, c.cluster.nodes.drained)
	assert.Equal(t, 30*time.Minute, *c.cluster.nodes.deadline)
	assert.Contains(t, c.stderr(), "b: 2 ranks, 5 requests in flight\n")
	assert.Contains(t, c.stderr(), "b: 2 ranks, 0 requests in flight; it is silent: not heard for 6s\n")
	assert.Contains(t, c.stderr(), "b: 2 ranks, 0 requests in flight; it is unknown: no node leads\n")
	assert.Contains(t, c.stderr(), "b: 1 rank, 0 requests in flight\n")
	assert.Contains(t, c.stderr(), "b is drained\n")
}

func TestDrainThatAnotherUserEnded(t *testing.T) {
	c := newCLI(t)
	c.cluster.nodes.script = [][]client.NodeStatus{twoNodes(client.NodeStatus{Node: "b", State: "alive"})}
	assert.Equal(t, 1, c.run([]string{"drain", "b"}))
	assert.Contains(t, c.stderr(), "b is alive: the drain was ended")
	assert.Nil(t, c.cluster.nodes.deadline)
}

func TestLeaveDrainsThenRemoves(t *testing.T) {
	c := newCLI(t)
	c.cluster.nodes.script = [][]client.NodeStatus{twoNodes(client.NodeStatus{Node: "b", State: "drained"})}
	require.Zero(t, c.run([]string{"leave", "--yes"}), c.stderr())
	assert.Equal(t, []string{"b"}, c.cluster.nodes.drained)
	assert.Equal(t, []string{"b"}, c.cluster.nodes.gone)
}

// HF30: `leave` asks whether the node may go before it drains it.
func TestLeaveAsksBeforeTheDrain(t *testing.T) {
	c := newCLI(t)
	c.cluster.nodes.script = [][]client.NodeStatus{twoNodes(client.NodeStatus{Node: "b", State: "drained"})}
	c.cluster.nodes.mayLeave = []error{
		&client.Error{Code: client.CodeUnavailable, Message: "c is silent"},
		&client.Error{Code: client.CodeConflict, Message: "c is lost", Hint: "remove c first"},
	}
	assert.Equal(t, 1, c.run([]string{"leave", "--yes"}))
	assert.Contains(t, c.stderr(), "c is lost\nhint: remove c first\n")
	assert.Empty(t, c.cluster.nodes.drained, "nothing is drained in vain")
	assert.Empty(t, c.cluster.nodes.gone)
}

func TestTheOnlyNodeDoesNotLeave(t *testing.T) {
	c := newCLI(t)
	c.cluster.nodes.script = [][]client.NodeStatus{{{Node: "b", State: "alive"}}}
	assert.Equal(t, 1, c.run([]string{"leave", "--yes"}))
	assert.Empty(t, c.cluster.nodes.drained)
}

func TestTokenPrintsTheJoinCommand(t *testing.T) {
	c := newCLI(t)
	require.Zero(t, c.run([]string{"token", "--uses", "3"}), c.stderr())
	assert.Equal(t, "dpserve join 10.0.0.1:7947 --token dpj1.x\n", c.stdout())
	assert.Equal(t, []client.TokenRequest{{TTL: time.Hour, Uses: 3}}, c.cluster.nodes.tokens)
}

// HF73: `token --roles`, `token list` and `token revoke` print what they did.
func TestTokensOfRolesListAndRevocation(t *testing.T) {
	c := newCLI(t)
	require.Zero(t, c.run([]string{"token", "--roles", "worker,ingress"}), c.stderr())
	assert.Equal(t, "dpserve join 10.0.0.1:7947 --token dpj1.x --roles worker,ingress\n", c.stdout())
	assert.Contains(t, c.stderr(), "; `dpserve token revoke 5f2c9d0e11aa` ends it\n")

	c = newCLI(t)
	made := time.Date(2026, 11, 23, 7, 24, 30, 0, time.UTC)
	c.cluster.nodes.listed = []client.JoinToken{
		{
			ID: "5f2c9d0e11aa", Status: "valid", Roles: []string{"worker", "ingress"}, Used: 1, UsesLeft: 2,
			Expires: made.Add(time.Hour), Made: made, By: "gpu-2",
		},
		{
			ID: "0b1e22c07d31", Status: "revoked", UsesLeft: 8, Expires: made, Made: made.Add(-time.Hour),
			By: "gpu-1 at its first start",
		},
	}
	require.Zero(t, c.run([]string{"token", "list"}), c.stderr())
	assert.Equal(t, `ID            STATUS   ROLES           USED  LEFT  EXPIRES               MADE                  BY
5f2c9d0e11aa  valid    worker,ingress  1     2     2026-11-23T08:24:30Z  2026-11-23T07:24:30Z  gpu-2
0b1e22c07d31  revoked  all             0     8     2026-11-23T07:24:30Z  2026-11-23T06:24:30Z  `+
		"gpu-1 at its first start\n", c.stdout())

	for _, wrong := range [][]string{{"token", "revoke"}, {"token", "revoke", "x", "--all"}} {
		assert.Equal(t, 2, c.run(wrong), wrong)
	}
	assert.Empty(t, c.cluster.nodes.revoked)
	require.Zero(t, c.run([]string{"token", "revoke", "5f2c9d0e11aa"}))
	require.Zero(t, c.run([]string{"token", "revoke", "--all"}))
	assert.Equal(t, []string{"5f2c9d0e11aa", "--all"}, c.cluster.nodes.revoked)
}

func TestRotateKeyNamesNodesWithoutIt(t *testing.T) {
	c := newCLI(t)
	require.Zero(t, c.run([]string{"nodes", "rotate-key"}), c.stderr())
	assert.Equal(t, "dpserve: the gossip has a new key\n", c.stderr())
	c.cluster.nodes.behind = []string{"a", "b"}
	require.Zero(t, c.run([]string{"nodes", "rotate-key"}))
	assert.Contains(t, c.stderr(), "a, b will take it when they renew their leases")
}

// HF77: used and all, without the digits that the sum of floats would have.
func TestNodesShowSharesOfDevices(t *testing.T) {
	c := newCLI(t)
	c.cluster.nodes.script = [][]client.NodeStatus{
		twoNodes(client.NodeStatus{Node: "b", State: "alive", GPUs: 4, GPUsUsed: 1.5}),
	}
	require.Zero(t, c.run([]string{"nodes"}), c.stderr())
	assert.Contains(t, c.stdout(), "  1.5/4  ")
}

// created is the change of a deploy that creates an application.
func created(name string) client.Change {
	return client.Change{App: name, Impact: client.Impact{Effect: client.EffectCreate}}
}

func TestPlanShowsPlacesAndExitCodes(t *testing.T) {
	c := newCLI(t)
	c.cluster.nodes.plan = client.Plan{
		Revision: 7, Changes: true, Fits: true,
		Apps: []client.AppPlan{{Change: created("moe"), Units: []client.UnitPlan{{
			Unit: "moe/0", Effect: client.EffectCreate,
			Seats: []client.SeatPlan{
				{Rank: 0, Node: "a", Devices: []int{0, 1}}, {Rank: 1, Node: "a", Devices: []int{2, 3}}, {
					Rank: 2, Node: "b", Devices: []int{0, 1},
				},
			},
		}}}},
		Nodes: []client.NodePlan{{Node: "a", GPUs: 4, GPUsFree: 4, GPUsNeed: 4}},
	}
	path := file(t, tiny)
	require.Zero(t, c.run([]string{"plan", path}), c.stderr())
	assert.Contains(t, c.stdout(), "moe/0  + create  0-1    a     0-3")
	assert.Contains(t, c.stdout(), "moe/0  + create  2      b     0-1")
	assert.Contains(t, c.stdout(), "--revision 7")
	assert.Equal(t, 3, c.run([]string{"plan", path, "--exit-code"}))

	c.cluster.nodes.plan.Fits = false
	c.cluster.nodes.plan.Apps[0].Units[0] = client.UnitPlan{
		Unit: "moe/0", Effect: client.EffectCreate, Why: "needs 6 devices, 4 are free",
		Hint: "moving chat/1 from a to b would make room",
	}
	assert.Equal(t, 5, c.run([]string{"plan", path}))
	assert.Contains(t, c.stderr(), "  needs 6 devices, 4 are free")
	assert.Contains(t, c.stderr(), "hint: moving chat/1 from a to b would make room")

	c.cluster.nodes.plan = client.Plan{Fits: true}
	assert.Zero(t, c.run([]string{"plan", path, "--exit-code"}))
	assert.Contains(t, c.stdout(), "no changes")
}

func TestFormatIntListAndSpan(t *testing.T) {
	assert.Equal(t, "0-3,6", formatIntList([]int{3, 2, 1, 0, 6}))
	assert.Empty(t, formatIntList(nil))
	assert.Equal(t, "3", formatSpan(3, 3))
}

// serves runs a command that serves until it is interrupted.
func (c *cli) serves(t *testing.T, args ...string) {
	t.Helper()
	code := c.start(args...)
	eventually(t, "it serves", func() bool { return strings.Contains(c.stdout(), "admin ") })
	c.interrupt()
	require.Zero(t, exit(t, code), c.stderr())
}

func TestStartPrintsTheJoinCommandOnce(t *testing.T) {
	c := newCLI(t)
	c.node.joinAt, c.node.joinWith = "10.0.0.1:7947", "dpj1.y"
	c.serves(t, "start", "--advertise", "127.0.0.2")
	assert.Contains(t, c.stderr(), "dpserve join 10.0.0.1:7947 --token dpj1.y")
	assert.Equal(t, "127.0.0.2:8000", c.node.config.HTTPBind)
	assert.Equal(t, "127.0.0.2:8265", c.node.config.AdminBind)
}

func TestJoinWantsAToken(t *testing.T) {
	c := newCLI(t)
	assert.Equal(t, 2, c.run([]string{"join", "10.0.0.1:7947"}))
	assert.Contains(t, c.stderr(), "join wants --token")
	c.serves(t, "join", "10.0.0.1:7947", "--token", "dpj1.z", "--advertise", "10.0.0.2")
	assert.Equal(t, "10.0.0.1:7947", c.node.config.Join.Address)
	assert.Equal(t, "127.0.0.1:8000", c.node.config.HTTPBind)
}

func TestJoinShowsItselfWhereItReachesTheCluster(t *testing.T) {
	c := newCLI(t)
	c.serves(t, "join", "127.0.0.1:7947", "--token", "dpj1.z")
	assert.Equal(t, "127.0.0.1", c.node.config.Advertise)
}
