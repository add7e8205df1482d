package access

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/telemetry"
)

// rig is a folder of files and what is logged about them.
type rig struct {
	t    *testing.T
	dir  string
	logs bytes.Buffer
	log  *slog.Logger
}

func newRig(t *testing.T) *rig {
	t.Helper()
	g := &rig{t: t, dir: t.TempDir()}
	g.log = slog.New(slog.NewTextHandler(&g.logs, nil))
	return g
}

func (g *rig) open(f Files) (*Access, error) { return Open(f, telemetry.New().Access(), g.log) }

func (g *rig) write(name, text string) string {
	g.t.Helper()
	path := filepath.Join(g.dir, name)
	require.NoError(g.t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// warnings counts the lines of level WARN.
func (g *rig) warnings() int { return strings.Count(g.logs.String(), "level=WARN") }

// SP2: a changed key file is used once it has stopped changing; one that is bad, half-written or gone leaves
// the keys before it in use, with one line of the log.
func TestKeyFilesChange(t *testing.T) {
	g := newRig(t)
	path := g.write("keys", "ann sk-ann-0001\n")
	a, err := g.open(Files{APIKeys: path})
	require.NoError(t, err)
	keys := a.APIKeys()
	names := func() []string { return keys().Names() }
	look := func(times int) {
		for range times {
			a.look(time.Now())
		}
	}
	look(3)
	assert.Empty(t, g.logs.String())

	g.write("keys", "ann sk-ann-0001\nbo")
	look(1)
	g.write("keys", "ann sk-ann-0001\nbob sk-bob-0001\n")
	look(1)
	assert.Equal(t, []string{"ann"}, names(), "it changed between the last two looks")
	look(1)
	assert.Equal(t, []string{"ann", "bob"}, names())
	assert.Zero(t, g.warnings())

	for i, bad := range []string{"", "ann", "ann sk-ann-0001\nbob sk-ann-0001"} {
		g.write("keys", bad)
		look(5)
		assert.Equal(t, []string{"ann", "bob"}, names())
		assert.Equal(t, i+1, g.warnings(), "one line for each change")
	}
	require.NoError(t, os.Remove(path))
	look(5)
	assert.Equal(t, []string{"ann", "bob"}, names())
	assert.Equal(t, 4, g.warnings())
	assert.NotContains(t, g.logs.String(), "sk-")

	g.write("keys", "eve sk-eve-0001")
	look(2)
	assert.Equal(t, []string{"eve"}, names())
	assert.NotNil(t, keys().Find("sk-eve-0001"))
	assert.Equal(t, 4, g.warnings())
}

// SP2: a node does not start with a key file that it cannot use.
func TestKeyFilesAtTheStart(t *testing.T) {
	g := newRig(t)
	for text, want := range map[string]string{
		"":    "--api-keys: the file has no key",
		"ann": "--api-keys: line 1: it has 1 words, want 2 or 3",
	} {
		_, err := g.open(Files{APIKeys: g.write("keys", text)})
		require.EqualError(t, err, want)
	}
	_, err := g.open(Files{APIKeys: filepath.Join(g.dir, "none")})
	require.ErrorContains(t, err, "no such file")
}
