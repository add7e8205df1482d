package server

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/apikeys"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// accessRig is a node's files of keys and certificates, without a node.
type accessRig struct {
	t    *testing.T
	n    *Node
	dir  string
	logs bytes.Buffer
}

func newAccessRig(t *testing.T) *accessRig {
	t.Helper()
	g := &accessRig{t: t, dir: t.TempDir()}
	g.n = &Node{metrics: telemetry.New(), log: slog.New(slog.NewTextHandler(&g.logs, nil))}
	return g
}

func (g *accessRig) write(name, text string) string {
	g.t.Helper()
	path := filepath.Join(g.dir, name)
	require.NoError(g.t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// warnings counts the lines of level WARN.
func (g *accessRig) warnings() int { return strings.Count(g.logs.String(), "level=WARN") }

// SP2: a changed key file is used once it has stopped changing; one that is bad, half-written or gone leaves
// the keys before it in use, with one line of the log.
func TestKeyFilesChange(t *testing.T) {
	g := newAccessRig(t)
	path := g.write("keys", "ann sk-ann-0001\n")
	g.n.cfg.APIKeysFile = path
	require.NoError(t, g.n.openAccess())
	keys := g.n.access.keys
	names := func() []string { return keys.current().Names() }
	look := func(times int) {
		for range times {
			keys.look()
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
	assert.NotNil(t, keys.current().Find("sk-eve-0001"))
	assert.Equal(t, 4, g.warnings())
}

// SP2: a node does not start with a key file that it cannot use.
func TestKeyFilesAtTheStart(t *testing.T) {
	g := newAccessRig(t)
	for text, want := range map[string]string{
		"":    "--api-keys: the file has no key",
		"ann": "--api-keys: line 1: it has 1 words, want 2 or 3",
	} {
		k := watchedFiles[apikeys.Set]{
			what: "--api-keys", paths: []string{g.write("keys", text)},
			parse: func(texts [][]byte) (*apikeys.Set, error) { return apikeys.Parse(texts[0]) },
		}
		require.EqualError(t, k.open(), want)
	}
	k := watchedFiles[apikeys.Set]{what: "--api-keys", paths: []string{filepath.Join(g.dir, "none")}}
	require.ErrorContains(t, k.open(), "no such file")
}
