package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// SP2: the commands of a node's user find its token by its address; a file and the environment come first.
func TestTheAdminTokenIsFound(t *testing.T) {
	t.Parallel()
	home, dir := t.TempDir(), t.TempDir()
	set := map[string]string{"HOME": home}
	e := &env{getenv: func(name string) string { return set[name] }}
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	find := func(addr string) string {
		token, err := e.adminToken(addr)
		require.NoError(t, err)
		return token
	}
	assert.Empty(t, find("127.0.0.1:8265"), "no node")
	gone := write("gone", "of-a-node-that-is-gone\n")
	linkAdminToken(e.getenv, "127.0.0.3:8265", gone)
	require.NoError(t, os.Remove(gone))
	remove := linkAdminToken(e.getenv, "0.0.0.0:8265", write("one", "of-one\n"))
	linkAdminToken(e.getenv, "127.0.0.2:8265", write("two", "of-two\n"))
	links, err := os.ReadDir(filepath.Join(home, ".local/state/dpserve/admin"))
	require.NoError(t, err)
	assert.Len(t, links, 2, "the stale link is gone")
	for addr, want := range map[string]string{
		"": "of-one", "localhost": "of-one", ":8265": "of-one", "https://127.0.0.1:8265": "of-one",
		"127.0.0.2": "of-two", "127.0.0.2:8266": "", "10.0.0.1:8265": "", "no address": "",
	} {
		assert.Equal(t, want, find(addr), addr)
	}
	set[adminTokenVariable] = " of-the-environment\n"
	assert.Equal(t, "of-the-environment", find(""))
	e.adminTokenFile = write("file", "of-the-file\n")
	assert.Equal(t, "of-the-file", find(""))
	e.adminTokenFile = filepath.Join(dir, "none")
	_, err = e.adminToken("")
	require.ErrorContains(t, err, "--admin-token-file: open ")

	e.adminTokenFile = ""
	delete(set, adminTokenVariable)
	linkAdminToken(e.getenv, "127.0.0.1:8265", write("next", "of-the-next\n"))
	remove()
	assert.Equal(t, "of-the-next", find(""), "a node that ends leaves the link of the next one")
}
