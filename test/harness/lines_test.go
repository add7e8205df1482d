package harness

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestUnexpectedLinesAreFound(t *testing.T) {
	const log = `time=2026-01-01T00:00:00Z level=INFO msg="all is well" err="level of concern"
time=2026-01-01T00:00:01Z level=WARN msg="unit is fenced" unit=a/0 rank=1
time=2026-01-01T00:00:02Z level=ERROR msg=short err=x
time=2026-01-01T00:00:03Z level=WARN msg="unit is fenced" unit=a/0 rank=2
{"time":"2026-01-01T00:00:04Z","level":"ERROR","msg":"a \"quoted\" word","err":"y"}
text of an engine
`
	var e Expected
	found := e.unexpected(log, nil)
	require.Len(t, found, 3)
	assert.Contains(t, found[0], `2 times "unit is fenced"`)
	assert.Contains(t, found[0], "rank=1", "the first of them")
	assert.Contains(t, found[1], "short")
	assert.Contains(t, found[2], `a \"quoted\" word`)

	e.Expect(Fault{{Msg: "unit is", Why: "a part of a message is not enough"}})
	assert.Len(t, e.unexpected(log, nil), 3)
	e.Expect(Fault{{Msg: "unit is .*", Why: "the test kills it"}, {
		Msg: "short", With: "err=y",
		Why: "another line",
	}})
	assert.Len(t, e.unexpected(log, nil), 2)
	assert.Len(t, e.unexpected(log, Fault{{Msg: "short", With: "err=x", Why: "the node ends"}}), 1)
}
