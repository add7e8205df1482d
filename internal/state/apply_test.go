package state

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
)

// machine applies commands as raft does: encoded, decoded, in order.
type machine struct {
	*State
	t testing.TB
}

func newMachine(t testing.TB) *machine { return &machine{New(), t} }

func (m *machine) try(c Command) (Result, error) {
	b, err := EncodeCommand(&c)
	require.NoError(m.t, err)
	d, err := DecodeCommand(b)
	require.NoError(m.t, err)
	return m.Apply(m.Index+1, d)
}

func (m *machine) must(c Command) Result {
	m.t.Helper()
	r, err := m.try(c)
	require.NoError(m.t, err)
	return r
}

// refused applies a command that must be refused, and must change nothing.
func (m *machine) refused(c Command, why error, code problem.Code) error {
	m.t.Helper()
	before := *m.Clone()
	_, err := m.try(c)
	require.ErrorIs(m.t, err, why)
	assert.Equal(m.t, code, problem.CodeOf(err))
	before.Index++
	assert.Equal(m.t, before, *m.State)
	return err
}

func spec(name, content string, names ...string) AppSpec {
	if names == nil {
		names = []string{name}
	}
	return AppSpec{
		Name: name, Spec: json.RawMessage(fmt.Sprintf("[{%q: %q}]", "v", content)), Names: names,
	}
}

func put(apps ...AppSpec) Command { return Command{PutApps: &PutApps{Apps: apps}} }

// grant is one unit of one rank at a slot with a block of 16 ports.
func grant(app string, revision uint64, rank, slot int, expect uint64) Command {
	return Command{GrantGroup: &GrantGroup{
		App: app, AppRevision: revision,
		Units: []UnitGrant{unitGrant(app, rank, slot, expect)},
	}}
}

func unitGrant(app string, rank, slot int, expect uint64) UnitGrant {
	return UnitGrant{
		Unit: fmt.Sprintf("%s/0/%d", app, rank), ExpectEpoch: expect, Attempt: 1,
		Ranks:  []RankGrant{{Rank: rank, Node: "a", Slot: slot}},
		Blocks: []Block{{Node: "a", Base: 20000 + 16*slot, Size: 16}},
	}
}

func ref(unit string, epoch uint64) *UnitRef { return &UnitRef{Unit: unit, Epoch: epoch, Reason: "r"} }

func TestPutAppsCountsRevisions(t *testing.T) {
	m := newMachine(t)
	r := m.must(put(spec("x", "1"), spec("y", "1")))
	assert.Equal(t, Result{Revision: 1, Apps: map[string]uint64{"x": 1, "y": 1}}, r)
	r = m.must(put(spec("x", "2"), spec("y", "1")))
	assert.Equal(t, Result{Revision: 2, Apps: map[string]uint64{"x": 2, "y": 1}}, r)
	r = m.must(put(spec("x", "2")))
	assert.Equal(t, Result{Revision: 2, Apps: map[string]uint64{"x": 2}}, r, "byte-equal is no change")
}

func TestPutAppsExpectsRevisions(t *testing.T) {
	m := newMachine(t)
	m.must(Command{PutApps: &PutApps{Apps: []AppSpec{spec("x", "1")}, Expect: map[string]uint64{"x": 0}}})
	m.must(Command{PutApps: &PutApps{
		Apps:   []AppSpec{spec("x", "2")},
		Expect: map[string]uint64{"x": 1, "other": 7},
	}})
	for _, e := range []uint64{0, 1, 3} {
		err := m.refused(Command{PutApps: &PutApps{
			Apps:   []AppSpec{spec("y", "1"), spec("x", "3")},
			Expect: map[string]uint64{"x": e},
		}}, ErrStaleRevision, problem.Conflict)
		assert.EqualError(t, err,
			fmt.Sprintf(`put apps: stale revision: application "x" is at revision 2, `+
				`the change was made for revision %d`, e))
	}
}

func TestPutAppsRefusals(t *testing.T) {
	m := newMachine(t)
	m.must(put(spec("x", "1", "llama", "l")))
	err := m.refused(put(spec("y", "1", "qwen", "l")), ErrNameTaken, problem.Conflict)
	require.EqualError(t, err,
		`put apps: model name taken: applications "x" and "y" both serve the model "l"`)
	m.refused(put(spec("q", "1"), spec("q", "2")), ErrBadCommand, problem.InvalidArgument)
	m.must(Command{DeleteApp: &DeleteApp{Name: "x"}})
	err = m.refused(put(spec("x", "2")), ErrDeleting, problem.Conflict)
	var p *problem.Error
	require.ErrorAs(t, err, &p)
	assert.Contains(t, p.Hint, "wait until it is gone")
	m.must(put(spec("y", "1", "llama")))
}

func TestPruneDeletesTheUnlisted(t *testing.T) {
	m := newMachine(t)
	m.must(put(spec("x", "1", "llama"), spec("y", "1")))
	r := m.must(Command{PutApps: &PutApps{Apps: []AppSpec{spec("z", "1", "llama")}, Prune: true}})
	assert.Equal(t, uint64(2), r.Revision)
	assert.True(t, m.Apps["x"].Deleting)
	assert.True(t, m.Apps["y"].Deleting)
	r = m.must(Command{PutApps: &PutApps{Prune: true}})
	assert.Equal(t, uint64(3), r.Revision)
	r = m.must(Command{PutApps: &PutApps{Prune: true}})
	assert.Equal(t, uint64(3), r.Revision, "no change")
}

func TestDeleteAndForget(t *testing.T) {
	m := newMachine(t)
	m.refused(Command{DeleteApp: &DeleteApp{Name: "x"}}, ErrUnknownApp, problem.NotFound)
	m.refused(Command{ForgetApp: &ForgetApp{Name: "x"}}, ErrUnknownApp, problem.NotFound)
	m.must(put(spec("x", "1")))
	m.must(grant("x", 1, 0, 0, 0))
	m.refused(Command{ForgetApp: &ForgetApp{Name: "x"}}, ErrNotDeleting, problem.Conflict)
	assert.Equal(t, uint64(2), m.must(Command{DeleteApp: &DeleteApp{Name: "x"}}).Revision)
	assert.Equal(t, uint64(2), m.must(Command{DeleteApp: &DeleteApp{Name: "x"}}).Revision, "twice is once")
	m.refused(grant("x", 1, 0, 0, 1), ErrDeleting, problem.Conflict)
	m.refused(Command{ForgetApp: &ForgetApp{Name: "x"}}, ErrUnitsLeft, problem.Conflict)
	m.must(Command{Release: ref("x/0/0", 1)})
	m.must(Command{ForgetApp: &ForgetApp{Name: "x"}})
	assert.Empty(t, m.Apps)
}

// TestRG3RedeployedNameNeverRepeatsAnEpoch, also over a snapshot.
func TestRG3RedeployedNameNeverRepeatsAnEpoch(t *testing.T) {
	m := newMachine(t)
	for round := range uint64(3) {
		m.must(put(spec("x", "1")))
		require.Equal(t, round+1, m.Apps["x"].Revision, "the revision goes on too")
		r := m.must(grant("x", round+1, 0, 0, round))
		require.Equal(t, map[string]uint64{"x/0/0": round + 1}, r.Epochs)
		m.must(Command{DeleteApp: &DeleteApp{Name: "x"}})
		m.must(Command{Release: ref("x/0/0", round+1)})
		m.must(Command{ForgetApp: &ForgetApp{Name: "x"}})
		b, err := m.Encode()
		require.NoError(t, err)
		m.State, err = Decode(b)
		require.NoError(t, err)
	}
	m.must(put(spec("x", "1")))
	m.refused(grant("x", 4, 0, 0, 0), ErrStaleEpoch, problem.Conflict)
}

func TestGrantRefusals(t *testing.T) {
	m := newMachine(t)
	m.refused(grant("x", 1, 0, 0, 0), ErrUnknownApp, problem.NotFound)
	m.must(put(spec("x", "1"), spec("y", "1")))
	m.must(grant("x", 1, 0, 0, 0))
	m.refused(grant("x", 2, 1, 1, 0), ErrStaleRevision, problem.Conflict)
	err := m.refused(grant("x", 1, 0, 0, 0), ErrStaleEpoch, problem.Conflict)
	require.EqualError(t, err, "grant group: stale epoch: x/0/0 is at epoch 1, the command is for epoch 0")

	change := func(f func(u *UnitGrant)) Command {
		c := grant("y", 1, 1, 1, 0)
		f(&c.GrantGroup.Units[0])
		return c
	}
	err = m.refused(change(func(u *UnitGrant) { u.Ranks[0].Slot = 0 }), ErrSlotTaken, problem.Conflict)
	require.EqualError(t, err, "grant group: slot taken: slot 0 of node a is held by x/0/0 at epoch 1")
	err = m.refused(change(func(u *UnitGrant) { u.Blocks[0].Base = 20015 }), ErrPortTaken, problem.Conflict)
	require.EqualError(t, err,
		"grant group: ports taken: ports 20015-20030 of node a is held by x/0/0 at epoch 1")
	for name, f := range map[string]func(u *UnitGrant){
		"no ranks":        func(u *UnitGrant) { u.Ranks = nil },
		"no node":         func(u *UnitGrant) { u.Ranks[0].Node = "" },
		"negative rank":   func(u *UnitGrant) { u.Ranks[0].Rank = -1 },
		"negative slot":   func(u *UnitGrant) { u.Ranks[0].Slot = -2 },
		"negative device": func(u *UnitGrant) { u.Ranks[0].Devices = []int{-1} },
		"foreign name":    func(u *UnitGrant) { u.Unit = "x/0/1" },
		"other rank":      func(u *UnitGrant) { u.Unit = "y/0/2" },
		"other group":     func(u *UnitGrant) { u.Unit = "y/1/1" },
		"ports below":     func(u *UnitGrant) { u.Blocks[0].Base = 0 },
		"ports above":     func(u *UnitGrant) { u.Blocks[0].Base = 65530 },
		"ports huge":      func(u *UnitGrant) { u.Blocks[0].Size = 1 << 62 },
	} {
		t.Run(name, func(t *testing.T) {
			(&machine{m.State, t}).refused(change(f), ErrBadCommand,
				problem.InvalidArgument)
		})
	}
	m.refused(Command{GrantGroup: &GrantGroup{App: "y", AppRevision: 1}}, ErrBadCommand,
		problem.InvalidArgument)
	twice := &GrantGroup{App: "y", AppRevision: 1}
	for rank := range 2 {
		twice.Units = append(twice.Units, UnitGrant{
			Unit:  "y/0",
			Ranks: []RankGrant{{Rank: rank, Node: "a", Slot: 2 + rank}},
		})
	}
	m.refused(Command{GrantGroup: twice}, ErrBadCommand, problem.InvalidArgument)
}

func TestGrantIsAllOrNothing(t *testing.T) {
	m := newMachine(t)
	m.must(put(spec("x", "1")))
	units := func(slots ...int) Command {
		g := &GrantGroup{App: "x", AppRevision: 1}
		for rank, slot := range slots {
			g.Units = append(g.Units, unitGrant("x", rank, slot, 0))
		}
		return Command{GrantGroup: g}
	}
	err := m.refused(units(0, 1, 0), ErrSlotTaken, problem.Conflict)
	require.EqualError(t, err,
		"grant group: slot taken: slot 0 of node a is held by x/0/0 of the same command")
	r := m.must(units(0, 1, 2))
	assert.Equal(t, map[string]uint64{"x/0/0": 1, "x/0/1": 1, "x/0/2": 1}, r.Epochs)
}

func TestRankHasOneUnit(t *testing.T) {
	m := newMachine(t)
	m.must(put(spec("x", "1")))
	m.must(grant("x", 1, 1, 0, 0))
	lockstep := Command{GrantGroup: &GrantGroup{App: "x", AppRevision: 1, Units: []UnitGrant{{
		Unit: "x/0", Ranks: []RankGrant{{Rank: 0, Node: "a", Slot: 5}, {Rank: 1, Node: "a", Slot: 6}},
	}}}}
	m.refused(lockstep, ErrRankTaken, problem.Conflict)
	m.must(Command{Release: ref("x/0/1", 1)})
	m.must(lockstep)
}

func TestDevicesAreTakenOnce(t *testing.T) {
	m := newMachine(t)
	m.must(put(spec("x", "1")))
	c := func(rank, device int) Command {
		g := grant("x", 1, rank, rank, 0)
		g.GrantGroup.Units[0].Ranks[0].Devices = []int{device}
		return g
	}
	m.must(c(0, 3))
	m.refused(c(1, 3), ErrDeviceTaken, problem.Conflict)
	m.must(c(1, 4))
}

// HF76: shares of any units add up to one device at most, and whole devices are not shared.
func TestSharesOfADevice(t *testing.T) {
	m := newMachine(t)
	m.must(put(spec("x", "1"), spec("y", "1", "m2")))
	c := func(app string, rank, share int, devices ...int) Command {
		g := grant(app, 1, rank, rank, 0)
		r := &g.GrantGroup.Units[0].Ranks[0]
		r.Slot, r.Devices, r.Share = -1, devices, share
		g.GrantGroup.Units[0].Blocks = nil
		g.GrantGroup.Units[0].ExpectEpoch = m.Epochs[g.GrantGroup.Units[0].Unit]
		return g
	}
	for rank := range 3 {
		m.must(c("x", rank, 3333, 3))
	}
	err := m.refused(c("y", 0, 2, 3), ErrDeviceTaken, problem.Conflict)
	assert.Contains(t, err.Error(), "device 3 of node a is held by x/0/0 at epoch 1")
	m.refused(c("y", 0, 0, 3), ErrDeviceTaken, problem.Conflict)
	m.must(c("y", 0, 1, 3))
	m.must(c("y", 1, 0, 4))
	m.refused(c("x", 4, 1, 4), ErrDeviceTaken, problem.Conflict)
	m.must(Command{Release: ref("x/0/1", 1)})
	m.refused(c("x", 1, 3334, 3), ErrDeviceTaken, problem.Conflict)
	m.must(Command{Release: ref("x/0/0", 1)})
	m.must(Command{Release: ref("x/0/2", 1)})
	m.must(Command{Release: ref("y/0/0", 1)})
	m.must(c("y", 0, 0, 3))

	both := c("x", 5, 6000, 5)
	both.GrantGroup.Units = append(both.GrantGroup.Units, c("x", 6, 5000, 5).GrantGroup.Units...)
	err = m.refused(both, ErrDeviceTaken, problem.Conflict)
	assert.Contains(t, err.Error(), "device 5 of node a is held by x/0/5 of the same command")
	for _, bad := range []Command{
		c("x", 5, -1, 5), c("x", 5, 10_000, 5), c("x", 5, 5000, 5, 6), c("x", 5, 5000),
	} {
		m.refused(bad, ErrBadCommand, problem.InvalidArgument)
	}
}

func TestRegrantReplacesAndCounts(t *testing.T) {
	m := newMachine(t)
	m.must(put(spec("x", "1")))
	m.must(grant("x", 1, 0, 0, 0))
	m.must(Command{UnitReady: ref("x/0/0", 1)})
	m.must(Command{UnitFenced: ref("x/0/0", 1)})
	assert.Equal(t, Fenced, m.Units["x/0/0"].Phase)
	m.must(grant("x", 1, 0, 1, 1))
	u := m.Units["x/0/0"]
	assert.Equal(t, uint64(2), u.Epoch)
	assert.Equal(t, 1, u.Restarts)
	assert.Equal(t, Starting, u.Phase)
	assert.Equal(t, []Block{{Node: "a", Base: 20000, Size: 16}}, m.Freed)
	m.must(put(spec("x", "2")))
	m.must(grant("x", 2, 0, 0, 2))
	assert.Zero(t, m.Units["x/0/0"].Restarts, "first start of this revision")
	assert.Equal(t, []Block{{Node: "a", Base: 20016, Size: 16}}, m.Freed, "used again, so not free")

	m.must(put(spec("x", "3")))
	same := grant("x", 3, 0, 0, 3)
	same.GrantGroup.Units[0].Launch = "h"
	m.must(same)
	m.must(put(spec("x", "4")))
	same.GrantGroup.AppRevision, same.GrantGroup.Units[0].ExpectEpoch = 4, 4
	m.must(same)
	assert.Equal(t, 1, m.Units["x/0/0"].Restarts, "another revision that starts the same")
}

func TestReportsCountAtThePresentEpochOnly(t *testing.T) {
	m := newMachine(t)
	m.must(put(spec("x", "1")))
	m.must(grant("x", 1, 0, 0, 0))
	m.must(grant("x", 1, 0, 0, 1))
	for _, epoch := range []uint64{0, 1, 3} {
		r := ref("x/0/0", epoch)
		for _, c := range []Command{{UnitReady: r}, {UnitFenced: r}, {UnitFailed: r}, {Release: r}} {
			m.refused(c, ErrStaleEpoch, problem.Conflict)
		}
	}
	m.must(Command{Release: ref("x/0/0", 2)})
	m.refused(Command{Release: ref("x/0/0", 2)}, ErrUnknownUnit, problem.NotFound)
	assert.Equal(t, uint64(2), m.Epochs["x/0/0"])
}

func TestFailedUnitHoldsNothingAndKeepsItsReason(t *testing.T) {
	m := newMachine(t)
	m.must(put(spec("x", "1"), spec("y", "1")))
	m.must(grant("x", 1, 0, 0, 0))
	var tail []string
	for i := range 30 {
		tail = append(tail, fmt.Sprint(i, strings.Repeat("ä", 600)))
	}
	m.must(Command{UnitFailed: &UnitRef{Unit: "x/0/0", Epoch: 1, Reason: "exit 1", LogTail: tail}})
	u := m.Units["x/0/0"]
	assert.Equal(t, "exit 1", u.Reason)
	require.Len(t, u.LogTail, LogTailLines)
	assert.True(t, strings.HasPrefix(u.LogTail[19], "29ä"))
	assert.LessOrEqual(t, len(u.LogTail[19]), logLineBytes)
	m.refused(Command{UnitReady: ref("x/0/0", 1)}, ErrWrongPhase, problem.Conflict)
	m.refused(Command{UnitFenced: ref("x/0/0", 1)}, ErrWrongPhase, problem.Conflict)
	m.must(grant("y", 1, 0, 0, 0))
	m.refused(grant("x", 1, 0, 0, 1), ErrSlotTaken, problem.Conflict)
	m.must(grant("x", 1, 0, 1, 1))
	assert.Empty(t, m.Units["x/0/0"].Reason)
}

// HF50: what a unit was ready with is known after a release and after a snapshot, until its application is
// forgotten.
func TestServedOutlivesGrants(t *testing.T) {
	m := newMachine(t)
	m.must(put(spec("x", "1", "x")))
	with := func(launch string, expect uint64) Command {
		c := grant("x", 1, 0, 0, expect)
		c.GrantGroup.Units[0].Launch = launch
		return c
	}
	m.must(with("l1", 0))
	assert.Empty(t, m.Served)
	m.must(Command{UnitReady: ref("x/0/0", 1)})
	m.must(with("l2", 1))
	m.must(Command{UnitFailed: ref("x/0/0", 2)})
	m.must(Command{Release: ref("x/0/0", 2)})
	assert.Equal(t, map[string]string{"x/0/0": "l1"}, m.Served)
	m.must(with("l2", 2))
	before := m.Clone()
	m.must(Command{UnitFenced: ref("x/0/0", 3)}) // it was ready until then
	assert.Equal(t, "l1", before.Served["x/0/0"], "a clone does not change")
	b, err := m.Encode()
	require.NoError(t, err)
	read, err := Decode(b)
	require.NoError(t, err)
	assert.Equal(t, map[string]string{"x/0/0": "l2"}, read.Served)
	m.must(Command{Release: ref("x/0/0", 3)})
	m.must(Command{DeleteApp: &DeleteApp{Name: "x"}})
	m.must(Command{ForgetApp: &ForgetApp{Name: "x"}})
	assert.Empty(t, m.Served)
}

func TestInitNamesTheClusterOnce(t *testing.T) {
	m := newMachine(t)
	m.refused(Command{Init: &Init{}}, ErrBadCommand, problem.InvalidArgument)
	m.must(Command{Init: &Init{Cluster: "c1"}})
	m.must(Command{Init: &Init{Cluster: "c1"}})
	m.refused(Command{Init: &Init{Cluster: "c2"}}, ErrWrongCluster, problem.Conflict)
}

func TestInitSetsEachSecretOnce(t *testing.T) {
	m := newMachine(t)
	m.must(Command{Init: &Init{Cluster: "c", Secret: []byte("s")}})
	m.refused(Command{Init: &Init{Cluster: "c", Secrets: Secrets{Authority: []byte("a")}}}, ErrBadCommand,
		problem.InvalidArgument)
	m.must(Command{Init: &Init{Cluster: "c", Secrets: Secrets{
		Authority:    []byte("a1"),
		AuthorityKey: []byte("k1"),
	}}})
	m.must(Command{Init: &Init{Cluster: "c", Secret: []byte("s2"), Secrets: Secrets{
		Authority: []byte("a2"), AuthorityKey: []byte("k2"), GossipKey: []byte("g"),
	}}})
	assert.Equal(t, Secrets{Authority: []byte("a1"), AuthorityKey: []byte("k1"), GossipKey: []byte("g")},
		m.Secrets)
	assert.Equal(t, []byte("s"), m.Secret)
}

func TestCommandsSayExactlyOneThing(t *testing.T) {
	for _, c := range []*Command{nil, {}, {Init: &Init{Cluster: "c"}, Release: ref("x", 1)}} {
		_, err := New().Apply(1, c)
		require.ErrorIs(t, err, ErrUnknownCommand)
		_, err = EncodeCommand(c)
		require.ErrorIs(t, err, ErrUnknownCommand)
	}
	assert.Equal(t, "release", (&Command{Release: ref("x", 1)}).Kind())
}

func TestUnknownCommandIsAnErrorNotACrash(t *testing.T) {
	for in, why := range map[string]error{
		`{"node_moved":{"node":"a"}}`:           ErrUnknownCommand,
		`{}`:                                    ErrUnknownCommand,
		`{"init":null}`:                         ErrUnknownCommand,
		`{"init":{"cluster":"c"},"release":{}}`: ErrUnknownCommand,
		`{"init":7}`:                            ErrBadCommand,
		`[]`:                                    ErrBadCommand,
	} {
		_, err := DecodeCommand([]byte(in))
		require.ErrorIs(t, err, why, in)
	}
	for _, in := range []string{
		`{"node_moved":{"node":"a"}}`, `{"init":{"cluster":"c","colour":"red"}}`,
		`{"put_node":{"node":{"id":"a","lift":[1]}}}`,
	} {
		_, err := DecodeCommand([]byte(in))
		require.ErrorIs(t, err, ErrNewer, "passing %s over would let the copies part", in)
		assert.Contains(t, err.Error(), "a newer version of dpserve wrote it")
	}
	_, err := DecodeCommand([]byte(`{`))
	require.Error(t, err)
	require.NotErrorIs(t, err, ErrNewer)
	var direct Command
	require.ErrorIs(t, json.Unmarshal([]byte(`{"later":{}}`), &direct), ErrUnknownCommand,
		"also for those who unmarshal by themselves")
}

func TestSnapshotRefusesWhatIsNotWhole(t *testing.T) {
	for _, in := range []string{
		``, `null`, `{}x`, `{"later":1}`, `{"apps":null}`, `{"apps":{"x":null}}`,
		`{"apps":{"x":{"name":"y"}}}`,
		`{"nodes":{"a":null}}`, `{"nodes":{"a":{"id":"b","uid":"1"}}}`, `{"nodes":{"a":{"id":"a"}}}`,
		`{"nodes":{"a":{"id":"a","uid":"1"}},"removed":["1"]}`,
		`{"nodes":{"a":{"id":"a","uid":"1"},"b":{"id":"b","uid":"1"}}}`, `{"tokens":{"h":null}}`,
		`{"tokens":{"h":{}}}`,
		`{"units":{"u":{"id":"u","epoch":2}},"epochs":{"u":1}}`, `{"units":{"u":null}}`,
		`{"units":{"u":{"id":"u"}}}`,
	} {
		_, err := Decode([]byte(in))
		if in == "null" {
			require.NoError(t, err, "null changes nothing: an empty state")
			continue
		}
		require.Error(t, err, in)
	}
}

// TestNamesOfWhatIsGoneAreBounded, and none of them ever comes back with an epoch or a revision that it had.
func TestNamesOfWhatIsGoneAreBounded(t *testing.T) {
	m := newMachine(t)
	epochs, revisions := map[string]uint64{}, map[string]uint64{}
	run := func(name string, times int, forget bool) {
		for i := range times {
			m.must(put(spec(name, fmt.Sprint(m.Index))))
			unit, app := name+"/0/0", m.Apps[name]
			require.Greater(t, app.Revision, revisions[name])
			revisions[name] = app.Revision
			m.must(grant(name, app.Revision, 0, i, m.LastEpoch(unit)))
			require.Greater(t, m.Units[unit].Epoch, epochs[unit])
			epochs[unit] = m.Units[unit].Epoch
			m.must(Command{Release: &UnitRef{Unit: unit, Epoch: epochs[unit]}})
		}
		if forget {
			m.must(Command{DeleteApp: &DeleteApp{Name: name}})
			m.must(Command{ForgetApp: &ForgetApp{Name: name}})
		}
	}
	run("lives", 1, false)
	run("often", 9, true)
	for i := range maxGoneNames + 50 {
		run(fmt.Sprint("app-", i), 1+i%3, true)
	}
	assert.Len(t, m.Epochs, maxGoneNames+1, "and that of the application that lives")
	assert.Len(t, m.Revisions, maxGoneNames)
	assert.Equal(t, uint64(1), m.EpochFloor, "those with the lowest numbers go first")
	assert.Equal(t, uint64(9), m.LastEpoch("often/0/0"))
	assert.Equal(t, uint64(1), m.LastEpoch("lives/0/0"))
	for unit, e := range epochs {
		require.GreaterOrEqual(t, m.LastEpoch(unit), e)
	}
	_, err := m.try(Command{Release: &UnitRef{Unit: "app-0/0/0", Epoch: 1}})
	require.ErrorIs(t, err, ErrUnknownUnit, "released long ago")
	b, err := m.Encode()
	require.NoError(t, err)
	again, err := Decode(b)
	require.NoError(t, err)
	assert.Equal(t, m.State, again)
	for i := range maxGoneNames + 50 {
		run(fmt.Sprint("app-", i), 1, true)
	}
}
