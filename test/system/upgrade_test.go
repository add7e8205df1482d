package system

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// The tests of this file upgrade a cluster from this build to one that stands for the next version: test/next
// adds a kind of command, a field of the state, a field of a node's record and a kind of event.

const (
	nextTrigger = "use-next" // the application whose deploy lets the next version use what it adds
	markRefused = "next: mark refused"
)

// upgrade is a cluster under upgrade. Its control nodes are ingresses too.
type upgrade struct {
	*harness.Members
	t         *testing.T
	old, next string // binaries
}

// upgradeRig starts three control nodes with role ingress, two workers with six ranks of "wide", and whatever
// else.
func upgradeRig(t *testing.T, more ...[]string) *upgrade {
	t.Helper()
	flags := append(append(harness.Each(3, "--roles", "control,ingress"),
		harness.Each(2, "--roles", "worker")...), more...)
	u := &upgrade{t: t, old: harness.Binary(t), next: harness.NextBinary(t)}
	u.Members = harness.StartMembers(t, flags, harness.MemberSlots(8), harness.Calm)
	u.Expect(harness.NodeFails)
	u.All[0].Want(spread("wide", 6))
	u.Running("wide")
	return u
}

// controls are the control nodes, the leader last.
func (u *upgrade) controls() []*harness.Member {
	u.t.Helper()
	leader := u.Leader()
	all := slices.DeleteFunc(slices.Clone(u.All[:3]), func(m *harness.Member) bool { return m == leader })
	return append(all, leader)
}

func (u *upgrade) workers() []*harness.Member { return u.All[3:5] }

// restart gives a node another binary under load at the others. No client may see it, and no rank of another
// node.
func (u *upgrade) restart(m *harness.Member, binary string) {
	u.t.Helper()
	u.underLoad(m, func() {
		m.Term()
		m.Use(binary)
		m.Start()
	})
}

// underLoad does something to a node, with clients at the ingresses of the others. It ends when all is as it
// should be again.
func (u *upgrade) underLoad(m *harness.Member, do func()) {
	u.t.Helper()
	st := u.Running("wide")
	before := seats(&st)
	var at []string
	for _, other := range u.All[:3] {
		if other != m {
			at = append(at, other.HTTP)
		}
	}
	load := harness.StartLoad(u.t, "wide", 3, 10, at...)
	load.Reaches(5)
	do()
	u.Settled()
	st = u.Running("wide")
	load.Reaches(5)
	y := load.End()
	assert.Zero(u.t, y.Refused+y.Broken+y.Cut+y.Hung, "while %s restarted: %v", m.Name, y)
	after := seats(&st)
	for seat, was := range before {
		if was.Node != m.Name {
			assert.Equal(u.t, was, after[seat], "rank %s was not on %s, which restarted", seat, m.Name)
		}
	}
}

// deploy puts an application of two ranks through a node and asks it there.
func (u *upgrade) deploy(name string, at *harness.Member) {
	u.t.Helper()
	at.Want(strings.Replace(spread(name, 2), "    placement", "    route_prefix: /"+name+"\n    placement",
		1))
	u.Running(name)
	load := harness.StartLoad(u.t, name, 1, 5, at.HTTP+"/"+name)
	load.Reaches(4)
	y := load.End()
	assert.Zero(u.t, y.Refused+y.Broken+y.Cut+y.Hung, "%s at %s: %v", name, at.Name, y)
}

// says waits for words in a node's log.
func (u *upgrade) says(m *harness.Member, words ...string) {
	u.t.Helper()
	u.Eventually(m.Name+" says "+strings.Join(words, ", "), func() error {
		for line := range strings.Lines(m.Log()) {
			if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
				return nil
			}
		}
		return fmt.Errorf("it does not")
	})
}

var stateLine = regexp.MustCompile(`next: state.*index=(\d+) sum=([0-9a-f]+)`)

// sameStates waits until the control nodes show the same state last, and compares what they showed before.
func (u *upgrade) sameStates() {
	u.t.Helper()
	sums := map[string]string{} // by index
	u.Eventually("the same state at every control node", func() error {
		last := map[string]string{}
		for _, m := range u.All[:3] {
			for _, found := range stateLine.FindAllStringSubmatch(m.Log(), -1) {
				index, sum := found[1], found[2]
				if was := sums[index]; was != "" && was != sum {
					u.t.Fatalf("node %s has another state at index %s", m.Name, index)
				}
				sums[index], last[m.Name] = sum, index+" "+sum
			}
		}
		for _, m := range u.All[:3] {
			if last[m.Name] == "" || last[m.Name] != last[u.All[0].Name] {
				return fmt.Errorf("%v", last)
			}
		}
		return nil
	})
}

// MB6: a worker first, whose events the old leader does not know, then the control nodes. What the next
// version adds is refused while an old control node is there, and used when there is none; old workers and
// ingresses follow a state with a field that they do not know. A control node goes back to the old version
// before that, and is refused behind it.
func TestMB6Upgrade(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("restarts nodes eight times")
	}
	u := upgradeRig(t, []string{"--roles", "ingress"})
	u.Expect(harness.VersionTooOld)
	edge, worker := u.All[5], u.workers()[0]
	u.restart(worker, u.next)
	u.deploy("rests", edge) // the ranks of "wide" have gone elsewhere when it stopped
	st := u.Running("rests")
	before := seats(&st)
	require.NotEmpty(t, on(before, worker.Name))
	u.Eventually("the leader hears of events that it does not know", func() error {
		if counted(t, u.Leader(), "dpserve_unknown_messages_total", `kind="unit_event"`) < 10 {
			return fmt.Errorf("not yet")
		}
		return nil
	})
	time.Sleep(harness.CalmLease) // twice as long as a unit may be missing from the report of its node
	st = u.Running("rests")
	assert.Equal(t, before, seats(&st), "ranks whose node speaks of them in words of the next version")

	all := u.controls()
	u.restart(all[0], u.next)
	u.restart(all[0], u.old)
	for _, m := range all[:2] {
		u.restart(m, u.next)
	}
	u.deploy(nextTrigger, edge)
	last := all[2]
	u.restart(last, u.old) // it hands over to one of the next version
	leader := u.Leader()
	require.NotEqual(t, last.Name, leader.Name)
	u.says(leader, markRefused, "too old: "+last.Name)
	u.deploy("mixed", edge)
	for _, m := range all {
		assert.NotContains(t, m.Log(), "marked=\"by",
			"the new command was used before every control node knew it")
		assert.NotContains(t, m.Log(), "leaves consensus")
	}

	u.restart(last, u.next)
	for _, m := range all {
		u.says(m, "next: state", "marked=\"by")
	}
	u.deploy("later", edge)
	u.says(edge, "passes over what it does not know")
	assert.NotZero(t, counted(t, edge, "dpserve_unknown_messages_total", `kind="state"`))
	u.sameStates()

	u.underLoad(last, func() {
		last.Term()
		last.Use(u.old)
		last.Launch("start")
		assert.NotZero(t, last.ExitCode(), "an old version does not start behind what the next one wrote")
		assert.Contains(t, last.Output(), "newer version of dpserve")
		assert.Contains(t, last.Output(), "hint: start a newer version")
		last.Use(u.next)
		last.Start()
	})
	u.sameStates()
	u.AllQuiet()
}
