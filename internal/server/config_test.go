package server

import (
	"testing"

	"github.com/stretchr/testify/require"
)

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
