package state

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// TestLastEnd: what a unit keeps of its last end, after the events that end it and those that start it again.
func TestLastEnd(t *testing.T) {
	at := noon.UnixMilli()
	before := &LastEnd{At: at - 1000, Exit: "code 7", Cause: "of an earlier grant", Line: "line before"}
	gone := Event{
		Kind: EvGone, Epoch: 3, Reason: "engine exited with code 1: out of memory", Exit: "code 1",
		LogTail: []string{"line 1", " line 2 ", ""},
	}
	ended := &LastEnd{At: at, Exit: "code 1", Cause: gone.Reason, Line: "line 2"}
	fenced := Event{Kind: EvFenced, Epoch: 3, Reason: "engine exited with code 1", Exit: "code 1"}
	killed := Event{Kind: EvKilling, Epoch: 3, Reason: "no answer"}
	lost := Event{Kind: EvNodeLost, Reason: "node a is lost"}
	again := []Event{{Kind: EvGranted, Epoch: 4, Attempt: 1}, {Kind: EvReady, Epoch: 4}}
	for name, c := range map[string]struct {
		from   Phase
		events []Event
		want   *LastEnd
	}{
		"none":                    {Ready, nil, before},
		"a start fails":           {Starting, []Event{gone}, ended},
		"a ready engine ends":     {Ready, []Event{fenced, killed, gone}, ended},
		"its next grant is ready": {Ready, append([]Event{fenced, gone}, again...), ended},
		"the others' end is later": {
			Ready,
			[]Event{fenced, {Kind: EvGone, Epoch: 3, Reason: "group ended"}},
			&LastEnd{At: at, Exit: "code 1", Cause: fenced.Reason},
		},
		"its node is lost": {Ready, []Event{lost}, &LastEnd{At: at, Cause: lost.Reason}},
		"its node is lost at a start": {
			Starting, []Event{lost}, &LastEnd{At: at, Cause: "node a is lost, while the unit was starting"},
		},
		"its node is lost while its engine ends": {
			Ready, []Event{fenced, lost}, &LastEnd{At: at, Exit: "code 1", Cause: fenced.Reason},
		},
		"its node is lost afterwards": {Ready, []Event{gone, lost}, ended},
		"it is ordered to end":        {Ready, []Event{{Kind: EvUnwant, Reason: "deleted"}, gone}, before},
		"it is wanted again":          {Ready, []Event{{Kind: EvUnwant}, gone, {Kind: EvWant}}, before},
		"a deploy tries it again":     {Starting, []Event{gone, {Kind: EvRedeploy}}, ended},
	} {
		m := in(c.from)
		m.LastEnd = before
		if c.from == Starting { // it shows why its former grant ended
			m.Reason, m.Exit, m.LogTail = before.Cause, before.Exit, []string{before.Line}
		}
		for _, e := range c.events {
			m, _ = Next(m, e, noon, Timers{})
		}
		assert.Equal(t, c.want, m.LastEnd, name)
	}
}

func TestTheLastLineIsShort(t *testing.T) {
	assert.Equal(t, "b", lastLine([]string{"a", "b", "\t"}))
	assert.Empty(t, lastLine(nil))
	long := "x" + strings.Repeat("é", lastLineBytes)
	assert.Equal(t, long[:lastLineBytes-1], lastLine([]string{long}))
}

// TestLastEndIsInTheRecord: a grant carries it over, and a unit that has failed notes the end of its last
// grant.
func TestLastEndIsInTheRecord(t *testing.T) {
	m := newMachine(t)
	m.must(put(spec("x", "1")))
	first := &LastEnd{At: noon.UnixMilli(), Cause: "first"}
	c := grant("x", 1, 0, 0, 0)
	c.GrantGroup.Units[0].LastEnd = first
	m.must(c)
	assert.Equal(t, first, m.Units["x/0/0"].LastEnd)
	second := &LastEnd{At: noon.Add(time.Second).UnixMilli(), Exit: "code 1", Cause: "second", Line: "line"}
	failed := ref("x/0/0", 1)
	failed.LastEnd = second
	m.must(Command{UnitFailed: failed})
	assert.Equal(t, second, m.Units["x/0/0"].LastEnd)
}
