package client

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestAddresses(t *testing.T) {
	for addr, want := range map[string]string{
		"":                         "http://127.0.0.1:8265",
		"127.0.0.1":                "http://127.0.0.1:8265",
		"127.0.0.1:18265":          "http://127.0.0.1:18265",
		":18265":                   "http://127.0.0.1:18265",
		"0.0.0.0:18265":            "http://127.0.0.1:18265",
		"[::]:18265":               "http://[::1]:18265",
		"localhost":                "http://localhost:8265",
		"gpu-1.example.com:80":     "http://gpu-1.example.com:80",
		"http://gpu-1":             "http://gpu-1",
		"http://[::1]/":            "http://[::1]",
		"http://gpu-1:8265/":       "http://gpu-1:8265",
		"HTTP://10.0.0.1:1":        "http://10.0.0.1:1",
		"https://dpserve.internal": "https://dpserve.internal",
		"https://gpu-1:8443":       "https://gpu-1:8443",
		"::1":                      "http://[::1]:8265",
		"[::1]":                    "http://[::1]:8265",
		"[::1]:99":                 "http://[::1]:99",
		"fd00::7":                  "http://[fd00::7]:8265",
		"fe80::1%eth0":             "http://[fe80::1%25eth0]:8265",
	} {
		c, err := New(addr)
		require.NoError(t, err, addr)
		assert.Equal(t, want, c.Addr(), addr)
	}
}

func TestAddressesThatAreRefused(t *testing.T) {
	for addr, why := range map[string]string{
		"ftp://x":           `its scheme is "ftp"`,
		"unix:///run/d":     `its scheme is "unix"`,
		"http://":           "it has no host",
		"/":                 "it has no host",
		"http://h/path":     "it has more than a host and a port",
		"http://h:1?x=1":    "it has more than a host and a port",
		"http://u@h:1":      "it has more than a host and a port",
		" 127.0.0.1":        "it has more than a host and a port",
		"h:port":            `its port is "port"`,
		"h:0":               `its port is "0"`,
		"h:":                `its port is ""`,
		"h:70000":           `its port is "70000"`,
		"8265":              "it is a number; a port alone is written :8265",
		"1:2:3":             "write an IPv6 address with a port as [::1]:8265",
		"[::1":              "write an IPv6 address with a port as [::1]:8265",
		"a\x7fb":            `its host is "a\x7fb"`,
		"http://http://x:1": "it has more than a host and a port",
	} {
		_, err := New(addr)
		require.Error(t, err, addr)
		assert.Equal(t, CodeInvalidArgument, CodeOf(err), addr)
		assert.ErrorContains(t, err, why, addr)
	}
}

// An address that is accepted names one server, and means the same when it is given again.
func FuzzAddresses(f *testing.F) {
	for _, addr := range []string{"", "h", ":1", "[::1]:2", "http://h", "fe80::1%e", "0.0.0.0", "%", "a%zz"} {
		f.Add(addr)
	}
	f.Fuzz(func(t *testing.T, addr string) {
		c, err := New(addr)
		if err != nil {
			return
		}
		again, err := New(c.Addr())
		require.NoError(t, err, c.Addr())
		assert.Equal(t, c.Addr(), again.Addr())
	})
}
