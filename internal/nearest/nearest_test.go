package nearest

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
)

func TestWord(t *testing.T) {
	words := []string{"status", "start", "max_ongoing_requests", "power-of-two"}
	for found, want := range map[string]string{
		"statsu": "status", "strat": "start", "Power_of_two": "power-of-two",
		"max_ongoing_request": "max_ongoing_requests",
		"nope":                "", "": "", strings.Repeat("x", 500): "",
	} {
		assert.Equal(t, want, Word(found, words), found)
	}
	assert.Empty(t, Word("x", nil))
}

func TestCheckFlag(t *testing.T) {
	require.NoError(t, CheckFlag("--log-format", "json", "text", "json"))
	for value, hint := range map[string]string{
		"txt": "did you mean text?", "": "leave --log-format out for its default",
	} {
		var err *problem.Error
		require.ErrorAs(t, CheckFlag("--log-format", value, "text", "json"), &err)
		assert.Equal(t, problem.InvalidArgument, err.Code)
		assert.Equal(t, `--log-format "`+value+`": wanted text, json`, err.Message)
		assert.Equal(t, hint, err.Hint)
	}
}
