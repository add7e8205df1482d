package state

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

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
