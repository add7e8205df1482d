package nearest

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
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
