package server

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// SP2: a node makes its admin token once, readable for its user alone, and refuses one that others have read.
func TestTheAdminTokenOfADataDir(t *testing.T) {
	dir := t.TempDir()
	open := func(c Config) (*Node, error) {
		n := &Node{cfg: c}
		return n, n.openAdminToken()
	}
	first, err := open(Config{DataDir: dir})
	require.NoError(t, err)
	path := filepath.Join(dir, "admin.token")
	assert.Equal(t, path, first.AdminTokenFile())
	assert.Regexp(t, `^dpa1\.[0-9a-f]{64}$`, first.AdminToken())
	info, err := os.Stat(path)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode())
	again, err := open(Config{DataDir: dir})
	require.NoError(t, err)
	assert.Equal(t, first.AdminToken(), again.AdminToken())

	require.NoError(t, os.Chmod(path, 0o644))
	_, err = open(Config{DataDir: dir})
	require.ErrorContains(t, err, "can be read by others")
	for _, text := range []string{"", "short", "0123456789abcdef 0123456789abcdef", "0123456789abcdéf"} {
		other := filepath.Join(t.TempDir(), "token")
		require.NoError(t, os.WriteFile(other, []byte(text), 0o600))
		_, err = open(Config{DataDir: dir, AdminTokenFile: other})
		require.ErrorContains(t, err, "holds no admin token")
	}
	_, err = open(Config{AdminTokenFile: filepath.Join(dir, "none")})
	require.ErrorContains(t, err, "no such file")
	alone, err := open(Config{})
	require.NoError(t, err)
	assert.NotEmpty(t, alone.AdminToken())
	assert.Empty(t, alone.AdminTokenFile())
	without, err := open(Config{DataDir: dir, AdminOpen: true})
	require.NoError(t, err)
	assert.Empty(t, without.AdminToken())
}

// SP1: a public admin port needs TLS beside its token, or --insecure-public.
func TestAPublicAdminPort(t *testing.T) {
	for _, c := range []struct {
		change func(c *Config)
		want   string
	}{
		{func(*Config) {}, "reachable from outside, without TLS"},
		{func(c *Config) { c.TLSCert, c.TLSKey = "a", "b" }, ""},
		{func(c *Config) { c.TLSCert = "a" }, "--tls-cert and --tls-key belong together"},
		{
			func(c *Config) { c.TLSCert, c.TLSKey, c.AdminOpen = "a", "b", true },
			"without keys and without TLS",
		},
		{func(c *Config) { c.InsecurePublic = true }, ""},
	} {
		config := DefaultConfig()
		config.AdminBind = "0.0.0.0:8265"
		c.change(&config)
		if err := config.Validate(); c.want == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, c.want)
		}
	}
}
