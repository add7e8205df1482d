package simflags

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestFind(t *testing.T) {
	f, isOff, ok := Find("max-num-seqs")
	assert.True(t, ok && !isOff)
	assert.Equal(t, "an integer from 1 to 1048576", f.Wanted())
	f, isOff, ok = Find("no-enable-prefix-caching")
	assert.True(t, ok && isOff && f.Switch)
	for _, name := range []string{"no-max-num-seqs", "no-", "", "sim-sped"} {
		_, _, ok = Find(name)
		assert.False(t, ok, name)
	}
	assert.Contains(t, Names(), "sim-speed")
}

func TestTakes(t *testing.T) {
	for name, values := range map[string]struct{ good, bad []string }{
		"max-num-seqs":          {[]string{"1", "256"}, []string{"0", "-1", "lots", "1.5", "", "2000000"}},
		"sim-speed":             {[]string{"0.5", "1e3"}, []string{"0", "-1", "NaN", "+Inf", "fast"}},
		"sim-startup-s":         {[]string{"0", "2.5"}, []string{"-1", "soon"}},
		"sim-death":             {[]string{"gloo", "nccl"}, []string{"Gloo", ""}},
		"enable-prefix-caching": {nil, []string{"true", "false"}},
		"sim-fail": {
			[]string{"crash", "crash=3@2.5%1", "start-exit-once=/tmp/a", "hang@0"},
			[]string{"", "crsh", "crash=x", "hang=1", "start-exit-once", "hang@soon", "hang@-1"},
		},
	} {
		f, _, ok := Find(name)
		require.True(t, ok, name)
		for _, v := range values.good {
			require.NoError(t, f.Check(v), name)
		}
		for _, v := range values.bad {
			require.Error(t, f.Check(v), "%s %q", name, v)
		}
		assert.NotEmpty(t, f.Wanted())
	}
}

func FuzzParseFault(f *testing.F) {
	f.Add("crash=3@2.5%1")
	f.Fuzz(func(t *testing.T, text string) {
		got, err := ParseFault(text)
		require.True(t, err != nil || got.Mode != "" && got.AfterS >= 0 && got.Rank >= -1)
	})
}
